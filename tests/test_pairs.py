"""Pair files: what ships keeps the rules, and whatever a file holds, the answer is a PairSet or a PairError."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from samples import load_pair, sample_document, sample_pair, to_yaml

from traitbasis.chat import Turn
from traitbasis.errors import PairError
from traitbasis.pairs import PairSet, known_traits, lexical_shortcuts, load_pairs, pair_set_hash

ROOT = Path(__file__).parent.parent
TRAITS = known_traits()
PAPER = ["confusion", "impatience", "incoherence", "skeptical"]
# The two exceptions to the rules on words and on lengths, so that no file makes itself another.
OWN = {"polite": {"please", "thanks", "thank"}, "cheerful": {"!"}}
OF_LENGTH = {"rambling", "terse"}
DOMAINS = {"airline", "retail", "telecom", "telehealth"}
GAP = 0.35


def words(text: str) -> set[str]:
    """Counted in another way than the product counts: split at white space, strip marks."""
    return {word.strip('.,;:?!"()…—').lower() for word in text.replace("’", "'").replace("—", " ").split()} - {""}


def raw_pairs(trait: str) -> list[dict[str, Any]]:
    """The file's pairs as plain YAML, past our reader."""
    document = yaml.safe_load((ROOT / "contrastive_pairs" / f"{trait}.yaml").read_text(encoding="utf-8"))
    pairs: list[dict[str, Any]] = document["pairs"]
    return pairs


# --- what ships -------------------------------------------------------------------------------------------------------


def test_the_papers_four_traits_ship_and_27_more() -> None:
    assert set(PAPER) < set(TRAITS) and len(TRAITS) == 31
    assert [path.stem for path in sorted((ROOT / "contrastive_pairs").glob("*.yaml"))] == TRAITS


def test_no_name_means_two_shipped_traits() -> None:
    names = [name for trait in TRAITS for name in (trait, *load_pairs(trait).aliases)]
    assert sorted(names) == sorted(set(names))


@pytest.mark.parametrize("trait", TRAITS)
def test_a_shipped_file_says_what_its_trait_is(trait: str) -> None:
    pair_set = load_pairs(trait)
    assert pair_set.trait == trait
    assert "\n" not in pair_set.definition + pair_set.opposite and pair_set.definition != pair_set.opposite


@pytest.mark.parametrize("trait", TRAITS)
def test_a_shipped_file_has_as_many_pairs_of_both_kinds_of_turn_in_four_domains(trait: str) -> None:
    pairs = load_pairs(trait).pairs
    raw = raw_pairs(trait)
    assert [pair.id for pair in pairs] == [pair["id"] for pair in raw]
    assert len(pairs) == (24 if trait in PAPER else 16)
    spoken = {pair["id"]: any("customer" in turn for turn in pair["context"]) for pair in raw}
    assert all((pair.turn == "late") == spoken[pair.id] for pair in pairs)
    kinds = Counter((pair.domain, pair.turn) for pair in pairs)
    assert kinds.keys() == {(domain, turn) for domain in DOMAINS for turn in ("first", "late")}
    assert trait in PAPER or set(kinds.values()) == {2}


@pytest.mark.parametrize("trait", TRAITS)
def test_a_shipped_file_has_one_default_pair_a_domain_and_held_out_ones(trait: str) -> None:
    pair_set = load_pairs(trait)
    assert sorted(pair.domain for pair in pair_set.for_extraction()) == sorted(DOMAINS)
    assert {pair.turn for pair in pair_set.select("default")} == {"first", "late"}
    held_out = pair_set.select("heldout")
    assert len(held_out) >= 4 and {pair.domain for pair in held_out} == DOMAINS
    assert set(pair_set.for_extraction(len(pair_set.pairs) - len(held_out))).isdisjoint(held_out)


@pytest.mark.parametrize("trait", sorted(set(TRAITS) - set(PAPER)))
def test_four_pairs_make_a_library_trait_four_more_extend_it_and_eight_measure_it(trait: str) -> None:
    pairs = raw_pairs(trait)
    assert [pair["use"] for pair in pairs] == ["default"] * 4 + ["extra"] * 4 + ["heldout"] * 8
    assert {pair["domain"] for pair in pairs[4:8]} == DOMAINS
    turns = Counter("late" if any("customer" in turn for turn in pair["context"]) else "first" for pair in pairs[:4])
    assert turns == {"first": 2, "late": 2}
    held_out = Counter((pair.domain, pair.turn) for pair in load_pairs(trait).select("heldout"))
    assert held_out == {(domain, turn): 1 for domain in DOMAINS for turn in ("first", "late")}


