"""Figures of an agent's robustness: drops beside their noise floor, success by condition, pass^k."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from traitbasis.drops import Outcome, Robustness
from traitbasis.metrics.estimate import Estimate
from traitbasis.outcomes import UNSTEERED
from traitbasis.plots import INK, PROMPTED, RANDOM, SERIES, STEERED, legend_handle, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MARKERS = "os^Dv<>P"
_LONGEST = 48  # characters of a label


def drops_figure(found: Robustness) -> Figure:
    """A forest plot: each condition's drop with its interval, the oracle's, and what is left without it."""
    drops = found.drops
    labels = [_label(drop.condition, drop.domain, found) for drop in drops]
    series: list[tuple[str, str, str, list[Estimate]]] = [("drop", STEERED, "o", [drop.drop for drop in drops])]
    if found.oracle:
        nothing = Estimate(math.nan)
        floors = [drop.floor for drop in drops]
        series += [
            ("oracle's drop: the user's fault", RANDOM, "x", [f.drop if f else nothing for f in floors]),
            ("drop beyond the user's fault", PROMPTED, "D", [f.beyond if f else nothing for f in floors]),
        ]
    figure, axis = _rows_figure(f"{found.agent.name}: success lost", labels, len(series))
    axis.axvline(0, color=INK, linewidth=1, linestyle=":")
    _points(axis, series)
    _finish(figure, axis, "success lost against the unsteered user (share of tasks)", series)
    figure.set_label(
        "Points with 95 % intervals, a row for each condition. "
        + " ".join(
            f"{label}: {', '.join(f'{name} {estimates[i]}' for name, _, _, estimates in series)}."
            for i, label in enumerate(labels)
        )
    )
    return figure


def success_figure(found: Robustness) -> Figure:
    """Success by condition, with intervals."""
    outcomes = found.outcomes
    labels = [_label(outcome.condition, outcome.domain, found) for outcome in outcomes]
    series = [("success", STEERED, "o", [outcome.success for outcome in outcomes])]
    figure, axis = _rows_figure(f"{found.agent.name}: success", labels, 1)
    axis.set_xlim(-0.03, 1.03)
    for i, outcome in enumerate(outcomes):
        if outcome.condition == UNSTEERED and not math.isnan(outcome.success.value):
            end = i + len(found.conditions) - 0.5
            axis.vlines(outcome.success.value, i - 0.5, end, color=INK, linewidth=1, linestyle=":")
    _points(axis, series)
    _finish(figure, axis, "success (mean over tasks)", series)
    said = " ".join(f"{label}: {outcome.success}." for label, outcome in zip(labels, outcomes, strict=True))
    figure.set_label(f"Points with 95 % intervals, a row for each condition. {said}")
    return figure


def pass_figure(found: Robustness) -> Figure:
    """pass^k by k, a line for each condition: how reliable the agent is when a task comes again."""
    figure, axes = new_figure(1, 1, (6.4, 4.2), f"{found.agent.name}: pass^k")
    axis, handles = axes[0, 0], []
    for i, outcome in enumerate(found.conditions):
        style = _line(i)
        axis.plot(found.ks, [outcome.pass_hat[k].estimate.value for k in found.ks], **style, markersize=5)
        handles.append(legend_handle(label=_short(outcome.condition), **style))
    axis.set_ylim(-0.03, 1.03)
    axis.set_xticks(list(found.ks))
    axis.set_xlabel("k")
    axis.set_ylabel("pass^k (share of tasks)")
    _legend(figure, handles, 2)
    figure.set_label(
        "pass^k, the chance that k trials of a task all succeed, by k. "
        + " ".join(f"{_short(outcome.condition)}: {_curve(outcome, found.ks)}." for outcome in found.conditions)
    )
    return figure


def _rows_figure(title: str, labels: Sequence[str], series: int) -> tuple[Figure, Any]:
    height = 1.5 + (0.14 + 0.16 * series) * len(labels)
    figure, axes = new_figure(1, 1, (7.2, max(height, 2.2)), title)
    axis = axes[0, 0]
    axis.set_yticks(range(len(labels)), labels=list(labels))
    for label in axis.get_yticklabels():
        label.set_parse_math(False)  # a name may have dollar signs
    axis.set_ylim(len(labels) - 0.5, -0.5)
    return figure, axis


def _points(axis: Axes, series: Sequence[tuple[str, str, str, Sequence[Estimate]]]) -> None:
    """Every series a little below the one before."""
    for j, (_, color, marker, estimates) in enumerate(series):
        shift = 0.22 * (j - (len(series) - 1) / 2)
        for i, estimate in enumerate(estimates):
            if not math.isnan(estimate.low):
                axis.hlines(i + shift, estimate.low, estimate.high, color=color, linewidth=1.6)
            axis.plot([estimate.value], [i + shift], color=color, marker=marker, markersize=5)


def _finish(figure: Figure, axis: Axes, label: str, series: Sequence[tuple[str, str, str, Sequence[Estimate]]]) -> None:
    axis.set_xlabel(label)
    _legend(figure, [legend_handle(color, marker, "-", f"{name}, 95 %") for name, color, marker, _ in series], 3)


def _legend(figure: Figure, handles: Sequence[Any], columns: int) -> None:
    legend = figure.legend(
        handles=handles, loc="outside lower center", ncols=columns, frameon=False, labelcolor=INK, fontsize="small"
    )
    for text in legend.get_texts():
        text.set_parse_math(False)


def _line(i: int) -> dict[str, Any]:
    """Unsteered is ink; the others' colours, markers and lines come again in another combination."""
    if i == 0:
        return {"color": INK, "marker": "o", "linestyle": ":"}
    style = SERIES[(i - 1) % len(SERIES)]
    return {**style, "marker": _MARKERS[(i - 1) % len(_MARKERS)], "linestyle": SERIES[i // 2 % 4]["linestyle"]}


def _curve(outcome: Outcome, ks: Sequence[int]) -> str:
    return ", ".join(f"k = {k} {outcome.pass_hat[k].estimate}" for k in ks)


def _label(condition: str, domain: str | None, found: Robustness) -> str:
    return _short(condition if len(found.domains) == 1 else f"{condition}, {domain or 'all domains'}")


def _short(name: str) -> str:
    return name if len(name) <= _LONGEST else f"{name[: _LONGEST - 1]}…"
