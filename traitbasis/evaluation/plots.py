"""Figures of evaluations; see ``traitbasis/plots.py`` for their conventions."""

from __future__ import annotations

import io
from collections.abc import Sequence
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING, Any

from traitbasis.errors import ReportError
from traitbasis.evaluation.consistency import Consistency, Curve
from traitbasis.files import write_whole
from traitbasis.plots import (
    PROMPTED,
    RANDOM,
    STEERED,
    draw_curve,
    finish_figure,
    legend_handle,
    load_matplotlib,
    new_figure,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_FORMATS = (".svg", ".png", ".pdf")
_STYLES: dict[str, dict[str, Any]] = {
    "steered": {"color": STEERED, "marker": "o"},
    "prompted": {"color": PROMPTED, "marker": "s"},
    "unsteered": {"color": RANDOM, "marker": "x"},
}
_OTHERS: tuple[dict[str, Any], ...] = (
    {"color": "#009e73", "marker": "^"},
    {"color": "#cc79a7", "marker": "D"},
    {"color": "#e69f00", "marker": "v"},
    {"color": "#56b4e9", "marker": "P"},
)


def consistency_figure(found: Consistency) -> Figure:
    """Expression by turn, a plot for each trait, and the share of broken turns below, with 95 % bands.

    Neutral dialogues are dotted. Raises ReportError when nothing was measured by turn."""
    traits = list(dict.fromkeys(curve.trait for curve in found.curves))
    if not traits:
        raise ReportError("there are no dialogues to draw")
    title = f"expression by turn, in dialogues of {found.least_turns} turns and more"
    figure: Figure
    figure, axes = new_figure(len(traits), 1, (7.2, 1.6 + 2.1 * len(traits)), title)
    methods = list(dict.fromkeys(curve.method for curve in found.curves))
    others = [method for method in methods if method not in _STYLES]
    styles = _STYLES | {method: _OTHERS[i % len(_OTHERS)] for i, method in enumerate(others)}
    for axis, trait in zip(axes[:, 0], traits, strict=True):
        axis.set_ylabel(f"{trait}\n(1: as the pairs show it)" if trait else "broken turns\n(share)")
        for curve in found.curves:
            if curve.trait == trait:
                _draw(axis, curve, styles[curve.method])
    drawn = sorted({(methods.index(curve.method), curve.neutral) for curve in found.curves})
    handles = [
        legend_handle(label=_name(methods[i], neutral), linestyle=_line(neutral), **styles[methods[i]])
        for i, neutral in drawn
    ]
    finish_figure(figure, axes, "customer's turn", handles)
    figure.set_label(" ".join(_in_words(curve) for curve in found.curves))
    return figure


def save_figure(figure: Figure, path: Path) -> Path:
    """Write a figure, whole, in the format its name says: svg, png or pdf. Raises ReportError for another one."""
    if path.suffix not in _FORMATS:
        raise ReportError(f"cannot tell a figure's format from {path}; end its name with one of {', '.join(_FORMATS)}")
    buffer = io.BytesIO()
    with load_matplotlib().rc_context({"svg.hashsalt": "traitbasis"}):
        figure.savefig(buffer, format=path.suffix[1:])
    return write_whole(path, buffer.getvalue())


def _draw(axis: Axes, curve: Curve, style: dict[str, Any]) -> None:
    points = [point for point in curve.points if not isnan(point.value.value)]
    if points:
        bands = [(p.value.low, p.value.high) if not isnan(p.value.low) else None for p in points]
        values = [p.value.value for p in points]
        draw_curve(axis, [p.turn for p in points], values, bands, linestyle=_line(curve.neutral), **style)


def _line(neutral: bool) -> str:
    return ":" if neutral else "-"


def _name(method: str, neutral: bool) -> str:
    return f"{method}, neutral" if neutral else method


def _in_words(curve: Curve) -> str:
    values: Sequence[float] = [point.value.value for point in curve.points if not isnan(point.value.value)]
    ends = f"from {values[0]:.2f} to {values[-1]:.2f}" if values else "unknown"
    return f"{_name(curve.method, curve.neutral)}, {curve.trait or 'broken turns'}: {ends}."