@pytest.mark.parametrize("trait", TRAITS)
def test_no_word_or_mark_gives_a_shipped_trait_away(trait: str) -> None:
    """But for its own."""
    pair_set = load_pairs(trait)
    assert pair_set.shortcuts(GAP) == {}
    assert set(pair_set.markers) == OWN.get(trait, set())


@pytest.mark.parametrize("trait", TRAITS)
def test_an_independent_count_finds_no_give_away_either(trait: str) -> None:
    pairs = raw_pairs(trait)
    for signal in {"?", "!", "...", "…", "—"} - OWN.get(trait, set()):
        gap = sum(signal in p["positive"] for p in pairs) - sum(signal in p["negative"] for p in pairs)
        assert abs(gap) / len(pairs) <= GAP, signal
    for word in {
        "i",
        "please",
        "thanks",
        "now",
        "just",
        "not",
        "so",
        "what",
        "sure",
        "how",
        "the",
        "wait",
        "why",
        "and",
    } - OWN.get(trait, set()):
        gap = sum(word in words(p["positive"]) for p in pairs) - sum(word in words(p["negative"]) for p in pairs)
        assert abs(gap) / len(pairs) <= GAP, word


@pytest.mark.parametrize("trait", TRAITS)
def test_length_does_not_give_a_shipped_trait_away(trait: str) -> None:
    assert load_pairs(trait).length_free == (trait in OF_LENGTH)
    if trait in OF_LENGTH:
        return
    pairs = raw_pairs(trait)
    for pair in pairs:
        long, short = sorted((len(pair["positive"].split()), len(pair["negative"].split())), reverse=True)
        assert long <= 1.7 * short, pair["id"]  # 1.6 by the product's count, which takes "a-b" for two words
    totals = [sum(len(pair[side].split()) for pair in pairs) for side in ("positive", "negative")]
    ratio = totals[0] / totals[1]
    assert 0.8 < ratio < 1.25 if trait in PAPER else 0.9 < ratio < 1.1


@pytest.mark.parametrize("trait", TRAITS)
def test_both_sides_of_a_shipped_pair_keep_every_fact(trait: str) -> None:
    for pair in raw_pairs(trait):
        for fact in pair["facts"]:
            for side in ("positive", "negative"):
                assert " ".join(fact.lower().split()) in " ".join(pair[side].lower().split()), (pair["id"], side, fact)


def test_no_text_stands_in_two_splits_or_twice() -> None:
    seen: dict[str, str] = {}
    for trait in TRAITS:
        for pair in raw_pairs(trait):
            where = f"{trait}/{pair['use']}/{pair['id']}"
            for text in (
                pair["positive"],
                pair["negative"],
                *(turn["system"] for turn in pair["context"] if "system" in turn),
            ):
                key = " ".join(sorted(words(text)))
                assert key not in seen, f"{where} and {seen[key]} share {text[:60]!r}"
                seen[key] = where


def test_the_evaluation_scenarios_share_no_context_with_the_pairs() -> None:
    scenarios = yaml.safe_load((ROOT / "experiments" / "scenarios.yaml").read_text(encoding="utf-8"))["scenarios"]
    assert len(scenarios) >= 8 and len({s["id"] for s in scenarios}) == len(scenarios)
    pairs = [pair for trait in TRAITS for pair in raw_pairs(trait)]
    told = [words(next(iter(pair["context"][0].values()))) for pair in pairs]
    facts = {
        fact.lower() for pair in pairs for fact in pair["facts"] if any(c.isdigit() for c in fact) and len(fact) >= 5
    }
    turns = {" ".join(text.split()) for pair in pairs for turn in pair["context"] for who, text in turn.items()}
    for scenario in scenarios:
        assert scenario["context"][0].keys() == {"system"} and scenario["context"][-1].keys() == {"agent"}
        system = words(scenario["context"][0]["system"])
        assert all(len(system & other) / len(system | other) < 0.5 for other in told), scenario["id"]
        assert not facts & {fact.lower() for fact in scenario["facts"] if "-" in fact}, scenario["id"]
        assert not turns & {" ".join(text.split()) for turn in scenario["context"] for text in turn.values()}, scenario[
            "id"
        ]


