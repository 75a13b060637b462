"""What a layer sweep found, as one HTML file that needs nothing else: ``traitbasis select --report out.html``.

Also what the notebook shows of the same: the cells with the reasons (``cell_rows``), and turns of one context and seed
side by side (``examples``).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from importlib.metadata import version
from math import isfinite
from pathlib import Path
from typing import Any, Literal

import jinja2
from markupsafe import Markup

from traitbasis import plots
from traitbasis.annotate import one_line
from traitbasis.basis import Basis
from traitbasis.contexts import EvaluationContext, contexts_hash, read_contexts
from traitbasis.errors import ReportError
from traitbasis.files import write_whole
from traitbasis.pairs import PairSet, pair_set_hash
from traitbasis.select import RULE, Rule, Selection, Summary
from traitbasis.sweep import UNSTEERED, Cell, Spec


@dataclass(frozen=True)
class Row:
    """A cell in the table, and what the rule says of it. random: expression gained by a random direction of the same
    layer and dose, None where there is none."""

    kind: Literal["unsteered", "prompted", "chosen", "kept", "rejected"]
    summary: Summary
    random: float | None
    verdict: str


@dataclass(frozen=True)
class Example:
    """Turns to one context, drawn with one seed, by condition. task, agent: the context, empty where it is unknown."""

    context: str
    seed: int
    turns: Mapping[str, str]
    task: str = ""
    agent: str = ""


def write_report(
    path: str | Path,
    selections: Sequence[Selection],
    cells: Mapping[str, Sequence[Cell]],
    baselines: Sequence[Cell],
    pair_sets: Mapping[str, PairSet],
    made_by: Mapping[str, Any],
    *,
    rule: Rule = RULE,
    contexts: Sequence[EvaluationContext] | None = None,
    basis: Basis | None = None,
) -> Path:
    """Write the report, under a temporary name first.

    cells: by trait, steered and prompted. baselines: unsteered and random. made_by: model, fingerprints, seed,
    settings, versions. rule: the one that chose. contexts: those of the sweep; by default those that ship, where
    `made_by` says that they were taken (``contexts_hash``). basis: its calibrated columns are shown, too.

    Raises ReportError when matplotlib is missing, when there is no selection, when a trait's cells or pairs or the
    unsteered cell are not given, and when the file cannot be written.
    """
    if not selections:
        raise ReportError("there is no selection to report; make one with: traitbasis select")
    for what, known in (("cells", cells), ("pairs", pair_sets)):
        if missing := [selection.trait for selection in selections if selection.trait not in known]:
            raise ReportError(f"no {what} are given for {', '.join(missing)}; give those of every selection")
    known_contexts = read_contexts() if contexts is None else contexts
    if contexts is None and made_by.get("contexts_hash") != contexts_hash(known_contexts):
        known_contexts = []
    template = (resources.files("traitbasis") / "report.html").read_text("utf-8")
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters.update(number=_number, signed=_signed)
    page = environment.from_string(template).render(
        model=made_by.get("model", "the model"),
        sections=[
            _section(
                number, selection, [*cells[selection.trait], *baselines], pair_sets[selection.trait], known_contexts,
                rule, basis,
            )
            for number, selection in enumerate(selections)
        ],
        rule=rule_in_words(rule),
        made_by=[(name.replace("_", " ").strip(), _plain(value)) for name, value in made_by.items()],
        written_by={name: version(name) for name in ("traitbasis", "matplotlib")},
    )  # fmt: skip
    path = Path(path)
    try:
        write_whole(path, page)
    except OSError as error:
        raise ReportError(f"cannot write the report to {path}: {error.strerror or error}") from error
    return path


def cell_rows(selection: Selection, cells: Iterable[Cell], rule: Rule = RULE) -> list[Row]:
    """The unsteered user, the prompt-only persona, and every cell by layer and dose.

    cells: at least the unsteered one, which the floors are set by. Raises ReportError without it.
    """
    unsteered = next((cell for cell in cells if cell.spec == UNSTEERED), None)
    if unsteered is None:
        raise ReportError(f"no unsteered cell is given for {selection.trait}; add those of baselines.jsonl")
    plain = _unsteered_summary(unsteered)
    random = {(s.layer, s.dose): s.gain for s in selection.random}
    rows = [Row("unsteered", plain, None, ""), Row("prompted", selection.prompted, None, "")]
    for summary in sorted(selection.summaries, key=lambda s: (s.layer or 0, s.dose)):
        at = (summary.layer, summary.dose)
        if at == (selection.layer, selection.dose):
            rows.append(Row("chosen", summary, random.get(at), "chosen"))
        elif summary.rejected:
            why = "; ".join(_reasons(summary, selection, plain, rule))
            rows.append(Row("rejected", summary, random.get(at), f"rejected: {why}"))
        else:
            rows.append(Row("kept", summary, random.get(at), "keeps the floors"))
    return rows


def examples(
    selection: Selection, cells: Iterable[Cell], n: int = 3, contexts: Sequence[EvaluationContext] = ()
) -> list[Example]:
    """Turns to the first `n` contexts, by condition: ``steered``, ``unsteered``, ``prompted``, ``random``.

    Steered is the choice, or the clearest cell when nothing was chosen; random has its layer and dose. Not selected by
    what they say. A condition that has no such turn is left out.
    """
    shown = shown_summary(selection)
    conditions = {
        "steered": Spec("steered", selection.trait, shown.layer, shown.dose),
        "unsteered": UNSTEERED,
        "prompted": Spec("prompted", selection.trait),
        "random": Spec("random", None, shown.layer, shown.dose),
    }
    known = {cell.spec: cell for cell in cells}
    turns = {
        name: {(turn.context, turn.seed): turn.text for turn in known[spec].turns}
        for name, spec in conditions.items()
        if spec in known
    }
    spoken = {context.id: context.turns for context in contexts}
    found: dict[str, Example] = {}
    for context, seed in turns.get("steered", {}):
        if context not in found and len(found) < n:
            said = {name: by_case[context, seed] for name, by_case in turns.items() if (context, seed) in by_case}
            before = spoken.get(context, ())
            task = one_line(*(turn.text for turn in before if turn.speaker == "system"))
            found[context] = Example(context, seed, said, task, one_line(before[-1].text) if before else "")
    return list(found.values())


def shown_summary(selection: Selection) -> Summary:
    """The choice, or the cell with the clearest expression when nothing was chosen."""
    chosen = [s for s in selection.summaries if (s.layer, s.dose) == (selection.layer, selection.dose)]
    if not chosen and not selection.summaries:
        raise ReportError(f"no turns were measured for {selection.trait}; nothing can be shown")
    return chosen[0] if chosen else max(selection.summaries, key=lambda summary: summary.gain)


def rule_in_words(rule: Rule = RULE) -> list[str]:
    """The rule's floors with their numbers, and what is done with what keeps them."""
    return [
        f"A trait screens when, at some layer, its vector ranks held-back pairs with an AUC of at least {rule.auc:g} "
        f"and single pairs agree with a mean cosine of at least {rule.agreement:g}.",
        "The expression of a cell (a layer and a dose) is surely above the unsteered user's: its 95 % interval is.",
        "The share of the facts that it states is not surely below the unsteered user's (95 % interval).",
        f"It makes the tokens of facts in held-back responses at most {rule.fact_cost:g} nats less likely.",
        f"At most {rule.broken:g} more of its turns are broken, and at most {rule.role_flip:g} more speak as the "
        "agent, than unsteered (share).",
        "Its turns are on average no more surprising to the unsteered model than the trait's own positive responses "
        f"plus {rule.surprise:g} of their standard deviations, or than unsteered turns if those are more.",
        f"Its turns owe at least {rule.relevance:g} times as much to their own instruction as unsteered turns do "
        "(relevance: surprise in another conversation less surprise in its own).",
        f"Its expression is more than {rule.over_random:g} above that of a random direction of its dose and layer.",
        "Of the cells that keep all floors, those within one standard error of the clearest expression count as equal; "
        "of them the one that costs the facts least is chosen. If no cell keeps the floors, but some fail in nothing "
        "but facts, the layer of the one with the most expression for its fact cost is taken, with the dose that the "
        "facts bear there. Otherwise, or if the trait does not screen, it is not steerable on this model.",
    ]


