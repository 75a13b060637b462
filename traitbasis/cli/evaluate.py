"""`traitbasis eval`: is the simulated user real, does it show what was asked for, and does that last?

Here is what its commands share; each file ``eval_*.py`` adds some of them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer.core import TyperGroup

from traitbasis.cli.common import app, listed, load_lm, out, progress

if TYPE_CHECKING:
    from traitbasis.dialogues import Dialogue
    from traitbasis.evaluation.traits import TraitInstruments, TurnScore
    from traitbasis.metrics.estimate import Estimate
    from traitbasis.pairs import PairSet

# As they are used: dialogues, then raters where they are wanted, then the metrics.
ORDER = (
    "collect", "judge", "sheet", "votes", "fidelity", "composability", "consistency", "realism", "conduct",
)  # fmt: skip


class _InOrder(TyperGroup):
    """Commands as ``ORDER`` has them, whichever file added them first; others behind."""

    def list_commands(self, ctx: Any) -> list[str]:
        return sorted(self.commands, key=lambda name: ORDER.index(name) if name in ORDER else len(ORDER))


eval_app = typer.Typer(
    cls=_InOrder, no_args_is_help=True, help="Measure simulated users: dialogues first, then what they show."
)
app.add_typer(eval_app, name="eval")

Dialogues = Annotated[list[Path], typer.Argument(help="Files of dialogues (traitbasis eval collect), one a method.")]
Out = Annotated[Path | None, typer.Option("--out", help="Write every figure as JSON, with what made it.")]
Judgments = Annotated[
    list[Path] | None, typer.Option(help="Judgments of people or judges (eval votes, eval judge); several files.")
]
Traits = Annotated[
    str,
    typer.Option(help="Traits to choose from, with commas; by default the paper's four and those of the dialogues."),
]
Pairs = Annotated[list[Path] | None, typer.Option(help="Pair file of a trait of your own; several for several.")]
Cache = Annotated[
    Path | None,
    typer.Option(help="Keep scores of turns here (JSONL), and instruments beside it, so that a killed run goes on."),
]
Seed = Annotated[int, typer.Option(help="Decides the bootstrap's draws.")]
JudgeUrl = Annotated[
    list[str] | None,
    typer.Option(
        help="An OpenAI-compatible judge as URL#MODEL, such as http://localhost:9000/v1#MODEL; several for several."
    ),
]
JudgeKey = Annotated[
    str, typer.Option(help="The judges' API key, if they want one.", envvar="TRAITBASIS_JUDGE_KEY", show_envvar=True)
]


@dataclass(frozen=True)
class Reading:
    """How the instruments read: options of the model, and where scores are kept."""

    model: str
    device: str
    dtype: str
    threads: int | None
    as_: Literal["user", "assistant"]
    cache: Path | None

    def of(
        self, dialogues: Sequence[Dialogue], pair_sets: Sequence[PairSet]
    ) -> tuple[TraitInstruments, list[list[TurnScore]]]:
        """Instruments of these pairs, and their scores of every customer turn. Loads the model."""
        from traitbasis.evaluation.traits import TraitInstruments, score_dialogues

        lm = load_lm(self.model, self.device, self.dtype, threads=self.threads)
        with progress("making instruments", len(pair_sets)) as advance:
            made = TraitInstruments.build(lm, pair_sets, self.as_, cache=self.cache, progress=advance)
        turns = {turn for dialogue in dialogues for turn in zip(dialogue.contexts(), dialogue.said, strict=True)}
        with progress("reading turns", len(turns)) as advance:
            return made, score_dialogues(made, lm, dialogues, self.cache, advance)


def choose_pairs(traits: str, pairs: Sequence[Path] | None, dialogues: Sequence[Dialogue]) -> list[PairSet]:
    """Pair sets of the traits to choose from, those of own files among them. Raises BadParameter when a trait of the
    dialogues is left out."""
    from traitbasis.pairs import PAPER_TRAITS, load_pairs

    own = {pair_set.trait: pair_set for pair_set in map(load_pairs, pairs or ())}
    shown = {trait for dialogue in dialogues for trait in dialogue.traits}
    chosen = listed(traits) or sorted({*PAPER_TRAITS, *own, *shown})
    if missing := sorted(shown - {*chosen}):
        raise typer.BadParameter(f"--traits leaves out {', '.join(missing)}, which dialogues have")
    return [own[trait] if trait in own else load_pairs(trait) for trait in chosen]


def print_agreement(alphas: Mapping[tuple[str, ...], Estimate]) -> None:
    """Krippendorff's alpha, a line for each group of raters."""
    for group, alpha in alphas.items():
        figure = alpha if alpha.value == alpha.value else "undefined: nothing in common, or all answers are the same"
        out.print(
            f"Krippendorff's alpha of {', '.join(group)}: {figure}", markup=False, highlight=False, soft_wrap=True
        )


def save_figures(path: Path, figures: Mapping[str, Any]) -> None:
    """Write figures as JSON, whole, and say where. What is no number in the headers of files that were read is null; of
    the figures, each says so itself."""
    from traitbasis.files import write_whole

    write_whole(path, json.dumps(_without_nan(figures), indent=1, ensure_ascii=False, allow_nan=False) + "\n")
    out.print("saved:", path, soft_wrap=True, markup=False)


def _without_nan(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nan(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