# --- files that are wrong ---------------------------------------------------------------------------------------------


def without(mapping: dict[str, Any], key: str) -> dict[str, Any]:
    return {k: v for k, v in mapping.items() if k != key}


AGENT = {"agent": "Hello."}
# (pair that replaces the second one, what the message says besides file and pair)
WRONG_PAIRS: dict[str, tuple[dict[str, Any], str]] = {
    **{
        f"no {field}": (without(sample_pair(1), field), field)
        for field in ("domain", "use", "context", "positive", "negative", "facts")
    },
    "unknown field": (sample_pair(1, note="x"), "note"),
    "fact missing on the positive side": (
        sample_pair(1, positive="Order now, I have waited long enough."),
        "field 'positive' does not contain the fact 'W1'",
    ),
    "fact missing on the negative side": (
        sample_pair(1, negative="Order W2 please, there is no hurry."),
        "field 'negative' does not contain the fact 'W1'",
    ),
    "no facts": (sample_pair(1, facts=[]), "facts"),
    "fact that is a number": (sample_pair(1, facts=["W1", 4471]), "facts.1"),
    "facts that are one text": (sample_pair(1, facts="W1"), "facts"),
    "length": (sample_pair(1, positive="W1 now."), "field 'positive' has 2 words and field 'negative' 9"),
    "same text": (sample_pair(1, positive="W1", negative="W1"), "same text"),
    "empty response": (sample_pair(1, positive="  "), "positive"),
    "response of a wrong type": (sample_pair(1, negative=["W1"]), "negative"),
    "speaker user": (sample_pair(1, context=[{"user": "Hi."}, AGENT]), "context.0.*'user' is ambiguous.*'customer'"),
    "speaker assistant": (sample_pair(1, context=[{"assistant": "Hi."}]), "context.0.*'assistant' is ambiguous"),
    "unknown speaker": (sample_pair(1, context=[{"clerk": "Hi."}, AGENT]), "context.0"),
    "speaker that is a number": (sample_pair(1, context=[{3: "Hi."}, AGENT]), "context.0"),
    "two speakers in a turn": (sample_pair(1, context=[{"system": "x", "agent": "y"}]), "context.0.*one speaker"),
    "turn that is text": (sample_pair(1, context=["Hi."]), "context.0.*one speaker"),
    "turn without text": (sample_pair(1, context=[{"system": " "}, AGENT]), "context.*no text"),
    "turn whose text is a number": (sample_pair(1, context=[{"system": 7}, AGENT]), "context.0"),
    "context ends with the customer": (
        sample_pair(1, context=[AGENT, {"customer": "Hi."}]),
        "context.*last turn must be the agent's",
    ),
    "context of system alone": (sample_pair(1, context=[{"system": "Hi."}]), "context.*last turn"),
    "system not first": (
        sample_pair(1, context=[AGENT, {"system": "x"}, AGENT]),
        "context.*system turn can only come first",
    ),
    "empty context": (sample_pair(1, context=[]), "context"),
    "unknown use": (sample_pair(1, use="test"), "use"),
    "bad domain": (sample_pair(1, domain="Tele Health"), "domain"),
}


def write(folder: Path, content: str | bytes) -> Path:
    path = folder / "own.yaml"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


@pytest.mark.parametrize("mistake", WRONG_PAIRS)
def test_a_wrong_pair_is_reported_with_file_pair_and_field(mistake: str, tmp_path: Path) -> None:
    pair, says = WRONG_PAIRS[mistake]
    path = write(tmp_path, to_yaml(sample_document(sample_pair(0), pair)))
    with pytest.raises(PairError, match=rf"(?s)^[^\n]*own\.yaml: pair 'pair-1': .*{says}") as caught:
        load_pairs(path)
    assert "pair-0" not in str(caught.value), "the pair that is right is not blamed"


@pytest.mark.parametrize("pair", [without(sample_pair(1), "id"), sample_pair(1, id=""), "pair", None, 7, ["id"]])
def test_a_pair_without_an_id_is_called_by_its_number(pair: Any, tmp_path: Path) -> None:
    with pytest.raises(PairError, match=r"own\.yaml: pair number 2"):
        load_pairs(write(tmp_path, to_yaml(sample_document(sample_pair(0), pair))))


