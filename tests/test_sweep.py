"""The layer sweep: the same cells for the same seed, however often it was killed, and a model that is left alone."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reference import hook_count, plain_reading, push
from samples import sample_contexts, sample_set
from tiny import WIDTH, tiny_model
from torch import Tensor

from traitbasis.chat import Turn
from traitbasis.contexts import EvaluationContext
from traitbasis.engines.base import Request
from traitbasis.errors import EngineError, RequestError, SweepError
from traitbasis.metrics.fidelity import TraitProbe
from traitbasis.metrics.turns import Instruments, stated_facts
from traitbasis.model import LanguageModel
from traitbasis.sweep import (
    UNSTEERED,
    Cell,
    Generator,
    Spec,
    Store,
    SweptTurn,
    persona_prompt,
    random_direction,
    read_cells,
)
from traitbasis.tries import SILENCE

CONTEXTS = sample_contexts(3)
TURNS = 4  # the first context twice
SPECS = [
    UNSTEERED,
    *(Spec("steered", "impatience", layer, dose) for layer in (1, 2) for dose in (0.2, 0.5)),
    Spec("random", None, 1, 0.2),
    Spec("prompted", "impatience"),
]
PERSONA = "Your manner in every message, impatience: presses."
Cells = Callable[..., list[Cell]]


def addition(spec: Spec) -> dict[int, Tensor]:
    """A large one, so that texts differ."""
    return {} if spec.layer is None else push(spec.layer, 60 * spec.dose, seed=spec.condition == "random")


@pytest.fixture(scope="module")
def lm() -> LanguageModel:
    return tiny_model()


@pytest.fixture(scope="module")
def generator(lm: LanguageModel) -> Iterator[Generator]:
    with Generator(lm, CONTEXTS, turns=TURNS, max_tokens=8) as made:
        yield made


@pytest.fixture(scope="module")
def instruments() -> Instruments:
    probe = TraitProbe("impatience", 2, "user", random_direction(WIDTH, 5, 0), 0.25, 0.9)
    return {"impatience": (probe, None)}


def sweep(
    generator: Generator,
    folder: Path,
    instruments: Instruments,
    specs: Sequence[Spec] = SPECS,
    done: Callable[[int], None] = lambda cells: None,
) -> list[Cell]:
    store = Store(folder / "impatience.jsonl", generator.settings)
    return generator.cells(specs, store, addition, instruments, PERSONA, done)


@pytest.fixture(scope="module")
def whole(
    generator: Generator, instruments: Instruments, tmp_path_factory: pytest.TempPathFactory
) -> tuple[bytes, list[Cell]]:
    """A sweep that nobody killed: its file and its cells."""
    folder = tmp_path_factory.mktemp("whole")
    cells = sweep(generator, folder, instruments)
    return (folder / "impatience.jsonl").read_bytes(), cells


def texts_of(cells: Sequence[Cell]) -> list[list[str]]:
    return [[turn.text for turn in cell.turns] for cell in cells]


def assert_same(cells: Sequence[Cell], others: Sequence[Cell]) -> None:
    """Texts are the same; scores, which are rounded to four digits, to one of the last: batches differ."""
    assert [cell.spec for cell in cells] == [cell.spec for cell in others]
    assert texts_of(cells) == texts_of(others)
    for cell, other in zip(cells, others, strict=True):
        for turn, again in zip(cell.turns, other.turns, strict=True):
            assert (turn.context, turn.seed, turn.scores.keys()) == (again.context, again.seed, again.scores.keys())
            for name in turn.scores:
                assert turn.scores[name] == pytest.approx(again.scores[name], abs=2e-4)


# --- what is drawn ----------------------------------------------------------------------------------------------------


def test_the_same_seed_draws_the_same_cells_and_another_seed_others(
    lm: LanguageModel, whole: tuple[bytes, list[Cell]], instruments: Instruments, tmp_path: Path
) -> None:
    with Generator(lm, CONTEXTS, turns=TURNS, max_tokens=8) as generator:
        again = sweep(generator, tmp_path / "a", instruments)
    assert again == whole[1] and (tmp_path / "a" / "impatience.jsonl").read_bytes() == whole[0]
    with Generator(lm, CONTEXTS, turns=TURNS, max_tokens=8, seed=1) as generator:
        other = sweep(generator, tmp_path / "b", instruments)
    assert all(a != b for a, b in zip(texts_of(other), texts_of(whole[1]), strict=True))
    assert not {t.seed for cell in other for t in cell.turns} & {t.seed for cell in again for t in cell.turns}


def test_a_cell_does_not_depend_on_those_drawn_with_it(
    generator: Generator, whole: tuple[bytes, list[Cell]], instruments: Instruments, tmp_path: Path
) -> None:
    """Contract 3."""
    for spec, expected in zip(SPECS[::-1], whole[1][::-1], strict=True):
        assert_same(sweep(generator, tmp_path / "one", instruments, [spec]), [expected])
    assert_same(sweep(generator, tmp_path / "turned", instruments, SPECS[::-1]), whole[1][::-1])


def test_cells_are_compared_turn_by_turn(whole: tuple[bytes, list[Cell]]) -> None:
    """Same contexts, same seeds, same order; a context that comes again has another seed."""
    drawn = {tuple((turn.context, turn.seed) for turn in cell.turns) for cell in whole[1]}
    assert len(drawn) == 1
    (cases,) = drawn
    assert [context for context, _ in cases] == ["task-0", "task-1", "task-2", "task-0"]
    assert len({seed for _, seed in cases}) == TURNS


def test_every_condition_says_something_else(whole: tuple[bytes, list[Cell]]) -> None:
    texts = [tuple(cell) for cell in texts_of(whole[1])]
    assert len(set(texts)) == len(texts)
    assert all(text.strip() for cell in texts for text in cell)


def test_the_scores_are_those_of_the_turns_read_alone(lm: LanguageModel, whole: tuple[bytes, list[Cell]]) -> None:
    """Re-read without steering, whatever they were drawn with; compared with plain forwards."""
    direction = random_direction(WIDTH, 5, 0).double().numpy()
    for cell in (whole[1][0], whole[1][4]):
        for i, turn in enumerate(cell.turns):
            own, other = (plain_reading(lm, CONTEXTS[n % 3].turns, turn.text, {}) for n in (i % 3, i % 3 + 1))
            assert turn.scores["surprise"] == pytest.approx(-own.logprobs.mean(), abs=1e-3)
            expected = own.logprobs.mean() - other.logprobs.mean()
            assert turn.scores["relevance"] == pytest.approx(expected, abs=1e-3)
            assert turn.scores["probe:impatience"] == pytest.approx(own.states[2] @ direction - 0.25, abs=1e-3)
            assert turn.scores["words"] == len(turn.text.split())
            assert {turn.scores["broken"], turn.scores["role_flip"]} <= {0.0, 1.0}


def test_only_the_prompted_user_is_told_of_the_trait(
    generator: Generator, instruments: Instruments, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests: list[Request] = []
    submit = generator._engine.submit

    def record(request: Request, *arguments: Any, **keywords: Any) -> Any:
        requests.append(request)
        return submit(request, *arguments, **keywords)

    monkeypatch.setattr(generator._engine, "submit", record)
    sweep(generator, tmp_path, instruments)
    assert len(requests) == len(SPECS) * TURNS
    for spec, start in zip(SPECS, range(0, len(requests), TURNS), strict=True):
        for number, request in enumerate(requests[start : start + TURNS]):
            prompt = generator.lm.tokenizer.decode(request.prompt_ids)
            assert prompt.count(f"W{number % 3}.") == 1
            told = f"You bought lamp W{number % 3}.\n\n{PERSONA}" in prompt
            assert told == (spec.condition == "prompted") == ("presses" in prompt)
            expected = addition(spec)
            assert request.additions.keys() == expected.keys(), "a user with a prompt is not steered"
            assert all(torch.equal(request.additions[z], expected[z]) for z in expected)
            assert request.seed == generator.cases[number][1]


def test_the_persona_is_the_definition_under_the_traits_name() -> None:
    made = sample_set().model_copy(update={"trait": "mind_changing", "definition": "Asks for something else."})
    prompt = persona_prompt(made)
    assert "mind changing" in prompt and "Asks for something else." in prompt and "_" not in prompt


def test_an_empty_turn_is_said_as_a_pause(generator: Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    stop = frozenset(range(generator.lm.vocabulary))
    monkeypatch.setattr(LanguageModel, "stop_ids", lambda self, as_: stop)
    assert generator.draw([{}], [""]) == [[SILENCE] * TURNS]


def test_a_random_direction_is_a_unit_and_the_same_for_a_layer_and_a_seed() -> None:
    made = {(z, seed): random_direction(64, z, seed) for z in range(4) for seed in range(3)}
    for (z, seed), direction in made.items():
        assert float(direction.norm()) == pytest.approx(1, abs=1e-6)
        assert torch.equal(direction, random_direction(64, z, seed))
    stacked = torch.stack(list(made.values()))
    cosines = (stacked @ stacked.T - torch.eye(len(made))).abs()
    assert float(cosines.max()) < 0.6, "no two are alike"
    assert abs(float(stacked.sum(1).mean())) < 1, "they point in no direction on average"


@pytest.mark.parametrize(
    ("text", "facts", "share"),
    [
        ("order w1 of 4\n May", ["W1", "4 May"], 1.0),
        ("order W1", ["W1", "4 May"], 0.5),
        ("STRASSE 5", ["Straße 5"], 1.0),
        ("nothing", ["W1"], 0.0),
        ("nothing", [], 1.0),
    ],
)
def test_facts_are_stated_when_they_stand_in_the_text(text: str, facts: list[str], share: float) -> None:
    assert stated_facts(text, facts) == share


# --- a sweep that was killed ------------------------------------------------------------------------------------------


def test_a_killed_sweep_goes_on_and_ends_with_the_same_cells(
    generator: Generator, whole: tuple[bytes, list[Cell]], instruments: Instruments, tmp_path: Path
) -> None:
    content, expected = whole
    begin, path = content.index(b"\n") + 1, tmp_path / "impatience.jsonl"
    lines = [begin, *(i + 1 for i in range(begin, len(content)) if content[i : i + 1] == b"\n")]
    for cut in (begin, begin + 1, lines[1] - 1, lines[1], lines[2] + 40, lines[-2], len(content) - 1, len(content)):
        path.write_bytes(content[:cut])
        steps: list[int] = []
        assert_same(sweep(generator, tmp_path, instruments, done=steps.append), expected)
        kept = sum(end <= cut for end in lines[1:])
        assert steps[0] == kept and sum(steps) == len(SPECS), "progress begins where the sweep does"
        assert read_cells(path)[0] == {"format": "traitbasis.sweep/1", **generator.settings}
        assert_same(read_cells(path)[1], expected)


def test_what_is_there_is_not_drawn_again(
    generator: Generator, whole: tuple[bytes, list[Cell]], instruments: Instruments, tmp_path: Path
) -> None:
    (tmp_path / "impatience.jsonl").write_bytes(whole[0])
    before = generator._engine.stats().prompt_tokens
    assert sweep(generator, tmp_path, instruments) == whole[1]
    assert sweep(generator, tmp_path, instruments, SPECS[3:1:-1]) == whole[1][3:1:-1]
    assert generator._engine.stats().prompt_tokens == before
    assert (tmp_path / "impatience.jsonl").read_bytes() == whole[0]


def test_an_interrupted_sweep_keeps_what_was_measured(
    generator: Generator,
    whole: tuple[bytes, list[Cell]],
    instruments: Instruments,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Killed between two groups of cells, and between two lines of one group."""
    monkeypatch.setattr("traitbasis.sweep._GROUP", 2)
    appended: list[Mapping[str, Any]] = []
    append = Store.append

    def stop_at_the_fourth(self: Store, line: Mapping[str, Any]) -> None:
        if len(appended) == 3:
            raise KeyboardInterrupt
        appended.append(line)
        append(self, line)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Store, "append", stop_at_the_fourth)
        sweep(generator, tmp_path, instruments)
    assert len(read_cells(tmp_path / "impatience.jsonl")[1]) == 3
    assert_same(sweep(generator, tmp_path, instruments), whole[1])


