"""Figures of a layer sweep and of a calibration, for the notebook and for the report alike.

Colours are of the set by Okabe and Ito, which all kinds of colour vision tell apart; line styles and markers say the
same again, for print. Every figure has a text for those who do not see it, ``alt_text``. matplotlib is imported when a
figure is made (``pip install 'traitbasis[plots]'``), without pyplot: nothing global is set, and nothing stays open.
"""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Any

from traitbasis.basis import Basis
from traitbasis.calibrate import Levels
from traitbasis.errors import ReportError
from traitbasis.select import RULE, Rule, Selection, Summary, bootstrap
from traitbasis.sweep import UNSTEERED, Cell, Spec

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STEERED, PROMPTED, RANDOM = "#0072b2", "#d55e00", "#767676"
INK, GROUND = "#1d1c1a", "#fefefd"  # ``svg`` makes them the page's own
_LAYER = "layer (decoder block, from 0)"
_DOSE = "dose (added / hidden norm)"
_MOST_COLUMNS = 4  # of layers; where there are more, a column is a dose
SERIES: tuple[dict[str, Any], ...] = (  # colour, marker and line of a dose; the first is measured at most layers
    {"color": STEERED, "marker": "o", "linestyle": "-"},
    {"color": "#cc79a7", "marker": "s", "linestyle": "--"},
    {"color": "#009e73", "marker": "^", "linestyle": "-."},
    {"color": "#e69f00", "marker": "D", "linestyle": ":"},
)
Band = tuple[float, float]


@dataclass(frozen=True)
class _Row:
    """A quantity of the sweep: field of a Summary, which is the name of the score, too."""

    name: str
    label: str


_ROWS = (
    _Row("gain", "expression gained\n(1: the pairs' gap)"),
    _Row("facts", "facts stated\n(share)"),
    _Row("broken", "broken turns\n(share)"),
    _Row("surprise", "surprise\n(nats / token)"),
)


def screening_figure(selection: Selection, rule: Rule = RULE) -> Figure:
    """What pairs alone say, by layer: agreement, AUC and Cohen's d of held-back pairs; the chosen layer is marked."""
    screening = selection.screening
    figure, axes = new_figure(3, 1, (6.4, 6.0), f"{selection.trait}: screening by pairs")
    panels = (
        (screening.agreement, "agreement of pairs\n(mean cosine)", rule.agreement),
        (screening.auc, "AUC,\nheld-back pairs", rule.auc),
        (screening.cohens_d, "Cohen's d,\nheld-back pairs", None),
    )
    for axis, (values, label, floor) in zip(axes[:, 0], panels, strict=True):
        axis.plot(range(len(values)), values, color=STEERED, marker="o", markersize=3)
        if floor is not None:
            axis.axhline(floor, color=INK, linestyle=":", linewidth=1)
        axis.set_ylabel(label)
    handles = [legend_handle(STEERED, "o", "-", "pairs"), legend_handle(INK, "", ":", "least that screens")]
    _mark_layers(selection, axes[:, 0], handles)
    finish_figure(figure, axes, _LAYER, handles)
    peak = max(range(len(screening.auc)), key=lambda z: screening.auc[z])
    figure.set_label(
        f"Three curves by layer for {selection.trait}. Agreement of pairs: {_range(screening.agreement)}. "
        f"AUC of held-back pairs: {_range(screening.auc)}, highest at layer {peak}. "
        f"Cohen's d: {_range(screening.cohens_d)}. {_chosen(selection)}"
    )
    return figure


