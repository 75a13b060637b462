"""Every method behind the same endpoint: `traitbasis serve`, started for a method and ended again.

    with served("sft", folder, conditions) as endpoints:
        for endpoint in endpoints:
            collect(endpoint.url, endpoint.model_template, endpoint.conditions)

What a method needs lies in one folder: ``sft/`` and ``adapters/<trait>/`` from training; ``users.yaml``,
``random.safetensors`` and the merged adapters are made when they are served.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from traitbasis.basis import Basis, basis_path
from traitbasis.chat import check_choice
from traitbasis.dialogues import spec_of
from traitbasis.embedded import DEFAULT_MODEL
from traitbasis.errors import EvaluationError
from traitbasis.model import model_slug

from .random_basis import random_basis
from .train import BASIS, merge, read_record
from .users import condition_name, pair_sets_of, traits_of, write_users

Method = Literal["unsteered", "prompted", "random", "sft", "lora", "steered"]
METHODS: tuple[Method, ...] = get_args(Method)
START_SECONDS = 600  # a first start may fetch the model


@dataclass(frozen=True)
class Served:
    """A running endpoint.

    url: with the ``/v1`` that OpenAI clients want. model_template: of the model id, as `traitbasis eval collect` takes
    it: ``{spec}`` stands for ``impatience-high+skeptical-low``, nothing for a neutral customer, and ``{name}`` for the
    same with a dot, or ``neutral``. conditions: level by trait, of each condition that may be asked for here.
    """

    url: str
    model_template: str
    conditions: tuple[Mapping[str, str], ...]

    def model(self, traits: Mapping[str, str]) -> str:
        """The model id of one condition."""
        return self.model_template.format(spec=spec_of(traits), name=condition_name(traits))


@contextmanager
def served(
    method: Method,
    folder: Path,
    conditions: Sequence[Mapping[str, str]],
    *,
    model: str = DEFAULT_MODEL,
    basis: Path | None = None,
    seed: int = 0,
    port: int | None = None,
    options: Sequence[str] = (),
) -> Iterator[Generator[Served]]:
    """Endpoints of a method, one after the other; each runs until the next is asked for.

    All methods but ``lora`` have one endpoint for all conditions; ``lora`` has one for each condition, with that
    condition's adapters merged in. conditions: level by trait; an empty one is a neutral customer, and ``unsteered``
    has no other, whatever is asked for. basis: of
    ``steered`` and ``random``, the model's own by default. seed: of the random directions. options: more of
    `traitbasis serve`, such as ``("--dtype", "bfloat16")``.
    Raises EvaluationError when a trained model is missing or the server does not start, with the end of its log.
    """
    check_choice("method", method, Method)
    endpoints = _endpoints(method, folder, conditions, model, basis, seed, port, options)
    with closing(endpoints):
        yield endpoints


def _endpoints(
    method: Method,
    folder: Path,
    conditions: Sequence[Mapping[str, str]],
    model: str,
    basis: Path | None,
    seed: int,
    port: int | None,
    options: Sequence[str],
) -> Generator[Served]:
    conditions = ({},) if method == "unsteered" else tuple(conditions)
    log = folder / f"serve-{method}.log"
    folder.mkdir(parents=True, exist_ok=True)
    steered, traits = "steered-user@{spec}", traits_of(conditions)
    if method == "lora":
        adapters = {trait: folder / "adapters" / trait for trait in traits}
        merged = folder / "merged"
        try:
            for condition in conditions:
                merge(adapters, condition, merged, pair_sets_of(traits or ["impatience"]), model=model)
                users = write_users(folder / "users-lora.yaml", [condition], {}, "lora")
                arguments: list[str | Path] = ["--model", merged, "--basis", merged / BASIS, "--users", users, *options]
                with _running(arguments, port, log) as url:
                    yield Served(url, "lora-{name}", (condition,))
        finally:
            shutil.rmtree(merged, ignore_errors=True)
        return
    command: list[str | Path] = ["--model", model]
    if basis:
        command += ["--basis", basis]
    template = {"steered": steered, "random": steered, "unsteered": "steered-user@"}.get(method, "prompted-{name}")
    if method == "random":
        real = Basis.load(basis or basis_path(model_slug(model)))
        path = random_basis(real, seed).save(folder / f"random-{seed}.safetensors")
        command = ["--model", model, "--basis", path]
    if method == "sft":
        tuned = folder / "sft"
        read_record(tuned)
        command = ["--model", tuned, "--basis", tuned / BASIS]
    if method in ("prompted", "sft"):
        command += ["--users", write_users(folder / "users.yaml", conditions, pair_sets_of(traits))]
    with _running([*command, *options], port, log) as url:
        yield Served(url, template, conditions)


@contextmanager
def _running(arguments: Sequence[str | Path], port: int | None, log: Path) -> Iterator[str]:
    """`traitbasis serve` on `port` or a free one, ready; yields the URL that clients want."""
    if port is None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
    command = [sys.executable, "-m", "traitbasis.cli", "serve", "--port", str(port), *map(str, arguments)]
    with log.open("wb") as file:
        server = subprocess.Popen(command, stdout=file, stderr=file)
        try:
            url = f"http://127.0.0.1:{port}"
            if not _ready(f"{url}/ready", server):
                raise EvaluationError(f"traitbasis serve did not start:\n{_end(log)}")
            yield f"{url}/v1"
            if server.poll() is not None:
                raise EvaluationError(f"traitbasis serve ended by itself:\n{_end(log)}")
        finally:
            server.terminate()
            try:
                server.wait(60)
            except subprocess.TimeoutExpired:
                server.kill()


def _ready(url: str, server: subprocess.Popen[bytes]) -> bool:
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    deadline = time.monotonic() + START_SECONDS
    while server.poll() is None and time.monotonic() < deadline:
        try:
            with direct.open(url, timeout=5):
                return True
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    return False


def _end(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace")[-4000:]