# --- the store --------------------------------------------------------------------------------------------------------

HEADER = {"model": "tiny", "seed": 0, "temperature": 0.7, "doses": [0.1, 0.2]}
turns = st.builds(
    SweptTurn,
    st.text(max_size=6),
    st.integers(0, 2**63 - 1),
    st.text(max_size=20),
    st.dictionaries(st.sampled_from(["surprise", "facts"]), st.floats(allow_nan=False), min_size=1),
)
cells = st.builds(
    Cell,
    st.sampled_from(["steered", "random"]),
    st.sampled_from(["impatience", None]),
    st.integers(0, 40),
    st.floats(0.01, 5),
    st.lists(turns, max_size=3).map(tuple),
)


def stored(path: Path, made: Sequence[Cell]) -> Store:
    store = Store(path, HEADER)
    for cell in made:
        store.append(asdict(cell))
    return store


@given(st.lists(cells, min_size=1, max_size=4, unique_by=lambda cell: cell.spec), st.data())
def test_a_file_cut_anywhere_behind_its_header_keeps_its_whole_lines(
    tmp_path_factory: pytest.TempPathFactory, made: list[Cell], data: st.DataObject
) -> None:
    """And ends as the same file, byte for byte, when what is missing is written again."""
    path = tmp_path_factory.mktemp("cut") / "a.jsonl"
    assert list(stored(path, made).cells.values()) == made
    content = path.read_bytes()
    cut = data.draw(st.integers(content.index(b"\n") + 1, len(content)))
    path.write_bytes(content[:cut])
    store = Store(path, HEADER)
    kept = list(store.cells.values())
    assert kept == made[: len(kept)] and len(kept) == content[:cut].count(b"\n") - 1
    for cell in made[len(kept) :]:
        store.append(asdict(cell))
    assert path.read_bytes() == content
    assert read_cells(path) == ({"format": "traitbasis.sweep/1", **HEADER}, made)


