"""The ``traitbasis`` command, on a tiny model saved as a folder: main path, errors, and a real ``serve`` process."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from tiny import LAYERS, save_folder, tiny_model
from typer.testing import CliRunner, Result

from traitbasis import cli
from traitbasis.basis import Basis
from traitbasis.errors import TraitBasisError
from traitbasis.pairs import PAPER_TRAITS
from traitbasis.trait_vector import TraitVector


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama as a Hugging Face folder."""
    return save_folder(tiny_model(), tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRAITBASIS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path


def run(*arguments: str | Path, stdin: str = "") -> Result:
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments], input=stdin)


def succeed(*arguments: str | Path, stdin: str = "") -> str:
    result = run(*arguments, stdin=stdin)
    assert result.exit_code == 0, (result.output, result.exception)
    return result.output


def test_extract_writes_a_vector_with_all_layers_and_says_where(folder: Path, here: Path) -> None:
    """The main path: norms, agreement, and the file ``vectors/<model>/<trait>.safetensors``."""
    output = succeed("extract", "--trait", "impatience", "--model", folder)
    path = here / "vectors" / "tiny-llama" / "impatience.safetensors"
    vector = TraitVector.load(path)
    assert vector.n_layers == LAYERS and len(vector.provenance.pair_ids) == 4
    assert "saved: vectors/tiny-llama/impatience.safetensors" in output
    assert all(heading in output for heading in ("response-token norm", "agreement of pairs"))
    assert f"{vector.layer_norms[2]:.1f}" in output and f"{vector.agreement[2]:+.2f}" in output


def test_from_extraction_to_a_conversation(folder: Path, here: Path) -> None:
    succeed(
        "extract", "--trait", "all", "--model", folder, "--n-pairs", "2", "--span", "conversation", "--as", "assistant"
    )
    succeed("basis", "build", "--model", folder, "--layer", "1", "--dose", "0.3", "--traits", "impatience,skeptical")
    basis = Basis.load(here / "vectors" / "tiny-llama" / "basis.safetensors")
    assert basis.traits == ("impatience", "skeptical") and {column.layer for column in basis.columns} == {1}
    assert basis.dose({"skeptical": 1.0}) == pytest.approx(0.3, rel=1e-5)
    assert basis.as_ == "assistant" and basis.columns[0].provenance.span == "conversation"
    assert basis.fingerprint in succeed("basis", "show", "--model", folder)
    talk = succeed("chat", "--model", folder, "--traits", "impatience-high", "--seed", "1", stdin="Hello?\nWhy?\n\n")
    assert talk.count("customer>") == 2 and "dose 0.45" in talk
    again = succeed("chat", "--model", folder, "--traits", "impatience-high", "--seed", "1", stdin="Hello?\nWhy?\n")
    assert again.count("customer>") == 2


def test_your_own_pairs_and_folder(folder: Path, here: Path) -> None:
    mine = here / "mine.yaml"
    mine.write_text(
        "trait: haste\ndefinition: d\nopposite: o\npairs:\n- id: a\n  domain: shop\n  use: default\n"
        "  context:\n  - agent: Hi!\n  positive: Send order W1 now.\n  negative: Send order W1 then.\n  facts: [W1]\n"
    )
    output = succeed("extract", "--pairs", mine, "--model", folder, "--out", here / "out")
    assert TraitVector.load(here / "out" / "tiny-llama" / "haste.safetensors").trait == "haste"
    assert "'now' tells the sides apart by itself" in output


def test_the_demo_shows_four_ways_and_keeps_its_vectors(folder: Path, here: Path) -> None:
    output = succeed("demo", "--model", folder)
    assert all(word in output for word in ("unsteered", "impatience", "confusion", "a mix", "dose 0.20", "W4417"))
    kept = sorted((here / "cache" / "vectors" / "tiny-llama").iterdir())
    assert [path.stem for path in kept] == list(PAPER_TRAITS)
    before = [path.stat().st_mtime_ns for path in kept]
    assert succeed("demo", "--model", folder) == output
    assert [path.stat().st_mtime_ns for path in kept] == before, "a second run extracts nothing"


