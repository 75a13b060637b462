"""What was found of an agent's robustness as sentences, tables and JSON, for the terminal and the page alike."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from importlib.metadata import version
from typing import Any

from traitbasis.drops import DRAWS, Drop, Outcome, Robustness, leaderboard
from traitbasis.metrics.estimate import Estimate, finite
from traitbasis.outcomes import UNSTEERED

FORMAT = "traitbasis.report/1"


@dataclass(frozen=True)
class Grid:
    """A table of texts. title: whose; caption: how to read it."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    caption: str = ""


def summary(found: Robustness) -> str:
    """What was found, in a few sentences."""
    unsteered = next(outcome for outcome in found.conditions if outcome.condition == UNSTEERED)
    said = [
        f"With the unsteered user {found.agent.name} solves {unsteered.success} of its {unsteered.tasks} tasks "
        f"({unsteered.episodes} episodes)."
    ]
    measured = [drop for drop in found.pooled if not math.isnan(drop.drop.value)]
    if not measured:
        return f"{said[0]} No drop could be measured."
    worst = max(measured, key=lambda drop: drop.drop.value)
    if worst.drop.value > 0:
        said.append(f"It loses most under {worst.condition}: {worst.drop} of success{_of_that(worst)}.")
    else:
        said.append(f"It loses nothing under any condition; {worst.condition} comes nearest ({worst.drop}).")
    sure = sum(drop.drop.low > 0 for drop in measured)
    said.append(f"In {sure} of {len(measured)} conditions the whole 95 % interval is above zero.")
    return " ".join(said)


def leaderboard_grid(found: Sequence[Robustness]) -> Grid:
    """An agent a row, the most robust first."""
    standings = leaderboard(found)
    shared = ", ".join(standings[0].conditions) if standings and standings[0].conditions else "none"
    return Grid(
        "Agents by average drop",
        ("agent", "success, unsteered", "average drop"),
        tuple((s.agent, str(s.unsteered), str(s.drop)) for s in standings),
        f"On the {standings[0].tasks if standings else 0} tasks and the conditions that all agents have: {shared}. "
        "The average is over conditions. Success lost, as a share of tasks.",
    )


def drops_grid(found: Robustness) -> Grid:
    """A condition a row: what it costs, and what it costs an oracle."""
    columns = [*_where(found), "unsteered", "steered", "drop", "relative", "worse / better", "p (Holm)"]
    if found.oracle:
        columns += ["oracle, unsteered", "oracle, steered", "oracle's drop", "beyond the user's fault"]
    rows = []
    for drop in found.drops:
        row = [*_where(found, drop), str(drop.unsteered), str(drop.steered), str(drop.drop), str(drop.relative)]
        row += [f"{drop.worse} / {drop.better} of {drop.tasks}", _p(drop.p_holm)]
        if found.oracle:
            floor = drop.floor
            row += [str(e) for e in (floor.unsteered, floor.steered, floor.drop, floor.beyond)] if floor else ["-"] * 4
        rows.append(tuple(row))
    return Grid(
        f"Drops of {found.agent.name}",
        tuple(columns),
        tuple(rows),
        "Success lost against the unsteered user of the same prompt and model, paired by task, with 95 % intervals "
        "over tasks. "
        + (
            "What the oracle misses is the user's own fault; the last column is what is left without it."
            if found.oracle
            else "No noise floor: nobody knows how much of this is the user's own fault (--floor)."
        ),
    )


def success_grid(found: Robustness) -> Grid:
    """A condition a row: success, pass^k, and what is in no figure."""
    rewards = any(outcome.reward != outcome.success for outcome in found.outcomes)  # mostly they are the same
    columns = [*_where(found), "success (Avg)", *(["reward"] if rewards else [])]
    columns += [f"pass^{k}" for k in found.ks] + ["tasks", "episodes", "infrastructure", "missing"]
    rows = []
    for outcome in found.outcomes:
        row = [*_where(found, outcome), str(outcome.success), *([str(outcome.reward)] if rewards else [])]
        row += [_pass(outcome, k) for k in found.ks]
        row += [str(n) for n in (outcome.tasks, outcome.episodes, outcome.infrastructure, outcome.missing)]
        rows.append(tuple(row))
    return Grid(
        f"Success of {found.agent.name}",
        tuple(columns),
        tuple(rows),
        "pass^k: the chance that k trials of a task all succeed; after a slash the tasks that have k trials, where "
        "some have fewer. Infrastructure failures and missing episodes are in no figure.",
    )


