"""Matrices of traits as heat maps: in the terminal, where every value is a number too, and as a picture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.style import Style
from rich.text import Text

if TYPE_CHECKING:
    from traitbasis.basis import Basis
    from traitbasis.composition import Leakage

MANY = 12  # above so many traits small values become dots, unless all are asked for
_RED, _BLUE, _PAPER = (178, 24, 43), (33, 102, 172), (247, 247, 247)


@dataclass(frozen=True)
class Grid:
    """A matrix to show. apart: in brackets, what compares less. sure: with a star. small: below it a dot may stand.

    full: the value with the strongest colour. notes: a second line under each value.
    """

    title: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    values: Sequence[Sequence[float]]
    full: float
    small: float
    apart: Sequence[Sequence[bool]] | None = None
    sure: Sequence[Sequence[bool]] | None = None
    notes: Sequence[Sequence[str]] | None = None

    def text(self, i: int, j: int) -> str:
        plain = short(self.values[i][j])
        if self.apart and self.apart[i][j]:
            return f"({plain})"
        return f"{plain}*" if self.sure and self.sure[i][j] else f"{plain} "

    def hidden(self, i: int, j: int) -> bool:
        """A small value off the diagonal, or one that may as well be chance."""
        unsure = self.sure is not None and not self.sure[i][j]
        return i != j and (abs(self.values[i][j]) < self.small or unsure)


def short(value: float) -> str:
    """Two decimals, a sign, and no zero before the point: +.07, -1.20, .00."""
    text = f"{value:+.2f}"
    return ".00" if text[1:] == "0.00" else text[0] + text[1:].removeprefix("0")


def cosine_grid(basis: Basis) -> Grid:
    layers = [column.layer for column in basis.columns]
    return Grid(
        "cosine" + "; in brackets: of different layers, which tells little" * (len(set(layers)) > 1),
        basis.traits,
        basis.traits,
        basis.cosine().tolist(),
        full=1.0,
        small=0.3,
        apart=[[one != other for other in layers] for one in layers],
    )


def leakage_grid(leakage: Leakage) -> Grid:
    rows = (*leakage.rows, leakage.random)
    return Grid(
        "leakage: row steered at medium, column measured; less unsteered, *: the 95 % interval is off 0",
        (*leakage.traits, "(random)"),
        leakage.traits,
        [row.gain for row in rows],
        full=max((abs(value) for row in rows for value in row.gain), default=1.0) or 1.0,
        small=0.2,
        sure=[[low > 0 or high < 0 for low, high in zip(row.low, row.high, strict=True)] for row in rows],
        notes=[[f"{short(a)}..{short(b)}" for a, b in zip(row.low, row.high, strict=True)] for row in rows],
    )


def lines(grid: Grid, width: int, *, everything: bool = False) -> Iterator[Text]:
    """The grid as lines of at most `width` characters, in blocks of columns where it is wider than that.

    Columns have names where they all fit, numbers otherwise. With more than ``MANY`` traits, small values are dots
    unless `everything` is asked for.
    """
    many = len(grid.columns) > MANY
    notes = grid.notes if not many else None
    cell = max(len(grid.text(i, j)) for i in range(len(grid.rows)) for j in range(len(grid.columns))) + 1
    if notes:
        cell = max(cell, 1 + max(len(note) for row in notes for note in row))
    named = max(cell, 1 + max(map(len, grid.columns)))
    label = max(map(len, grid.rows)) + 1
    by_name = label + named * len(grid.columns) <= width
    if by_name:
        cell = named
    else:
        label += 3
    block = max(1, (width - label) // cell)
    yield from (
        Text(part, style="bold") for part in ([grid.title] if len(grid.title) <= width else grid.title.split("; "))
    )
    for start in range(0, len(grid.columns), block):
        shown = range(start, min(start + block, len(grid.columns)))
        heads = [grid.columns[j] if by_name else f"{j + 1} " for j in shown]
        yield Text(" " * label + "".join(f"{head:>{cell}}" for head in heads), style="bold")
        for i, row in enumerate(grid.rows):
            name = row if by_name or row not in grid.columns else f"{i + 1:2} {row}"
            line, below = Text(f"{name:<{label}}"), Text(" " * label)
            for j in shown:
                dot = many and not everything and grid.hidden(i, j)
                faint = bool(grid.apart and grid.apart[i][j])
                style = Style(dim=True) if dot or faint else _colour(grid.values[i][j] / grid.full)
                line.append(f"{'· ' if dot else grid.text(i, j):>{cell}}", style)
                if notes:
                    below.append(f"{notes[i][j]:>{cell}}", "dim")
            yield line
            if notes:
                yield below
    if many and not everything:
        chance = " or may be chance" if grid.sure else ""
        yield Text(f"·: below {grid.small:g} either way{chance}; --all shows every value", style="dim")


def _colour(share: float) -> Style:
    """Red for positive, blue for negative, paler towards 0; the text is black or white, whichever is read better."""
    strength = min(abs(share), 1.0)
    if strength < 0.1:
        return Style()
    end = _RED if share > 0 else _BLUE
    red, green, blue = (round(a + (b - a) * strength) for a, b in zip(_PAPER, end, strict=True))
    light = 0.299 * red + 0.587 * green + 0.114 * blue > 140
    return Style(color="#000000" if light else "#ffffff", bgcolor=f"#{red:02x}{green:02x}{blue:02x}")


def draw(grids: Sequence[Grid], title: str, path: Path) -> None:
    """Write the grids side by side as a picture (svg, png, pdf), the same bytes for the same numbers."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    inches = 2.5 + 0.45 * max(len(grid.columns) for grid in grids)
    with rc_context({"svg.hashsalt": title, "svg.fonttype": "none", "font.size": 8}):
        figure = Figure(figsize=(inches * len(grids), inches), layout="constrained")
        figure.suptitle(title)
        for axes, grid in zip(figure.subplots(1, len(grids), squeeze=False)[0], grids, strict=True):
            _panel(axes, grid)
        temporary = path.with_name(f".part-{path.name}")
        path.parent.mkdir(parents=True, exist_ok=True)
        kind = path.suffix.removeprefix(".")
        stamp = {"svg": "Date", "pdf": "CreationDate"}.get(kind)
        figure.savefig(temporary, format=kind, dpi=150, metadata={stamp: None} if stamp else None)
    temporary.replace(path)


def _panel(axes: Any, grid: Grid) -> None:
    alpha = [[0.35 if apart else 1.0 for apart in row] for row in grid.apart] if grid.apart else None
    image = axes.imshow(grid.values, cmap="RdBu_r", vmin=-grid.full, vmax=grid.full, alpha=alpha)
    axes.set_title("\n".join(grid.title.split("; ")), fontsize=8)
    axes.set_xticks(range(len(grid.columns)), grid.columns, rotation=90)
    axes.set_yticks(range(len(grid.rows)), grid.rows)
    for i in range(len(grid.rows)):
        for j in range(len(grid.columns)):
            if len(grid.columns) <= MANY or not grid.hidden(i, j):
                dark = abs(grid.values[i][j]) > 0.6 * grid.full and not (grid.apart and grid.apart[i][j])
                text = grid.text(i, j).strip()
                axes.text(j, i, text, ha="center", va="center", fontsize=6, color="white" if dark else "black")
    axes.figure.colorbar(image, ax=axes, shrink=0.7)