LINE_ENDS = "a\u2028b\u2029c\x85d\x0be\x0cf\r\ng\rh\x1ci\n"


def test_a_text_may_hold_any_line_end(tmp_path: Path) -> None:
    made = [Cell("steered", "impatience", 1, 0.2, (SweptTurn(LINE_ENDS, 1, LINE_ENDS, {"words": 3.0}),))]
    stored(tmp_path / "a.jsonl", made)
    assert list(Store(tmp_path / "a.jsonl", HEADER).cells.values()) == made == read_cells(tmp_path / "a.jsonl")[1]


def test_a_store_that_is_opened_twice_loses_nothing(tmp_path: Path) -> None:
    """Two runs at once, or a select while the other is calibrated: both write whole lines."""
    path = tmp_path / "a.jsonl"
    one, other = Store(path, HEADER), Store(path, HEADER)
    made = [Cell("steered", "impatience", z, 0.2, (SweptTurn("t", z, "x" * 20_000, {}),)) for z in range(20)]

    def write(store: Store, mine: Sequence[Cell]) -> None:
        for cell in mine:
            store.append(asdict(cell))

    threads = [threading.Thread(target=write, args=each) for each in ((one, made[::2]), (other, made[1::2]))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(one.cells) == len(other.cells) == 10
    again = Store(path, HEADER)
    assert again.cells == {cell.spec: cell for cell in made} and len(again.lines) == 20


def test_a_cell_that_stands_twice_is_the_later_one(tmp_path: Path) -> None:
    first, second = (Cell("random", None, 1, 0.2, (SweptTurn("t", 0, text, {}),)) for text in "ab")
    assert stored(tmp_path / "a.jsonl", [first, second]).cells == {first.spec: second}


def test_other_lines_are_found_by_kind_and_are_no_cells(tmp_path: Path) -> None:
    store = stored(tmp_path / "a.jsonl", [])
    for number in range(2):
        store.append({"kind": "selection", "number": number})
        store.append({"kind": "likelihood", "number": 9})
    for opened in (store, Store(tmp_path / "a.jsonl", HEADER)):
        assert opened.find("selection") == {"kind": "selection", "number": 1}
        assert opened.find("else") is None and opened.cells == {}
    assert read_cells(tmp_path / "a.jsonl")[1] == []


@pytest.mark.parametrize(
    "changed", [{"seed": 1}, {"model": "other", "temperature": 0.0}, {"more": None}, {"doses": []}]
)
def test_other_settings_are_refused_by_name(tmp_path: Path, changed: dict[str, Any]) -> None:
    path = tmp_path / "a.jsonl"
    content = stored(path, []).path.read_bytes()
    says = rf"a\.jsonl holds a sweep with other settings \({', '.join(sorted(changed))}\); delete the folder"
    with pytest.raises(SweepError, match=says):
        Store(path, HEADER | changed)
    assert path.read_bytes() == content, "and nothing is written"
    without = {key: value for key, value in HEADER.items() if key != "seed"}
    with pytest.raises(SweepError, match=r"\(seed\)"):
        Store(path, without)
    Store(path, HEADER)


def test_the_settings_of_a_sweep_are_all_that_its_turns_depend_on(lm: LanguageModel, generator: Generator) -> None:
    changes: dict[str, dict[str, Any]] = {
        "as_": {"as_": "assistant"},
        "turns": {"turns": TURNS + 1},
        "seed": {"seed": 3},
        "max_tokens": {"max_tokens": 9},
        "temperature": {"temperature": 0.1},
        "contexts_hash": {"contexts": CONTEXTS[:2]},
        "model_fingerprint": {"lm": tiny_model(seed=1)},
    }
    for name, change in changes.items():
        arguments = {"lm": lm, "contexts": CONTEXTS, "turns": TURNS, "max_tokens": 8} | change
        with Generator(**arguments) as other:
            different = {key for key in other.settings if other.settings[key] != generator.settings[key]}
        assert different == {name}
    assert json.loads(json.dumps(generator.settings)) == generator.settings


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\n",
        b"{}\n",
        b"[]\n",
        b"null\n",
        b'{"format": 1}',
        b"\xff\n",
        b"{\n",
        b'{"format": "traitbasis.sweep/2"}\n',
    ],
)
def test_a_file_that_is_no_sweep_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    for read in (lambda: Store(path, HEADER), lambda: read_cells(path)):
        with pytest.raises(SweepError, match=r"a\.jsonl is no sweep"):
            read()
    assert path.read_bytes() == content