def likelihood_figure(selection: Selection, rule: Rule = RULE) -> Figure:
    """What a dose does to the model's probabilities, by layer: preference, fact cost, KL, a line for each dose; the
    chosen layer is marked."""
    figure, axes = new_figure(3, 1, (6.4, 6.0), f"{selection.trait}: likelihood of held-back pairs, steered")
    panels = (
        ("preference", "preference gained\n(nats / token)", 0.0),
        ("fact_cost", "fact cost\n(nats / fact token)", rule.fact_cost),
        ("kl", "KL to unsteered\n(nats / token)", None),
    )
    layers = Counter(at.dose for at in selection.likelihood)
    styles = {dose: SERIES[i % len(SERIES)] for i, (dose, _) in enumerate(layers.most_common())}
    doses = sorted(styles)
    for axis, (name, label, line) in zip(axes[:, 0], panels, strict=True):
        for dose in doses:
            points = sorted((at.layer, getattr(at, name)) for at in selection.likelihood if at.dose == dose)
            axis.plot(*zip(*points, strict=True), **styles[dose], markersize=4)
        if line is not None:
            axis.axhline(line, color=INK, linestyle=":", linewidth=1)
        axis.set_ylabel(label)
    handles = [legend_handle(label=f"dose {dose:g}", **styles[dose]) for dose in doses]
    handles.append(legend_handle(INK, "", ":", "no preference; most that facts may cost"))
    _mark_layers(selection, axes[:, 0], handles)
    finish_figure(figure, axes, _LAYER, handles)
    said = "; ".join(
        f"{label.splitlines()[0]}: {_range([getattr(at, name) for at in selection.likelihood])}"
        for name, label, _ in panels
    )
    over = ", ".join(f"{dose:g}" for dose in doses)
    figure.set_label(f"Three curves by layer for {selection.trait}, at doses {over}: {said}. {_chosen(selection)}")
    return figure


def sweep_figure(selection: Selection, cells: Sequence[Cell] = ()) -> Figure:
    """What turns show: expression, facts, broken turns and surprise, a column for each layer (where there are more than
    four, or one dose: for each dose, by layer).

    With 95 % bands, beside the prompt-only persona and a random direction of the same dose and layer. What the rule
    rejected is hollow, the choice is circled.

    cells: those of the selection and its baselines; with them every curve has a band and the unsteered user is in every
    plot. Without them only expression has bands.
    """
    layers = sorted({s.layer for s in selection.summaries if s.layer is not None})
    doses = sorted({s.dose for s in selection.summaries})
    if not layers:
        raise ReportError(f"no turns were measured for {selection.trait}; nothing can be drawn")
    by_dose = len(layers) == 1 or (len(layers) <= _MOST_COLUMNS and len(doses) > 1)
    columns: list[Any] = [*layers] if by_dose else [*doses]
    title = f"{selection.trait}: turns, beside their baselines"
    figure, axes = new_figure(4, len(columns), (2.0 + 2.2 * max(len(columns), 2), 8.4), title, sharey="row")
    known = {cell.spec: cell for cell in cells}

    def at(summary: Summary) -> float:
        return summary.dose if by_dose else float(summary.layer or 0)

    def column_of(summary: Summary) -> Any:
        return summary.layer if by_dose else summary.dose

    for i, row in enumerate(_ROWS):
        axes[i, 0].set_ylabel(row.label)
        for j, column in enumerate(columns):
            axis = axes[i, j]
            if i == 0:
                axis.set_title(f"layer {column}" if by_dose else f"dose {column:g}", fontsize="medium")
            if row.name in ("facts", "broken"):
                axis.set_ylim(-0.04, 1.04)
            _baselines(axis, row, selection, known)
            for group, name, style in (
                (selection.random, None, {"color": RANDOM, "linestyle": "--", "marker": "x"}),
                (selection.summaries, selection.trait, {"color": STEERED, "linestyle": "-"}),
            ):
                drawn = sorted((s for s in group if column_of(s) == column), key=at)
                specs = [Spec("steered" if name else "random", name, s.layer, s.dose) for s in drawn]
                bands = [_band(row, s, known.get(spec)) for s, spec in zip(drawn, specs, strict=True)]
                draw_curve(axis, [at(s) for s in drawn], [getattr(s, row.name) for s in drawn], bands, **style)
            for summary in selection.summaries:
                if column_of(summary) == column:
                    _dot(axis, at(summary), getattr(summary, row.name), selection, summary)
    handles = [
        legend_handle(STEERED, "o", "-", "steered, 95 % band"),
        legend_handle(STEERED, "o", "-", "rejected by the rule", GROUND),
        *([legend_handle(INK, "o", "", "the choice", "none", 11)] if selection.steerable else []),
        legend_handle(PROMPTED, "", "-.", "prompt-only persona"),
        legend_handle(RANDOM, "x", "--", "random direction, same dose"),
        legend_handle(INK, "", ":", "unsteered"),
    ]
    finish_figure(figure, axes, _DOSE if by_dose else _LAYER, handles, doses if by_dose else ())
    figure.set_label(_sweep_text(selection, columns, by_dose))
    return figure


