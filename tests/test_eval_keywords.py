"""The instruments on the embedded model: they find a trait in hand-written turns, and not where only its words are."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

from traitbasis.dialogues import Dialogue, DialogueTurn
from traitbasis.evaluation.fidelity import Fidelity, fidelity
from traitbasis.evaluation.findings import named_findings
from traitbasis.evaluation.traits import TraitInstruments, TurnScore, score_dialogues
from traitbasis.model import LanguageModel
from traitbasis.pairs import PAPER_TRAITS, Pair, load_pairs

# Words that a persona prompt might make a customer drop; written for this test, as the forms below are.
KEYWORDS = {
    "impatience": ("impatient", "hurry, urgent, immediately, ASAP, quick, rush, right now, hurry up, fast, no time"),
    "confusion": ("confused", "unclear, puzzled, lost, what, huh, don't understand, baffled, mixed up, no idea, how"),
    "incoherence": ("incoherent", "rambling, nonsense, jumbled, random, purple, banana, anyway, whatever, chaos, what"),
    "skeptical": ("skeptical", "doubt, suspicious, prove it, really, scam, trust, not convinced, sure, believe, catch"),
}
FORMS: tuple[Callable[[str, str, list[str]], str], ...] = (
    lambda text, name, words: f"Note: I'm a very {name} customer ({', '.join(words[:4])}). {text}",
    lambda text, name, words: f"{text} {'! '.join(w.capitalize() for w in words[:4])}! {name} {name} {name}",
    lambda text, name, words: f"{text} {' '.join('#' + w.replace(' ', '') for w in words[:5])}",
    lambda text, name, words: f"{'. '.join(w.capitalize() for w in words)}. So {name}.",
    lambda text, name, words: (
        f"I am {name}. I feel {words[0]}. My mood is {words[1]}, {words[2]} and {words[3]}. {text}"
    ),
)
# Whole dialogues, written for this test: nothing of them is in any pair.
WRITTEN = {
    "impatience": (
        "My desk lamp, order W4417, still isn't here and I've got better things to do than sit in a chat. Refund it.",
        "You just had the order number from me. W4417. Do I really need to type it again before anything moves?",
        "No, don't walk me through your steps, just push the refund through today so I can get off this chat.",
    ),
    "confusion": (
        "I think I need a refund for W4417, the desk lamp, or is it a return if it never came? I can't tell.",
        "Wait, which number is that? There's W4417 on one page and something with a T on another and I mixed them up.",
        "Sorry, so the store credit is the refund? Or does it come after? You lost me where the original card came in.",
    ),
    "incoherence": (
        "The lamp, my brother had one with - W4417, it's Tuesday they collect bins. Money back, I mean the desk one.",
        "Four four one, the cat sat on the letter so. W4417. We used to live near a station, and the shade was green.",
        "Onto the card if it, what was it, the trains. Yes refund. Somebody left soup on. The lamp never, so there.",
    ),
    "skeptical": (
        "Your site promised W4417, the desk lamp, a week ago, so forgive me if I don't take its word on refunds.",
        "And why would you need the number twice? It's W4417. Show me where it says the whole price comes back to me.",
        "Five days, according to whom? I'd like that in writing, with a name, because I've heard such promises before.",
    ),
    "none": (
        "Hello, my order W4417, a desk lamp, hasn't arrived yet. I'd like to have it refunded, please.",
        "Yes, the number is W4417, and the lamp was due last week. My name is on the order.",
        "Back to the original card is fine. Thank you for looking into it, that is all I need today.",
    ),
}
QUESTIONS = (
    "Hi! How can I help?",
    "Could you tell me the order number?",
    "I can refund it to the original card. Is it?",
)


def of_pair(method: str, trait: str, pair: Pair, text: str, shown: bool = True) -> Dialogue:
    wanted = {trait: "medium"} if shown else {}
    instruction = pair.context[0].text if pair.context[0].speaker == "system" else ""
    turns = (DialogueTurn("agent", pair.context[-1].text), DialogueTurn("customer", text))
    return Dialogue(method, wanted, f"{trait}: {pair.id}", 0, instruction, {}, turns)


def written(trait: str, said: tuple[str, ...]) -> Dialogue:
    spoken = zip(QUESTIONS, said, strict=True)
    turns = [
        turn for question, text in spoken for turn in (DialogueTurn("agent", question), DialogueTurn("customer", text))
    ]
    wanted = {} if trait == "none" else {trait: "medium"}
    instruction = "Your order W4417, a desk lamp, is late. You want a refund."
    return Dialogue("written", wanted, "lamp", 0, instruction, {}, tuple(turns))


@pytest.fixture(scope="module")
def instruments(real: LanguageModel) -> TraitInstruments:
    return TraitInstruments.build(real, [load_pairs(trait) for trait in PAPER_TRAITS])


@pytest.fixture(scope="module")
def dialogues() -> list[Dialogue]:
    found = []
    for trait in PAPER_TRAITS:
        name, words = KEYWORDS[trait][0], KEYWORDS[trait][1].split(", ")
        for number, pair in enumerate(load_pairs(trait).select("heldout")):
            turned = [*words[number:], *words[:number]]
            found += [of_pair("real", trait, pair, pair.positive), of_pair("real", trait, pair, pair.negative, False)]
            for method, form in zip(("note", "shout", "tags", "list", "mood"), FORMS, strict=True):
                found.append(of_pair(f"stuffed: {method}", trait, pair, form(pair.negative, name, turned)))
    return [*found, *(written(trait, said) for trait, said in WRITTEN.items())]


@pytest.fixture(scope="module")
def scores(real: LanguageModel, instruments: TraitInstruments, dialogues: list[Dialogue]) -> list[list[TurnScore]]:
    return score_dialogues(instruments, real, dialogues)


@pytest.fixture(scope="module")
def rows(dialogues: list[Dialogue], scores: list[list[TurnScore]]) -> Mapping[str, Fidelity]:
    found = fidelity(dialogues, {"namer": named_findings(dialogues, scores)}, PAPER_TRAITS)
    return {row.method: row for row in found}


def test_every_instrument_tells_traits_on_pairs_it_was_not_made_from_and_shuffled_labels_do_not(
    instruments: TraitInstruments,
) -> None:
    """Measured: probe 0.97 (worst 0.96), classifier 0.95 (0.89), namer 0.96 (0.89)."""
    quality = instruments.quality
    print(*quality.lines, sep="\n")
    for bound, name in ((0.9, "probe"), (0.8, "classifier"), (0.8, "namer")):
        assert min(quality.auc[name].values()) > bound
        assert abs(quality.shuffled_auc[name] - 0.5) < 0.08
    assert quality.accuracy > 0.7 and abs(quality.shuffled_accuracy - quality.chance) < 0.1


def test_keywords_alone_do_not_win_fidelity(rows: Mapping[str, Fidelity]) -> None:
    """Measured on single turns: 0.81 of hand-written ones are named as intended; of stuffed ones 0.16 where there is no
    sentence but a list, 0.06 after a note on the customer, and 0.00 in the three other forms. Words, forms and turns
    are in nothing that the namer was trained on."""
    real = rows["real"]
    stuffed = {method: row for method, row in rows.items() if method.startswith("stuffed")}
    print({method: (f"{row.of_traits}", f"{row.neutral}", f"{row.shuffled}") for method, row in rows.items()})
    assert real.of_traits.value > 0.65 and real.neutral.value > 0.8
    assert real.named.low > real.shuffled.high  # a task has one dialogue with its trait and a neutral one: at most 0.5
    assert len(stuffed) == len(FORMS)
    for row in stuffed.values():
        assert row.of_traits.value < 0.25 and row.of_traits.high < real.of_traits.low
    assert sum(row.of_traits.value for row in stuffed.values()) / len(stuffed) < 0.1


def test_probe_and_classifier_are_fooled_by_keywords_and_it_is_stated(instruments: TraitInstruments) -> None:
    """Why the namer decides what is there: 0.56 and 0.39 of stuffed turns pass for the trait, 0.00 with the namer."""
    fooled, shown = instruments.quality.fooled, instruments.quality.shown
    assert fooled["namer"] < 0.1 < 0.6 < shown["namer"]
    assert fooled["probe"] > 0.3 and "of stuffed" in "\n".join(instruments.quality.lines)


def test_whole_dialogues_written_by_hand_are_named_as_they_were_meant(rows: Mapping[str, Fidelity]) -> None:
    print(rows["written"].confusion)
    assert rows["written"].dialogues == 5 and rows["written"].named.value >= 0.8