def test_a_damaged_line_is_no_torn_one(tmp_path: Path) -> None:
    """In the middle of a file something else has happened than a kill."""
    path = tmp_path / "a.jsonl"
    content = stored(path, [Cell("random", None, z, 0.2) for z in range(3)]).path.read_bytes()
    path.write_bytes(content.replace(b'"layer": 1', b'"layer" 1'))
    with pytest.raises(SweepError, match=r"a\.jsonl is no sweep, or damaged"):
        Store(path, HEADER)


def test_without_a_file_the_way_to_one_is_said(tmp_path: Path) -> None:
    with pytest.raises(SweepError, match=r"no sweep at .*make one with: traitbasis select --trait rude"):
        read_cells(tmp_path / "rude.jsonl")


def test_no_half_of_a_header_is_ever_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "replace", lambda self, target: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        Store(tmp_path / "a.jsonl", HEADER)
    assert not (tmp_path / "a.jsonl").exists()


# --- nothing left behind ----------------------------------------------------------------------------------------------


def test_a_sweep_leaves_no_hook_and_no_thread(lm: LanguageModel, instruments: Instruments, tmp_path: Path) -> None:
    """Contract 6."""
    before = plain_logits(lm)
    running = set(threading.enumerate())
    with Generator(lm, CONTEXTS, turns=2, max_tokens=4) as generator:
        sweep(generator, tmp_path, instruments)
        assert hook_count(lm.model) == 0
    assert set(threading.enumerate()) == running
    assert torch.equal(plain_logits(lm), before)


