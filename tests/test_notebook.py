"""The notebook, executed with short settings on a tiny model; and what is committed of a full run."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import nbformat
import pytest
from tiny import save_folder, tiny_model

from traitbasis.contexts import read_contexts
from traitbasis.model import load_model
from traitbasis.pairs import load_pairs
from traitbasis.select import Selection, Selector, read_selection, read_selections
from traitbasis.sweep import Generator

FOLDER = Path(__file__).parents[1] / "experiments"
NOTEBOOK = FOLDER / "layer_sweep.ipynb"
SETTINGS = {
    "TRAITS": "impatience",
    "LAYERS": "1,2",
    "DOSES": "0.2",
    "TURNS": "4",
    "SEED": "5",
    "DTYPE": "float32",
    "CURVE": "0.1,0.2",
}

sys.path.insert(0, str(FOLDER))
from execute_notebook import code_hash, execute  # noqa: E402


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_folder(tiny_model(), tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the notebook puts what it measures."""
    return tmp_path_factory.mktemp("sweep")


@pytest.fixture(scope="module")
def notebook(model: Path, home: Path) -> Any:
    """As it stands after a run by the script that also makes the committed one."""
    given = {"MODEL": str(model), "FOLDER": str(home), **SETTINGS}
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRAITBASIS_")}
    environment |= {f"TRAITBASIS_NOTEBOOK_{name}": value for name, value in given.items()}
    environment |= {"OMP_NUM_THREADS": "1", "IPYTHONDIR": str(home / "ipython")}
    out = home / "executed.ipynb"
    command = [sys.executable, str(FOLDER / "execute_notebook.py"), "--out", str(out)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return nbformat.read(out, as_version=4)


@pytest.fixture(scope="module")
def selection(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Selection:
    """The same measured without the notebook."""
    with Generator(load_model(str(model)), read_contexts(), turns=4, seed=5) as generator:
        selector = Selector(generator, tmp_path_factory.mktemp("direct"), layers=[1, 2], doses=[0.2])
        return selector.select(load_pairs("impatience"))


def cell(notebook: Any, name: str) -> Any:
    (found,) = [cell for cell in notebook.cells if cell.id == name]
    return found


def printed(notebook: Any, name: str) -> str:
    return "".join(output.text for output in cell(notebook, name).outputs if output.output_type == "stream")


def images(notebook: Any, name: str) -> list[Any]:
    return [output for output in cell(notebook, name).outputs if "image/png" in output.get("data", {})]


def test_every_figure_is_an_image_with_a_text_for_it(notebook: Any) -> None:
    for name in ("screening", "likelihood", "turns", "calibration"):
        (output,) = images(notebook, name)
        data = base64.b64decode(output.data["image/png"])
        width, height = int.from_bytes(data[16:20]), int.from_bytes(data[20:24])
        assert data.startswith(b"\x89PNG") and width > 400 and height > 400
        assert "impatience" in output.metadata["image/png"]["alt"]


def test_the_table_has_the_numbers_of_the_selection(notebook: Any, selection: Selection) -> None:
    lines = printed(notebook, "choice").splitlines()
    rows = [line.split() for line in lines if line.strip().startswith(("steered", "prompted"))]
    prompted, *steered = rows
    assert prompted[1] == f"{selection.prompted.gain:+.2f}"
    assert len(steered) == len(selection.summaries) == 2
    for row, summary, random in zip(steered, selection.summaries, selection.random, strict=True):
        expected = (summary.gain, summary.low, summary.high, random.gain, summary.facts, summary.fact_cost)
        numbers = [float(text.strip("()")) for text in row[3:11] if text != "to"]
        assert (row[1], row[2]) == (str(summary.layer), "0.2")
        assert numbers[:6] == [round(value or 0.0, 2) for value in expected]
        assert row[10:12] == [f"{summary.broken:.2f}", f"{summary.surprise:.2f}"]
        assert row[12] == ("rejected:" if summary.rejected else "chosen" if selection.steerable else "keeps")


def test_the_choice_is_printed_with_its_reason(notebook: Any, selection: Selection) -> None:
    last = printed(notebook, "choice").splitlines()[-1]
    found = f"layer {selection.layer}, dose {selection.dose}" if selection.steerable else "not steerable on this model"
    assert last == f"impatience: {found} ({selection.reason})"


def test_turns_of_all_conditions_stand_below_the_curve(notebook: Any, home: Path) -> None:
    text = printed(notebook, "turns")
    contexts = read_contexts()[:3]
    assert all(text.count(f"{context.id}, seed ") == 1 for context in contexts)
    lines = text.splitlines()
    for condition in ("steered", "unsteered", "prompted", "random"):
        assert sum(line.strip().startswith(f"{condition}: ") for line in lines) == 3


def test_what_is_saved_is_named_and_holds_the_selection(notebook: Any, home: Path, selection: Selection) -> None:
    paths = [home / line for line in printed(notebook, "artifacts").splitlines()]
    assert {path.name for path in paths} >= {"impatience.safetensors", "selection.json", "report.html"}
    assert all(path.is_file() for path in paths)
    saved = read_selection(read_selections(home / "tiny-llama" / "selection.json")["impatience"])
    assert json.dumps(asdict(saved)) == json.dumps(asdict(selection))


def test_nothing_but_results_is_in_the_outputs(notebook: Any, home: Path) -> None:
    """No warning, and no path of the machine that it ran on."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert {output.output_type for output in outputs} == {"stream", "display_data"}
    assert all(output.get("name", "stdout") == "stdout" for output in outputs)
    assert str(home) not in json.dumps(outputs) and sys.prefix not in json.dumps(outputs)


def test_a_run_says_what_code_and_settings_made_it(notebook: Any) -> None:
    made = notebook.metadata["traitbasis"]
    assert made["code"] == code_hash(nbformat.read(NOTEBOOK, as_version=4)) == code_hash(notebook)
    assert made["settings"]["TRAITBASIS_NOTEBOOK_TURNS"] == "4"


def test_a_run_that_fails_writes_nothing(tmp_path: Path) -> None:
    broken = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("1 / 0")])
    nbformat.write(broken, tmp_path / "broken.ipynb")
    with pytest.raises(Exception, match="ZeroDivisionError"):
        execute(tmp_path / "broken.ipynb", tmp_path / "out.ipynb")
    assert [path.name for path in tmp_path.iterdir()] == ["broken.ipynb"]


def test_the_committed_outputs_come_from_the_committed_code_in_full() -> None:
    """Without outputs there is nothing to hold against it."""
    committed = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(committed)
    code = [cell for cell in committed.cells if cell.cell_type == "code"]
    if not any(cell.outputs for cell in code):
        assert all(cell.execution_count is None for cell in code)
        return
    made = committed.metadata["traitbasis"]
    assert made["code"] == code_hash(committed), "the code was changed since; run experiments/execute_notebook.py"
    assert made["settings"] == {}, "a run with other settings than the notebook's own"
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell.outputs]
    assert all(output.output_type in ("stream", "display_data") for output in outputs)
    assert all(output.get("name", "stdout") == "stdout" for output in outputs)
    assert all(images(committed, name) for name in ("screening", "likelihood", "turns", "calibration"))
    assert "impatience: " in printed(committed, "choice").splitlines()[-1]
