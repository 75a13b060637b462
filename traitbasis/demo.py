"""``traitbasis demo``: one conversation with a scripted agent, played by four differently steered users."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from traitbasis.basis import Basis, build_basis
from traitbasis.embedded import cache_folder
from traitbasis.errors import ArtifactError
from traitbasis.extract import extract
from traitbasis.model import LanguageModel
from traitbasis.pairs import PAPER_TRAITS, PairSet, load_pairs, pair_set_hash
from traitbasis.simulator import UserSimulator
from traitbasis.trait_vector import TraitVector
from traitbasis.tries import UserTurn

INSTRUCTION = (
    "You are a customer of Brightline, an online shop. You ordered a blue desk lamp, order #W4417, nine days ago "
    "and it has not arrived. You want to know where the lamp is, or get your 39 dollars back."
)
AGENT_LINES = (
    "Hi! How can I help you today?",
    "I see. Can you tell me your order number and what you ordered?",
    "The parcel left our warehouse on Monday. Would you like to wait three more days, or have a refund?",
)
WAYS = {"unsteered": "", "impatience": "impatience", "confusion": "confusion", "a mix": "skeptical-0.7+impatience-0.7"}


def run_demo(
    lm: LanguageModel,
    *,
    seed: int,
    console: Console,
    progress: Callable[[str, int], AbstractContextManager[Callable[[int], None]]],
) -> None:
    """Extract what is not extracted yet, then print the conversation four ways."""
    basis = _basis(lm, progress)
    with UserSimulator(lm, basis) as user, progress("talking", len(WAYS) * len(AGENT_LINES)) as advance:
        conversations = {}
        for way, traits in WAYS.items():
            messages = [{"role": "system", "content": INSTRUCTION}]
            replies: list[str] = []
            for line in AGENT_LINES:
                messages.append({"role": "user", "content": line})
                turn = user.reply(messages, traits, seed=seed, max_tokens=60)
                messages.append({"role": "assistant", "content": turn.text})
                replies.append(_shown(turn))
                advance(1)
            conversations[way] = (turn.dose, replies)

    console.print(f"\n[dim]The customer's instruction:[/dim] {escape(INSTRUCTION)}", highlight=False)
    for i, line in enumerate(AGENT_LINES):
        table = Table(title=f"\nagent: {escape(line)}", title_justify="left", title_style="bold", expand=True)
        for way, (dose, _) in conversations.items():
            heading = way if WAYS[way] in ("", way) else f"{way}: {WAYS[way]}"
            table.add_column(f"{escape(heading)}\n[dim]dose {dose:.2f}[/dim]", ratio=1)
        table.add_row(*(replies[i] for _, replies in conversations.values()))
        console.print(table)
    console.print(
        f"[dim]{lm.name}, basis {basis.fingerprint}, seed {seed}; another --seed, other texts. "
        "A model this small is for trying things; the README's limits say what to use for results.[/dim]",
        highlight=False,
    )


def _shown(turn: UserTurn) -> str:
    """A turn's text, and in dim what a reader should know about it."""
    notes = ["cut off"] if turn.finish == "length" else []
    if turn.failed_guard:
        notes.append(f"{turn.failed_guard} in all {turn.tries} draws")
    return escape(turn.text) + (f" [dim]({', '.join(notes)})[/dim]" if notes else "")


def _basis(lm: LanguageModel, progress: Callable[[str, int], AbstractContextManager[Callable[[int], None]]]) -> Basis:
    """Basis of the shipped traits, extracted here and kept in the cache."""
    folder = cache_folder() / "vectors" / lm.slug
    pair_sets = [load_pairs(trait) for trait in PAPER_TRAITS]
    with progress("extracting", 2 * sum(len(pair_set.for_extraction()) for pair_set in pair_sets)) as advance:
        vectors = []
        for pair_set in pair_sets:
            path = folder / f"{pair_set.trait}.safetensors"
            vector = _cached(path, lm, pair_set)
            if vector is None:
                vector = extract(lm, pair_set, progress=advance)
                vector.save(path)
            vectors.append(vector)
    return build_basis(vectors)


def _cached(path: Path, lm: LanguageModel, pair_set: PairSet) -> TraitVector | None:
    try:
        vector = TraitVector.load(path)
        vector.provenance.check_model(lm, str(path))
    except ArtifactError:
        return None
    return vector if vector.provenance.pair_set_hash == pair_set_hash(pair_set.for_extraction()) else None