def calibration_figure(levels: Levels | Basis, trait: str = "") -> Figure:
    """The measured curve of a trait at its layer by rising dose, with low, medium, high and the limit marked.

    levels: as ``calibrate`` gives them, or a calibrated basis and the name of one of its traits. Raises ReportError
    when nothing was calibrated.
    """
    if isinstance(levels, Basis):
        levels = _stored(levels, trait)
    curve, doses = levels.curve, [point.dose for point in levels.curve]
    if not curve:
        raise ReportError(f"{trait or 'the trait'} has no measured curve; make one with: traitbasis calibrate")
    rows = 4 if levels.fact_cost else 3
    name = f"{trait}: " if trait else ""
    figure, axes = new_figure(rows, 1, (6.8, 2.0 + 1.5 * rows), f"{name}calibration by dose")
    bands: list[Band | None] = [(point.expression_low, point.expression_high) for point in curve]
    panels: list[tuple[list[float], str, list[Band | None]]] = [
        ([point.expression for point in curve], _ROWS[0].label, bands),
        ([point.facts for point in curve], _ROWS[1].label, []),
        ([point.damage for point in curve], "damaged turns\nabove unsteered (share)", []),
    ]
    if levels.fact_cost:
        panels.append((list(levels.fact_cost), "fact cost\n(nats / fact token)", []))
    marks = {"low": levels.low, "medium": levels.medium, "high": levels.high, "limit": levels.limit}
    for axis, (values, label, band) in zip(axes[:, 0], panels, strict=True):
        draw_curve(axis, doses[: len(values)], values, band, color=STEERED, linestyle="-", marker="o")
        axis.set_ylabel(label)
        for mark, dose in marks.items():
            axis.axvline(dose, color=PROMPTED if mark == "limit" else INK, linestyle="-" if mark == "limit" else ":")
        if (right := max(doses)) > levels.limit:
            axis.axvspan(levels.limit, right, color=PROMPTED, alpha=0.12, linewidth=0)
    for mark, dose in marks.items():
        axes[0, 0].annotate(
            f"{mark} {dose:.2f}", (dose, 1), xycoords=("data", "axes fraction"), xytext=(0, 4),
            textcoords="offset points", rotation=40, fontsize="small",
        )  # fmt: skip
    handles = [
        legend_handle(STEERED, "o", "-", "measured, 95 % band where there is one"),
        legend_handle(INK, "", ":", "levels"),
        legend_handle(PROMPTED, "", "-", "limit: more is refused"),
    ]
    finish_figure(figure, axes, _DOSE, handles, doses)
    figure.set_label(
        f"Curves by dose for {trait or 'a trait'}. Expression gained: {_range([p.expression for p in curve])}; "
        f"facts stated: {_range([p.facts for p in curve])}; damaged turns: {_range([p.damage for p in curve])}. "
        f"Doses: {', '.join(f'{mark} {dose:.3f}' for mark, dose in marks.items())}."
    )
    return figure


def alt_text(figure: Figure) -> str:
    """What a figure shows, in words and numbers."""
    return str(figure.get_label())


def svg(figure: Figure, name: str) -> str:
    """A figure as an ``<svg>`` element to stand in a page: text stays text, colours are the page's, light and dark.

    Ink is ``currentColor``; the others are the CSS variables ``--panel``, ``--steered``, ``--prompted``, ``--random``,
    where the page has them. name: begins every id, so that several figures can stand in one page.
    """
    matplotlib = load_matplotlib()
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "traitbasis"}):
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(buffer, format="svg", transparent=True, metadata=nothing)
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    text = text.replace("xlink:href", "href").replace(INK, "currentColor")
    for variable, color in (("panel", GROUND), ("steered", STEERED), ("prompted", PROMPTED), ("random", RANDOM)):
        text = text.replace(color, f"var(--{variable}, {color})")
    text = re.sub(r"'DejaVu Sans'[^;\"]*", "sans-serif", text)
    used = set(re.findall(r"#([\w-]+)", text))
    text = re.sub(r' id="([^"]*)"', lambda m: f' id="{name}-{m[1]}"' if m[1] in used else "", text)
    text = re.sub(r'(url\(|href=")#', rf"\1#{name}-", text)
    title, description = (_escape(part) for part in (figure.get_suptitle(), alt_text(figure)))
    opened, drawn = text[: text.index(">")], text[text.index(">") + 1 :]
    box = re.findall(r'viewBox="[^"]*"', opened)[0]
    return (
        f'<svg {box} role="img" aria-labelledby="{name}-title {name}-text"><title id="{name}-title">{title}</title>'
        f'<desc id="{name}-text">{description}</desc>' + re.sub(r">\s+<", "><", drawn).strip()
    )