@pytest.mark.parametrize("where", ["addition", "shape", "measuring", "engine"])
def test_a_failed_sweep_leaves_no_hook_and_can_go_on(
    where: str,
    lm: LanguageModel,
    generator: Generator,
    whole: tuple[bytes, list[Cell]],
    instruments: Instruments,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Contract 6, whatever fails."""
    before = plain_logits(lm)
    store = Store(tmp_path / "impatience.jsonl", generator.settings)

    def wrong(spec: Spec) -> dict[int, Tensor]:
        if where == "addition" and spec.layer == 2:
            raise RuntimeError("no addition")
        return {1: torch.ones(WIDTH + 1)} if where == "shape" and spec.layer == 2 else addition(spec)

    with monkeypatch.context() as patch, pytest.raises(Exception, match=r"."):
        if where == "measuring":
            patch.setattr("traitbasis.metrics.turns.is_broken", lambda text: 1 / 0)
        if where == "engine":
            calls = iter(range(1000))

            def forward(self: LanguageModel, *arguments: Any, **keywords: Any) -> Tensor:
                if next(calls) == 12:
                    raise RuntimeError("device lost")
                return plain_forward(self, *arguments, **keywords)

            plain_forward = LanguageModel.forward
            patch.setattr(LanguageModel, "forward", forward)
        generator.cells(SPECS, store, wrong, instruments, PERSONA)
    assert hook_count(lm.model) == 0
    assert torch.equal(plain_logits(lm), before)
    assert_same(sweep(generator, tmp_path, instruments), whole[1])


def plain_logits(lm: LanguageModel) -> Tensor:
    with torch.no_grad():
        logits: Tensor = lm.model(input_ids=torch.arange(3, 23)[None]).logits
    return logits


def test_a_generator_that_cannot_be_made_leaves_no_thread(lm: LanguageModel) -> None:
    running = set(threading.enumerate())
    with pytest.raises(SweepError, match="turns is 1; a cell needs at least 2"):
        Generator(lm, CONTEXTS, turns=1)
    long = replace_context(CONTEXTS[0], "x" * 5000)
    with pytest.raises(RequestError, match="2048"):
        Generator(lm, [CONTEXTS[1], long], turns=2)
    assert set(threading.enumerate()) == running


def replace_context(context: EvaluationContext, text: str) -> EvaluationContext:
    return context.model_copy(update={"context": (Turn("system", text), context.turns[1])})


def test_a_closed_generator_draws_nothing(lm: LanguageModel) -> None:
    generator = Generator(lm, CONTEXTS, turns=2, max_tokens=4)
    generator.close()
    with pytest.raises(EngineError):
        generator.draw([{}], [""])
    generator.close()


def test_scores_that_were_not_measured_are_a_key_error(whole: tuple[bytes, list[Cell]]) -> None:
    cell = whole[1][0]
    assert cell.scores("facts").shape == (TURNS,)
    np.testing.assert_allclose(cell.scores("surprise"), [turn.scores["surprise"] for turn in cell.turns], rtol=1e-6)
    with pytest.raises(KeyError, match="probe:rude"):
        cell.scores("probe:rude")
    assert cell.spec == UNSTEERED and type(cell.spec) is Spec