def _unsteered_summary(cell: Cell) -> Summary:
    """The unsteered user beside itself."""
    names = ("facts", "broken", "role_flip", "surprise", "relevance", "words")
    means: dict[str, Any] = {name: float(cell.scores(name).mean()) for name in names}
    return Summary(
        layer=None,
        dose=0.0,
        gain=0.0,
        low=0.0,
        high=0.0,
        by_instrument={},
        over_random=None,
        facts_unsteered=means["facts"],
        facts_change=(0.0, 0.0),
        fact_cost=None,
        kl=None,
        **means,
    )


def _reasons(summary: Summary, selection: Selection, plain: Summary, rule: Rule) -> list[str]:
    """What a rejected cell fell below, with the numbers."""
    mean, deviation = selection.screening.surprise
    ceiling = max(mean + rule.surprise * deviation, plain.surprise)
    lost, kept = summary.facts_change
    said = {
        "expression": f"expression {_signed(summary.gain)}, not surely above 0 (from {_signed(summary.low)})",
        "facts": f"facts {summary.facts:.2f}, surely below unsteered ({_signed(lost)} to {_signed(kept)})",
        "fact_cost": f"fact cost {_number(summary.fact_cost)}, at most {rule.fact_cost:.2f}",
        "broken": f"broken {summary.broken:.2f}, at most {plain.broken + rule.broken:.2f}",
        "role_flip": f"role flips {summary.role_flip:.2f}, at most {plain.role_flip + rule.role_flip:.2f}",
        "surprise": f"surprise {summary.surprise:.2f}, at most {ceiling:.2f}",
        "relevance": f"relevance {summary.relevance:.2f}, at least {rule.relevance * plain.relevance:.2f}",
        "over_random": f"over random {_signed(summary.over_random)}, above {rule.over_random:+.2f}",
    }
    return [said.get(name, name) for name in summary.rejected]


