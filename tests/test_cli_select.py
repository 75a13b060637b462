"""``traitbasis select`` and ``calibrate`` as commands: several processes, a kill in the middle, and what is written."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from samples import lettered_set, to_yaml
from tiny import save_folder, tiny_model

from traitbasis.basis import Basis
from traitbasis.select import read_selection
from traitbasis.sweep import Cell, read_cells

TRAITS = ("loud", "quiet", "plain")
SHORT = ("--layers", "1,2", "--doses", "0.1,0.3", "--turns", "3", "--max-tokens", "8", "--dtype", "float32")


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model and three pair files."""
    folder = tmp_path_factory.mktemp("select")
    save_folder(tiny_model(), folder / "tiny-llama")
    for trait, letter in zip(TRAITS, "xyz", strict=True):
        document = lettered_set(trait, letter, 14).model_dump(mode="json", exclude={"family"})
        for pair in document["pairs"]:
            pair["context"] = [{turn["speaker"]: turn["text"]} for turn in pair["context"]]
        (folder / f"{trait}.yaml").write_text(to_yaml(document), encoding="utf-8")
    return folder


def start(here: Path, *arguments: str) -> subprocess.Popen[str]:
    files = [option for trait in TRAITS for option in ("--pairs", f"{trait}.yaml")]
    command = [sys.executable, "-m", "traitbasis.cli", *arguments, *files, "--model", "tiny-llama"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    return subprocess.Popen(
        command, cwd=here, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def succeed(here: Path, *arguments: str) -> str:
    process = start(here, *arguments)
    output, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    return output


def cells(here: Path, out: str) -> dict[str, list[Cell]]:
    folder = here / out / "tiny-llama" / "selection"
    return {path.stem: read_cells(path)[1] for path in sorted(folder.glob("*.jsonl"))}


def texts(here: Path, out: str) -> dict[Any, list[str]]:
    return {
        (name, cell.spec): [turn.text for turn in cell.turns]
        for name, found in cells(here, out).items()
        for cell in found
    }


def children(parent: int) -> list[int]:
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(parent)], capture_output=True, text=True)
    return [int(pid) for pid in found.stdout.split()]


def alive(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status")
    return status.exists() and "State:\tZ" not in status.read_text()


@pytest.fixture(scope="module")
def alone(here: Path) -> str:
    """Selected by one process."""
    return succeed(here, "select", *SHORT, "--jobs", "1", "--out", "alone", "--report", "report.html")


def test_a_selection_is_written_with_what_made_it(here: Path, alone: str) -> None:
    content = json.loads((here / "alone" / "tiny-llama" / "selection.json").read_text())
    assert set(content["traits"]) == set(TRAITS)
    made_by = content["traits"]["loud"]["made_by"]
    assert made_by["turns"] == 3 and made_by["model"] == "tiny-llama" and made_by["model_fingerprint"]
    for trait in TRAITS:
        selection = read_selection(content["traits"][trait])
        assert [(s.layer, s.dose) for s in selection.summaries] == [(1, 0.1), (1, 0.3), (2, 0.1), (2, 0.3)]
        assert trait in alone
    report = (here / "report.html").read_text(encoding="utf-8")
    assert all(trait in report for trait in TRAITS) and "<svg" in report


def test_two_processes_find_what_one_finds(here: Path, alone: str) -> None:
    succeed(here, "select", *SHORT, "--jobs", "2", "--out", "two")
    assert texts(here, "two") == texts(here, "alone")
    one, two = (json.loads((here / out / "tiny-llama" / "selection.json").read_text()) for out in ("alone", "two"))
    for trait in TRAITS:
        mine, others = (read_selection(content["traits"][trait]) for content in (one, two))
        assert (mine.layer, mine.dose) == (others.layer, others.dose)
        assert [s.gain for s in mine.summaries] == pytest.approx([s.gain for s in others.summaries], abs=1e-3)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="looks at processes through /proc")
def test_a_killed_selection_leaves_no_process_and_goes_on(here: Path, alone: str) -> None:
    process = start(here, "select", *SHORT, "--jobs", "2", "--out", "killed")
    folder = here / "killed" / "tiny-llama" / "selection"
    deadline = time.monotonic() + 240
    while not any(read_cells(path)[1] for path in folder.glob("*.jsonl")):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    workers = children(process.pid)
    assert len(workers) >= 2
    process.send_signal(signal.SIGKILL)
    process.communicate()
    deadline = time.monotonic() + 30
    while any(map(alive, workers)):
        assert time.monotonic() < deadline, "a worker goes on without its parent"
        time.sleep(0.1)
    drawn = texts(here, "killed")
    succeed(here, "select", *SHORT, "--jobs", "2", "--out", "killed")
    assert texts(here, "killed") == texts(here, "alone")
    assert drawn.items() <= texts(here, "alone").items()


def test_calibration_writes_a_basis_with_levels_and_limits(here: Path, alone: str) -> None:
    doses = ("--doses", "0.05,0.1,0.2", "--turns", "3", "--max-tokens", "8", "--dtype", "float32")
    output = succeed(here, "calibrate", *doses, "--jobs", "1", "--out", "alone")
    basis = Basis.load(here / "alone" / "tiny-llama" / "basis.safetensors")
    chosen = json.loads((here / "alone" / "tiny-llama" / "selection.json").read_text())["traits"]
    assert set(basis.traits) == set(TRAITS)
    for column in basis.columns:
        assert 0 < column.low < 1 < column.high and column.limit and column.curve
        assert column.steerable == (chosen[column.trait]["layer"] is not None)
        assert column.trait in output
    again = succeed(here, "calibrate", *doses, "--jobs", "2", "--out", "alone")
    assert Basis.load(here / "alone" / "tiny-llama" / "basis.safetensors").fingerprint == basis.fingerprint
    assert again == output


def test_changed_pairs_and_another_model_are_not_calibrated_with_the_old_choice(here: Path, alone: str) -> None:
    path = here / "alone" / "tiny-llama" / "selection.json"
    before = path.read_text()
    for name, value, said in (("pairs", "0" * 64, "have changed"), ("model_fingerprint", "0" * 16, "another model")):
        content = json.loads(before)
        content["traits"]["loud"]["made_by"][name] = value
        path.write_text(json.dumps(content))
        process = start(here, "calibrate", "--doses", "0.1", "--jobs", "1", "--out", "alone")
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 1 and "loud" in errors and said in " ".join(errors.split()), errors
    path.write_text(before)


def test_a_trait_that_was_not_selected_cannot_be_calibrated(here: Path, alone: str) -> None:
    process = subprocess.run(
        [
            sys.executable,
            "-m",
            "traitbasis.cli",
            "calibrate",
            "--trait",
            "polite",
            "--model",
            "tiny-llama",
            "--out",
            "alone",
        ],
        cwd=here,
        capture_output=True,
        text=True,
    )
    assert process.returncode == 1 and "polite" in process.stderr and "traitbasis select" in process.stderr