@pytest.mark.parametrize(
    ("document", "says"),
    [
        (without(sample_document(), "definition"), "'definition'"),
        (without(sample_document(), "pairs"), "'pairs'"),
        (sample_document(author="me"), "'author'"),
        (sample_document(trait="Im patience"), "'trait'"),
        (sample_document(aliases="impatient"), "'aliases'"),
        (sample_document(pairs=[]), "'pairs'"),
        (sample_document(pairs={}), "'pairs'"),
        (sample_document(pairs="none"), "'pairs'"),
        (sample_document(sample_pair(0), sample_pair(0, domain="airline")), "pair 'pair-0': field 'id' is used twice"),
        (["a", "list"], "expected a mapping with the fields trait, "),
        ("text", "expected a mapping"),
        ({1: 2}, "field"),
        (sample_document(pairs={"a", "b"}), "pair number"),
    ],
)
def test_a_wrong_file_is_reported_with_its_name_and_the_field(document: Any, says: str, tmp_path: Path) -> None:
    with pytest.raises(PairError, match=rf"(?s)own\.yaml.*{says}"):
        load_pairs(write(tmp_path, to_yaml(document)))


@pytest.mark.parametrize(
    "content",
    [
        "",
        "# only a comment\n",
        "trait: [",
        "\t- a",
        "trait: &a [*b]",
        "!!python/object/apply:os.system ['true']",
        "a: 1\n---\nb: 2",
        b"\xff\xfe\x00trait",
        b"trait: caf\xe9",
        "a: 2024-13-45",
        "a: !!int x",
        "a: !!float x",
        "a: !!timestamp x",
        "a: !!bool x",
        "a: " + "9" * 5000,
        "[" * 3000,
        "a: &a [*a]",
        "pairs: &p [*p]",
        "? [a, b]\n: c",
        "a: \x00",
        "pairs: {? a}",
    ],
)
def test_a_file_that_is_no_readable_yaml_is_a_pair_error_naming_it(content: str | bytes, tmp_path: Path) -> None:
    with pytest.raises(PairError, match=r"own\.yaml"):
        load_pairs(write(tmp_path, content))


@pytest.mark.parametrize(
    ("content", "line", "key"),
    [
        ("trait: a\nopposite: b\ntrait: c\n", 3, "trait"),
        ("pairs:\n  - id: x\n    positive: a\n    positive: b\n", 4, "positive"),
        ("pairs: [{id: x, 'id': y}]\n", 1, "id"),
    ],
)
def test_a_key_that_is_there_twice_is_refused(content: str, line: int, key: str, tmp_path: Path) -> None:
    """PyYAML takes the last and says nothing, so a reply that was pasted in the wrong place would be lost."""
    says = rf"(?s)own\.yaml is not valid YAML: '{key}' is there already.*line {line}, column"
    with pytest.raises(PairError, match=says):
        load_pairs(write(tmp_path, content))


@pytest.mark.parametrize("name", ["all", "basis", "baselines", "judge", "off", "none", "low", "medium", "high"])
def test_a_trait_is_not_called_as_a_level_a_command_or_a_file_beside_it(name: str) -> None:
    for changes in ({"trait": name}, {"aliases": ["fine", name]}):
        with pytest.raises(ValidationError, match=f"'{name}' cannot name a trait"):
            PairSet.model_validate(sample_document(**changes))  # type: ignore[arg-type]


def test_a_missing_file_or_a_folder_is_a_pair_error_naming_it(tmp_path: Path) -> None:
    with pytest.raises(PairError, match=r"cannot read pair file .*gone\.yaml: No such file"):
        load_pairs(tmp_path / "gone.yaml")
    (tmp_path / "folder.yaml").mkdir()
    with pytest.raises(PairError, match=r"folder\.yaml"):
        load_pairs(tmp_path / "folder.yaml")


@pytest.mark.parametrize("name", ["impatiance", "", "../impatience", "__init__", "Impatience"])
def test_an_unknown_trait_names_the_shipped_ones_and_the_way_out(name: str) -> None:
    with pytest.raises(PairError, match=r"shipped: angry, anxious, .*path of a \.yaml file"):
        load_pairs(name)


