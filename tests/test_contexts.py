"""Evaluation contexts: what ships keeps the rules, and a file that is wrong is reported by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from samples import to_yaml

from traitbasis.chat import Turn, read_messages
from traitbasis.contexts import contexts_hash, read_contexts
from traitbasis.errors import PairError
from traitbasis.guards import GUARDS, Conversation
from traitbasis.pairs import fold, known_traits, load_pairs

ROOT = Path(__file__).parent.parent
SYSTEM, AGENT = {"system": "You are customer W1."}, {"agent": "Hello?"}


def scenario(number: int = 0, **changes: Any) -> dict[str, Any]:
    made = {
        "id": f"context-{number}",
        "domain": "retail",
        "context": [{"system": f"You are a customer with order W{number}."}, {"agent": "How can I help?"}],
        "facts": [f"W{number}"],
    }
    return {**made, **changes}


def write(folder: Path, *scenarios: Any) -> Path:
    return write_text(folder, to_yaml({"scenarios": list(scenarios)}))


def write_text(folder: Path, content: str | bytes) -> Path:
    path = folder / "own.yaml"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


# --- what ships -------------------------------------------------------------------------------------------------------


def test_the_shipped_contexts_are_of_both_kinds_and_many_domains() -> None:
    contexts = read_contexts()
    raw = yaml.safe_load((ROOT / "contrastive_pairs/contexts/selection.yaml").read_text(encoding="utf-8"))["scenarios"]
    assert [context.id for context in contexts] == [each["id"] for each in raw]
    assert len(contexts) >= 10 and len({context.domain for context in contexts}) == len(contexts)
    late = sum(any(turn.speaker == "customer" for turn in context.turns) for context in contexts)
    assert len(contexts) / 4 <= late <= 3 * len(contexts) / 4


def test_a_shipped_contexts_facts_are_known_and_not_said_yet() -> None:
    for context in read_contexts():
        assert context.facts, context.id
        said = fold(" ".join(turn.text for turn in context.turns if turn.speaker == "customer"))
        for fact in context.facts:
            assert fold(fact) in fold(context.turns[0].text), (context.id, fact)
            assert fold(fact) not in said, (context.id, fact)


def test_no_customers_turn_in_a_shipped_context_is_rejected() -> None:
    for context in read_contexts():
        for i, turn in enumerate(context.turns):
            for guard in GUARDS if turn.speaker == "customer" else ():
                assert guard.passes(turn.text, Conversation(context.turns[:i])), (guard.name, context.id, turn.text)


def test_the_shipped_contexts_are_in_no_pair_and_in_no_experiment() -> None:
    """Layers and doses are chosen on them; what is measured elsewhere must be something else."""
    documents = [*(ROOT / f"contrastive_pairs/{trait}.yaml" for trait in known_traits())]
    documents.append(ROOT / "experiments/scenarios.yaml")
    entries = [
        entry
        for document in map(yaml.safe_load, (path.read_text(encoding="utf-8") for path in documents))
        for entry in document.get("pairs") or document["scenarios"]
    ]
    assert len(entries) > 500
    told = [set(fold(entry["context"][0]["system"]).split()) for entry in entries if "system" in entry["context"][0]]
    codes = {
        fold(fact) for entry in entries for fact in entry["facts"] if any(map(str.isdigit, fact)) and len(fact) > 5
    }
    for context in read_contexts():
        words = set(fold(context.turns[0].text).split())
        assert all(len(words & other) / len(words | other) < 0.5 for other in told), context.id
        assert not codes & {fold(fact) for fact in context.facts if not fact.replace(" ", "").isalnum()}, context.id


def test_a_harness_would_send_the_same_conversation() -> None:
    for context in read_contexts():
        assert tuple(read_messages(context.messages)) == context.turns


def test_the_hash_is_of_contexts_and_facts() -> None:
    contexts = read_contexts()
    changed = [
        contexts[::-1],
        contexts[:-1],
        [contexts[0].model_copy(update={"id": "x"}), *contexts[1:]],
        [contexts[0].model_copy(update={"facts": ("x",)}), *contexts[1:]],
        [contexts[0].model_copy(update={"context": (*contexts[0].turns, Turn("customer", "x"))}), *contexts[1:]],
    ]
    assert len({contexts_hash(each) for each in (contexts, *changed)}) == 1 + len(changed)
    same = [contexts[0].model_copy(update={"domain": "elsewhere"}), *contexts[1:]]
    assert contexts_hash(same) == contexts_hash(contexts) == contexts_hash(read_contexts())
    assert len(contexts_hash(contexts)) == 16


# --- files ------------------------------------------------------------------------------------------------------------


def test_a_file_of_ones_own_is_read_by_path(tmp_path: Path) -> None:
    talk = [SYSTEM, AGENT, {"customer": "Hi."}, {"agent": "Yes?"}]
    path = write(tmp_path, scenario(0), scenario(1, context=talk, facts=[]))
    for given in (path, str(path)):
        contexts = read_contexts(given)
        assert [context.id for context in contexts] == ["context-0", "context-1"]
        assert [turn.speaker for turn in contexts[1].turns] == ["system", "agent", "customer", "agent"]
        assert contexts[1].facts == () and contexts[0].facts == ("W0",)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "begins with the agent": (scenario(1, context=[AGENT]), "must begin with system and end with agent"),
    "no agent": (scenario(1, context=[SYSTEM]), "must begin with system and end with agent"),
    "ends with the customer": (scenario(1, context=[SYSTEM, AGENT, {"customer": "x"}]), "must begin with system and"),
    "empty context": (scenario(1, context=[]), "must begin with system and end with agent"),
    "system in the middle": (scenario(1, context=[SYSTEM, SYSTEM, AGENT]), "system turn can only come first"),
    "empty turn": (scenario(1, context=[SYSTEM, {"agent": " "}]), "a turn has no text"),
    "a fact nobody knows": (scenario(1, facts=["W1", "W9"]), "the fact 'W9' is nowhere in it"),
    "no facts at all": ({k: v for k, v in scenario(1).items() if k != "facts"}, "facts"),
    "facts that are one text": (scenario(1, facts="W1"), "facts"),
    "unknown field": (scenario(1, note="x"), "note"),
    "speaker user": (scenario(1, context=[SYSTEM, {"user": "x"}, AGENT]), "'user' is ambiguous"),
    "text that is a number": (scenario(1, context=[SYSTEM, {"agent": 7}]), "context"),
}


@pytest.mark.parametrize("mistake", WRONG)
def test_a_wrong_context_is_reported_with_file_and_id(mistake: str, tmp_path: Path) -> None:
    entry, says = WRONG[mistake]
    with pytest.raises(PairError, match=rf"(?s)own\.yaml: context 'context-1'.*{says}") as caught:
        read_contexts(write(tmp_path, scenario(0), entry))
    assert "context-0" not in str(caught.value)


def test_a_context_without_an_id_is_called_by_its_number(tmp_path: Path) -> None:
    for entry in ({k: v for k, v in scenario(1).items() if k != "id"}, scenario(1, id=" "), "text", None, 7):
        with pytest.raises(PairError, match=r"own\.yaml: context number 2"):
            read_contexts(write(tmp_path, scenario(0), entry))


@pytest.mark.parametrize(
    "scenarios", [[], [scenario(0)], [scenario(0), scenario(0)], [scenario(0), scenario(1), scenario(0, facts=[])]]
)
def test_fewer_than_two_contexts_or_one_id_twice_is_refused(scenarios: list[Any], tmp_path: Path) -> None:
    with pytest.raises(PairError, match=r"own\.yaml: at least two contexts are needed, each with an id of its own"):
        read_contexts(write(tmp_path, *scenarios))


@pytest.mark.parametrize(
    "content",
    [
        "",
        "scenarios:",
        "scenarios: text",
        "scenarios: {a: b}",
        "scenes: []",
        "[a, b]",
        "scenarios: [",
        "a: 2024-13-45",
        "a: !!int x",
        "a: !!bool x",
        "a: &a [*a]",
        "scenarios: &a [*a]",
        "[" * 3000,
        "!!python/object/apply:os.system ['true']",
        b"\xff\xfe\x00",
        b"a: caf\xe9",
    ],
)
def test_a_file_that_holds_no_contexts_is_a_pair_error_naming_it(content: str | bytes, tmp_path: Path) -> None:
    with pytest.raises(PairError, match=r"own\.yaml"):
        read_contexts(write_text(tmp_path, content))


def test_a_key_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    text = to_yaml({"scenarios": [scenario(0), scenario(1)]}).replace(
        "  domain: retail\n", "  domain: a\n  domain: b\n"
    )
    with pytest.raises(PairError, match=r"(?s)own\.yaml.*'domain' is there already, in line"):
        read_contexts(write_text(tmp_path, text))


def test_a_missing_file_or_a_folder_is_a_pair_error_naming_it(tmp_path: Path) -> None:
    for path in (tmp_path / "gone.yaml", tmp_path):
        with pytest.raises(PairError, match=f"cannot read contexts from {path}"):
            read_contexts(path)


def test_a_pair_file_is_no_file_of_contexts() -> None:
    with pytest.raises(PairError, match=r"impatience\.yaml"):
        read_contexts(ROOT / "contrastive_pairs/impatience.yaml")
    assert load_pairs("impatience")