def _section(
    number: int,
    selection: Selection,
    cells: Sequence[Cell],
    pair_set: PairSet,
    contexts: Sequence[EvaluationContext],
    rule: Rule,
    basis: Basis | None,
) -> dict[str, Any]:
    """What the page shows of one trait."""
    figures = {
        "screening": plots.screening_figure(selection, rule),
        "likelihood": plots.likelihood_figure(selection, rule),
        "sweep": plots.sweep_figure(selection, cells),
    }
    if basis and any(c.trait == selection.trait and c.curve and c.limit is not None for c in basis.columns):
        figures["calibration"] = plots.calibration_figure(basis, selection.trait)
    shown = shown_summary(selection)
    return {
        "id": f"trait-{number}",
        "selection": selection,
        "shown": shown,
        "random": next((s for s in selection.random if (s.layer, s.dose) == (shown.layer, shown.dose)), None),
        "definition": pair_set.definition,
        "opposite": pair_set.opposite,
        "pair": (pair_set.select("default") or pair_set.pairs)[0],
        "pairs_hash": pair_set_hash(pair_set.pairs)[:16],
        "figures": {name: Markup(plots.svg(figure, f"f{number}-{name}")) for name, figure in figures.items()},
        "rows": cell_rows(selection, cells, rule),
        "examples": examples(selection, cells, contexts=contexts),
        "instruments": list(selection.prompted.by_instrument),
        "peak": max(selection.screening.auc),
        "statement": _statement(selection, shown),
    }


def _statement(selection: Selection, shown: Summary) -> str:
    """What was found against the baselines, plainly."""
    prompted = selection.prompted
    expression = "above" if shown.gain > prompted.gain else "not above"
    facts = "no fewer facts" if shown.facts >= prompted.facts else "fewer facts"
    lead = shown.over_random
    random = "" if lead is None else f" It is {lead:+.2f} from a random direction of the same dose and layer."
    return (
        f"Expression is {shown.gain:+.2f} against unsteered (95\u00a0%: {shown.low:+.2f} to {shown.high:+.2f}), "
        f"{expression} a prompt-only persona ({prompted.gain:+.2f}), with {facts} than it ({shown.facts:.2f} against "
        f"{prompted.facts:.2f}; unsteered {shown.facts_unsteered:.2f}).{random}"
    )


def _number(value: float | None) -> str:
    return "–" if value is None or not isfinite(value) else f"{value:.2f}"


def _signed(value: float | None) -> str:
    return "–" if value is None or not isfinite(value) else f"{value:+.2f}"


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