@pytest.mark.parametrize("n", [0, -1, 4, 100])
def test_more_pairs_than_there_are_cannot_be_taken(n: int) -> None:
    uses = ("extra", "default", "heldout", "default")
    pair_set = PairSet.model_validate(sample_document(*(sample_pair(i, use=use) for i, use in enumerate(uses))))
    with pytest.raises(PairError, match=rf"impatience: cannot take {n} pairs; 3 are not held out"):
        pair_set.for_extraction(n)
    assert [pair.id for pair in pair_set.for_extraction(3)] == ["pair-1", "pair-3", "pair-0"]
    assert [pair.id for pair in pair_set.for_extraction()] == ["pair-1", "pair-3"]


def test_a_file_without_default_pairs_says_what_to_do() -> None:
    pair_set = PairSet.model_validate(sample_document(sample_pair(0, use="extra")))
    with pytest.raises(PairError, match=r"impatience: no pair is marked 'use: default'"):
        pair_set.for_extraction()
    assert len(pair_set.for_extraction(1)) == 1


scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), st.dates(), st.binary(max_size=4)
)
anything = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.one_of(st.text(max_size=5), st.integers()), inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(
    changes=st.dictionaries(
        st.sampled_from(["trait", "definition", "opposite", "aliases", "pairs", "x"]), anything, max_size=2
    ),
    pair=st.dictionaries(st.sampled_from([*sample_pair(), "x"]), anything, max_size=2),
    whole=st.one_of(st.none(), anything),
)
def test_garbage_never_raises_anything_but_a_pair_error(changes: Any, pair: Any, whole: Any, tmp_path: Path) -> None:
    document = {**sample_document(sample_pair(0), {**sample_pair(1), **pair}), **changes} if whole is None else whole
    path = write(tmp_path, yaml.safe_dump(document, allow_unicode=True))
    try:
        assert load_pairs(path).pairs
    except PairError as error:
        assert "own.yaml" in str(error)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    content=st.one_of(
        st.binary(max_size=60), st.text(alphabet="[]{}!&*?:-,#|>'\"\n\t %@`ab1~=<", max_size=40).map(str.encode)
    )
)
def test_random_bytes_never_raise_anything_but_a_pair_error(content: bytes, tmp_path: Path) -> None:
    with pytest.raises(PairError, match=r"own\.yaml"):
        load_pairs(write(tmp_path, content))


# --- what else the module promises ------------------------------------------------------------------------------------


def test_a_turn_is_late_once_the_customer_has_spoken() -> None:
    assert load_pair(sample_pair()).turn == "first"
    late = load_pair(sample_pair(context=[AGENT, {"customer": " Hi. "}, AGENT]))
    assert late.turn == "late" and late.context[1] == Turn("customer", "Hi.")


def test_a_shortcut_is_the_share_of_positives_minus_the_share_of_negatives() -> None:
    texts = [("W0 Now, don’t!", "W0 later, no."), ("W1 now", "W1, now"), ("W2 NOW... ok", "W2 … ok"), ("W3 a", "W3 b")]
    pairs = [load_pair(sample_pair(i, positive=p, negative=n)) for i, (p, n) in enumerate(texts)]
    assert lexical_shortcuts(pairs, 0.2) == {
        "now": 0.5,
        "!": 0.25,
        "a": 0.25,
        "b": -0.25,
        "don't": 0.25,
        "later": -0.25,
        "no": -0.25,
    }
    assert lexical_shortcuts(pairs, 0.25) == {"now": 0.5}
    assert lexical_shortcuts([]) == {}


def test_the_hash_is_of_everything_a_vector_depends_on() -> None:
    """Contract 7."""
    pairs = [load_pair(sample_pair(0)), load_pair(sample_pair(1))]
    same = [load_pair(sample_pair(0, id="other", use="extra", facts=["W0", "Order"], domain="bank")), pairs[1]]
    different = [
        pairs[::-1],
        pairs[:1],
        [pairs[0], load_pair(sample_pair(1, positive="W1 now, I have waited for long enough."))],
        [pairs[0], load_pair(sample_pair(1, negative="W1 please, there is no hurry at all here."))],
        [pairs[0], load_pair(sample_pair(1, context=[AGENT]))],
        [pairs[0], load_pair(sample_pair(1, context=[{"customer": "Hello."}, AGENT]))],
    ]
    assert pair_set_hash(same) == pair_set_hash(pairs)
    assert len({pair_set_hash(changed) for changed in (pairs, *different)}) == 1 + len(different)