# ---- Parts of figures, of other modules' too


def load_matplotlib() -> Any:
    """The package, which is optional. Raises ReportError without it."""
    try:
        import matplotlib
        import matplotlib.figure
    except ImportError as error:
        raise ReportError("figures need matplotlib, which is not installed: pip install 'traitbasis[plots]'") from error
    return matplotlib


def new_figure(rows: int, columns: int, size: Band, title: str, sharey: Any = False) -> tuple[Figure, Any]:
    """A figure in the style of all, and its axes ``(rows, columns)``; size in inches. Raises ReportError without
    matplotlib."""
    figure = load_matplotlib().figure.Figure(figsize=size, layout="constrained", dpi=110)
    axes = figure.subplots(rows, columns, sharex=True, sharey=sharey, squeeze=False)
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
        axis.spines[["left", "bottom"]].set_color(INK)
        axis.tick_params(colors=INK, labelsize="small")
        axis.set_facecolor("none")
        for label in (axis.xaxis.label, axis.yaxis.label, axis.title):
            label.set_color(INK)
            label.set_fontsize("small")
    figure.suptitle(title, color=INK, fontsize="large", parse_math=False)
    return figure, axes


def finish_figure(figure: Figure, axes: Any, label: str, handles: Sequence[Any], ticks: Sequence[float] = ()) -> None:
    """Say what the lowest axes show, at `ticks` or whole numbers, and put the legend below."""
    from matplotlib.ticker import FixedLocator, MaxNLocator

    for axis in axes[-1]:
        axis.set_xlabel(label)
        axis.xaxis.set_major_locator(FixedLocator(list(ticks)) if ticks else MaxNLocator(integer=True))
    legend = figure.legend(
        handles=handles, loc="outside lower center", ncols=min(len(handles), 3), frameon=False,
        labelcolor=INK, fontsize="small",
    )  # fmt: skip
    for text in legend.get_texts():
        text.set_parse_math(False)  # a name may have dollar signs


def legend_handle(color: str, marker: str, linestyle: str, label: str, face: str | None = None, size: float = 5) -> Any:
    """A line and marker for a legend. face: of the marker, by default its colour."""
    from matplotlib.lines import Line2D

    return Line2D(
        [], [], color=color, marker=marker, linestyle=linestyle, label=label, markersize=size,
        markerfacecolor=color if face is None else face,
    )  # fmt: skip


def _mark_layers(selection: Selection, axes: Sequence[Axes], handles: list[Any]) -> None:
    """The chosen layer, and those where turns were written."""
    tried = {summary.layer for summary in selection.summaries if summary.layer is not None}
    for axis in axes:
        for layer in tried:
            axis.axvline(layer, color=RANDOM, linestyle="--", linewidth=0.7, zorder=0)
        if selection.layer is not None:
            axis.axvline(selection.layer, color=PROMPTED, linewidth=2, alpha=0.8, zorder=0)
    handles.append(legend_handle(RANDOM, "", "--", "turns were written here"))
    if selection.layer is not None:
        handles.append(legend_handle(PROMPTED, "", "-", f"chosen: layer {selection.layer}"))


def _baselines(axis: Axes, row: _Row, selection: Selection, known: dict[Spec, Cell]) -> None:
    """Horizontal lines: the prompt-only persona with its band, and the unsteered user."""
    prompted = selection.prompted
    band = _band(row, prompted, known.get(Spec("prompted", selection.trait)))
    if band:
        axis.axhspan(*band, color=PROMPTED, alpha=0.13, linewidth=0)
    axis.axhline(getattr(prompted, row.name), color=PROMPTED, linestyle="-.", linewidth=1.3)
    plain = {"gain": 0.0, "facts": prompted.facts_unsteered}.get(row.name)
    if plain is None and UNSTEERED in known:
        plain = float(known[UNSTEERED].scores(row.name).mean())
    if plain is not None:
        axis.axhline(plain, color=INK, linestyle=":", linewidth=1.3)