def effort_grid(found: Robustness) -> Grid:
    """A condition a row: what an episode and a success take."""
    columns = ("condition", "steps", "user turns", "seconds", "agent tokens", "user tokens", "agent cost", "user cost")
    rows = []
    for outcome in found.conditions:
        e = outcome.effort
        row = [_number(e.steps, ".1f"), _number(e.turns, ".1f"), _number(e.seconds, ".1f")]
        row += [_number(e.agent_tokens, ".0f"), _number(e.user_tokens, ".0f")]
        row += [_number(e.agent_cost, ".4f"), _number(e.user_cost, ".4f")]
        row += [_number(e.agent_tokens_per_success, ".0f"), _number(e.agent_cost_per_success, ".4f")]
        rows.append((outcome.condition, *row))
    return Grid(
        f"Effort of {found.agent.name}",
        (*columns, "agent tokens / success", "agent cost / success"),
        tuple(rows),
        "Means per episode; costs in dollars, - where unknown.",
    )


def markdown(grid: Grid) -> str:
    """A grid as a table of Markdown."""
    lines = [grid.columns, tuple("---" for _ in grid.columns), *grid.rows]
    body = "\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines)
    return f"### {_cell(grid.title)}\n\n{body}\n\n{_cell(grid.caption)}\n"


def record(found: Sequence[Robustness]) -> dict[str, Any]:
    """Every figure with what made it (contract 11), for JSON: null where there is none."""
    oracle = found[0].oracle
    runs = [*(run for each in found for run in each.agent.runs), *(oracle.runs if oracle else ())]
    return {
        "format": FORMAT,
        "agents": [
            {
                "agent": each.agent.name,
                "summary": summary(each),
                "domains": list(each.domains),
                "outcomes": plain(each.outcomes),
                "drops": plain(each.drops),
                "warnings": list(each.warnings),
            }
            for each in found
        ],
        "leaderboard": plain(leaderboard(found)) if len(found) > 1 else None,
        "oracle": oracle.name if oracle else None,
        "runs": [{"path": str(run.path), "header": json.loads(run.header.model_dump_json())} for run in runs],
        "settings": {"k": list(found[0].ks), "bootstrap_draws": DRAWS, "bootstrap_seed": 0, "coverage": 0.95},
        "versions": {name: version(name) for name in ("traitbasis", "numpy")},
    }


def plain(value: Any) -> Any:
    """Dataclasses, estimates and tuples as JSON has them; nan becomes None."""
    if isinstance(value, Estimate):
        return value.record
    if is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(name): plain(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(part) for part in value]
    if isinstance(value, float):
        return finite(value, 6)
    return value


def _where(found: Robustness, row: Drop | Outcome | None = None) -> list[str]:
    """The first columns of a row, or their heads: the domain only where there are several."""
    condition, domain = (row.condition, row.domain or "all") if row else ("condition", "domain")
    return [condition, domain] if len(found.domains) > 1 else [condition]


def _of_that(drop: Drop) -> str:
    if drop.floor is None:
        return " (how much of it is the user's own fault is unknown: no oracle was run)"
    return (
        f"; an oracle loses {drop.floor.drop} there, which is the user's fault, and {drop.floor.beyond} is left "
        "without it"
    )


def _pass(outcome: Outcome, k: int) -> str:
    each = outcome.pass_hat[k]
    return f"{each.estimate} / {each.tasks}" if each.tasks < outcome.tasks else str(each.estimate)


def _number(value: float, spec: str) -> str:
    return "-" if math.isnan(value) else format(value, spec)


def _p(value: float) -> str:
    return "-" if math.isnan(value) else "<0.001" if value < 0.001 else f"{value:.3f}"


def _cell(text: str) -> str:
    """Text that cannot end its cell or its row, nor be HTML."""
    for sign, instead in (("\\", "\\\\"), ("|", "\\|"), ("<", "&lt;"), ("\n", " ")):
        text = text.replace(sign, instead)
    return text