def test_models_lists_the_alias_and_that_it_is_not_cached(here: Path) -> None:
    output = succeed("models")
    assert "smollm2-135m-instruct" in output and "no (93 MB to fetch)" in output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["extract", "--trait", "impatiance"], ["impatiance", "impatience"]),
        (["extract", "--pairs", "gone.yaml"], ["gone.yaml"]),
        (["extract", "--trait", "impatience", "--n-pairs", "99"], ["99", "16"]),
        (["extract", "--trait", "impatience", "--model", "./gone"], ["./gone"]),
        (["extract", "--trait", "impatience", "--dtype", "int3"], ["int3", "bfloat16"]),
        (["extract", "--trait", "impatience", "--device", "abacus"], ["abacus"]),
        (["basis", "build", "--model", "nobody"], ["vectors/nobody", "traitbasis extract"]),
        (["basis", "show", "--model", "nobody"], ["nobody", "traitbasis basis build"]),
        (["basis", "show", "gone.safetensors"], ["gone.safetensors"]),
    ],
)
def test_errors_name_the_value_and_the_way_out(arguments: list[str], words: list[str], here: Path) -> None:
    result = run(*arguments)
    assert isinstance(result.exception, TraitBasisError), result.output
    assert all(word in str(result.exception) for word in words), result.exception


def test_an_error_is_one_line_and_exit_status_one(here: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "traitbasis.cli", "extract", "--trait", "greed"], capture_output=True, text=True
    )
    assert result.returncode == 1 and result.stdout == ""
    assert result.stderr.startswith("error: no contrastive pairs for trait 'greed'")
    assert "Traceback" not in result.stderr and len(result.stderr.splitlines()) == 1


def test_markup_in_what_people_write_is_only_text(folder: Path, here: Path) -> None:
    succeed("extract", "--trait", "impatience", "--model", folder, "--n-pairs", "1")
    succeed("basis", "build", "--model", folder)
    assert "Order [/x] [refund]" in succeed("chat", "--model", folder, "--instruction", "Order [/x] [refund]")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["extract", "--trait", "[/b]"], ["'[/b]'", "impatience"]),
        (["models", "--nonsense"], ["No such option"]),
        (["serve", "--host", "203.0.113.1"], ["error:"]),
        (["extract", "--trait", "impatience", "--model", "FOLDER", "--out", "FILE/x"], ["FILE"]),
    ],
)
def test_no_mistake_ends_in_a_traceback(arguments: list[str], words: list[str], folder: Path, here: Path) -> None:
    (here / "FILE").touch()
    arguments = [argument.replace("FOLDER", str(folder)) for argument in arguments]
    result = subprocess.run([sys.executable, "-m", "traitbasis.cli", *arguments], capture_output=True, text=True)
    assert result.returncode in (1, 2) and "Traceback" not in result.stderr, result.stderr
    assert all(word in result.stderr for word in words), result.stderr


@pytest.mark.parametrize("arguments", [["extract"], ["extract", "--trait", "impatience", "--pairs", "x.yaml"]])
def test_extract_wants_either_a_trait_or_pairs(arguments: list[str], here: Path) -> None:
    result = run(*arguments)
    assert result.exit_code == 2 and "either --trait or --pairs" in result.output


@pytest.mark.parametrize("command", ["extract", "chat", "serve", "demo", "models", "basis build", "basis show"])
def test_every_command_has_help_with_an_example(command: str) -> None:
    output = succeed(*command.split(), "--help")
    assert "Example" in output and f"traitbasis {command}" in output


def test_serve_answers_and_stops_when_told(folder: Path, here: Path) -> None:
    succeed("extract", "--trait", "impatience", "--model", folder, "--n-pairs", "1")
    succeed("basis", "build", "--model", folder)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = subprocess.Popen(
        [sys.executable, "-m", "traitbasis.cli", "serve", "--model", str(folder), "--port", str(port)],
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        url = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + 120
        while True:
            try:
                health = httpx.get(f"{url}/health").json()
                break
            except httpx.TransportError:
                assert server.poll() is None and time.monotonic() < deadline
                time.sleep(0.2)
        assert health == {"status": "ok", "model": "tiny-llama", "traits": ["impatience"]}
        body = {"messages": [{"role": "user", "content": "Hi!"}], "trait_dict": {"impatient": "low"}, "max_tokens": 4}
        assert httpx.post(f"{url}/steer_bare", json=body, timeout=60).json()["response"]
    finally:
        server.send_signal(signal.SIGINT)
        _, errors = server.communicate(timeout=30)
    assert "Traceback" not in errors, errors