def _band(row: _Row, summary: Summary, cell: Cell | None) -> Band | None:
    """95 % interval of a quantity's mean."""
    if row.name == "gain":
        return summary.low, summary.high
    return bootstrap(cell.scores(row.name)) if cell else None


def draw_curve(axis: Axes, x: Sequence[float], y: Sequence[float], bands: Sequence[Band | None], **style: Any) -> None:
    """A line with its band; a point that stands alone gets a bar."""
    axis.plot(x, y, markersize=4, linewidth=1.5, **style)
    between = [band for band in bands if band]
    if not between or len(between) < len(x):
        return
    lows, highs = zip(*between, strict=True)
    if len(x) > 1:
        axis.fill_between(x, lows, highs, color=style["color"], alpha=0.18, linewidth=0)
    else:
        axis.vlines(x, lows, highs, color=style["color"], linewidth=1.5)


def _dot(axis: Axes, x: float, y: float, selection: Selection, summary: Summary) -> None:
    face = GROUND if summary.rejected else STEERED
    axis.plot([x], [y], color=STEERED, marker="o", markersize=5, markerfacecolor=face, zorder=3)
    if (summary.layer, summary.dose) == (selection.layer, selection.dose):
        axis.plot([x], [y], color=INK, marker="o", markersize=11, markerfacecolor="none", zorder=4, clip_on=False)


def _stored(basis: Basis, trait: str) -> Levels:
    """A basis's column as doses: what an intensity of 1 is depends on its direction."""
    column = next((column for column in basis.columns if column.trait == trait), None)
    if column is None:
        raise ReportError(f"the basis has no trait {trait!r}; it has {', '.join(basis.traits)}")
    if not column.curve or column.limit is None:
        raise ReportError(f"{trait} is not calibrated in this basis; run: traitbasis calibrate --trait {trait}")
    medium = basis.dose({trait: 1.0})
    low, high = medium * column.low, medium * column.high
    capped = column.limit >= max(point.dose for point in column.curve)
    return Levels(low, medium, high, column.limit, column.curve, (), capped)


# ---- Figures in words


def _range(values: Sequence[float]) -> str:
    known = [value for value in values if value == value and abs(value) < inf]
    return f"{min(known):.2f} to {max(known):.2f}" if known else "unknown"


def _chosen(selection: Selection) -> str:
    return f"Chosen: layer {selection.layer}." if selection.steerable else f"Not steerable: {selection.reason}."


def _sweep_text(selection: Selection, columns: Sequence[Any], by_dose: bool) -> str:
    over = f"by dose, a column for each of layers {_list(columns)}" if by_dose else "by layer, a column for each dose"
    chosen = [s for s in selection.summaries if (s.layer, s.dose) == (selection.layer, selection.dose)]
    shown = chosen[0] if chosen else max(selection.summaries, key=lambda summary: summary.gain)
    word = "The choice" if chosen else "None keeps the floors; the clearest"
    rejected = sum(bool(summary.rejected) for summary in selection.summaries)
    random = max((summary.gain for summary in selection.random), default=None)
    return (
        f"Expression, facts, broken turns and surprise for {selection.trait}, {over}. {word} is layer {shown.layer} at "
        f"dose {shown.dose:g}: expression {shown.gain:+.2f} above unsteered (95 %: {shown.low:+.2f} to "
        f"{shown.high:+.2f}), facts {shown.facts:.2f} against {shown.facts_unsteered:.2f} unsteered. Prompt-only: "
        f"expression {selection.prompted.gain:+.2f}, facts {selection.prompted.facts:.2f}. "
        + (f"Random directions: expression at most {random:+.2f}. " if random is not None else "")
        + f"{rejected} of {len(selection.summaries)} cells were rejected."
    )


def _list(values: Sequence[Any]) -> str:
    *first, last = [str(value) for value in values]
    return f"{', '.join(first)} and {last}" if first else last


def _escape(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
