"""People in the loop: a blinded sheet of turns for annotators, and what their votes say about layers.

The paper's way of choosing a layer: five annotators read ten turns of each (arXiv 2510.04491, section 4).
``make_sheet`` draws the turns from a layer sweep, unsteered ones among them as a control. ``Sheet.save`` writes a
spreadsheet and a page for annotators, and a key that is kept from them. ``votes.py`` reads what comes back.

Nothing that annotators get depends on layers, doses or conditions: items are named and shuffled by what stands in
them, so the same turns under other labels make the same files, byte for byte.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
import math
import random
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import jinja2

from traitbasis.basis import DEFAULT_DOSE
from traitbasis.contexts import EvaluationContext, contexts_hash, read_contexts
from traitbasis.embedded import DEFAULT_MODEL
from traitbasis.errors import AnnotationError
from traitbasis.files import write_whole
from traitbasis.pairs import PairSet, has_pairs, load_pairs

if TYPE_CHECKING:
    from traitbasis.sweep import Cell, SweptTurn

COLUMNS = ("item", "context", "turn", "rating", "usable", "comment")
RATINGS = ("none", "slight", "clear", "strong")  # of the trait, 0 to 3

_FORMAT = "traitbasis.annotation/1"
_LETTERS = "bcdfghjkmnpqrstvwxz"  # no vowels: an item's name is no word, and no number or date to a spreadsheet
# A spreadsheet would run a cell that begins so. The wide forms count in East Asian versions of Excel.
_RUNS = tuple("=+-@\t\r\n＝＋－＠")


@dataclass(frozen=True)
class Item:
    """A turn to be rated. Annotators see id, task, agent and text; the rest stands in the key alone.

    task: the customer's instruction. agent: what the agent said last. text: the turn.
    """

    id: str
    condition: Literal["steered", "unsteered"]
    layer: int | None
    dose: float
    context: str
    seed: int
    task: str
    agent: str
    text: str

    @property
    def said_before(self) -> str:
        """The context in one line, as a spreadsheet shows it."""
        return f"Agent: {self.agent} (Task: {self.task})" if self.task else f"Agent: {self.agent}"


@dataclass(frozen=True)
class Sheet:
    """Blinded turns of one trait, in the order that annotators see. sweep: the header of the sweep they come from."""

    trait: str
    definition: str
    opposite: str
    seed: int
    items: tuple[Item, ...]
    sweep: Mapping[str, Any] = field(default_factory=dict)

    @property
    def id(self) -> str:
        """Tells sheets apart (8 hex digits)."""
        return hashlib.sha256(" ".join([self.trait, *(item.id for item in self.items)]).encode()).hexdigest()[:8]

    def save(self, folder: str | Path) -> tuple[Path, Path, Path]:
        """Write ``<trait>.csv`` and ``<trait>.html`` for annotators, and ``<trait>.key.json``; the paths in this order.

        Raises AnnotationError when the folder holds another sheet's key: without it, votes on that sheet are lost.
        """
        folder = Path(folder)
        key = folder / f"{self.trait}.key.json"
        content = json.dumps(self._key(), indent=1) + "\n"
        if key.exists() and key.read_text("utf-8") != content:
            raise AnnotationError(
                f"{key} is the key of another sheet, and without it votes on that sheet cannot be read; "
                "write to another folder, or delete it"
            )
        folder.mkdir(parents=True, exist_ok=True)
        table = folder / f"{self.trait}.csv"
        page = folder / f"{self.trait}.html"
        write_whole(key, content)
        write_whole(table, self._table())
        write_whole(page, self._page())
        return table, page, key

    @classmethod
    def load(cls, path: str | Path) -> Sheet:
        """Read a sheet back from its key, or from a folder with one key. Raises AnnotationError otherwise."""
        path = Path(path)
        if path.is_dir():
            keys = sorted(path.glob("*.key.json"))
            if len(keys) != 1:
                names = ", ".join(key.name for key in keys) or "none"
                raise AnnotationError(f"{path} must hold one key, *.key.json, and holds {names}; name the file")
            (path,) = keys
        try:
            key = json.loads(path.read_text("utf-8"))
            if not isinstance(key, dict) or key.get("format") != _FORMAT:
                raise AnnotationError(f"{path} is not a {_FORMAT} file; expected the sheet's .key.json")
            items = tuple(Item(id=name, **fields) for name, fields in key["items"].items())
            return cls(key["trait"], key["definition"], key["opposite"], key["seed"], items, key["sweep"])
        except OSError as error:
            raise AnnotationError(f"cannot read {path}: {error.strerror or error}") from error
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise AnnotationError(f"{path} is a damaged key: {error}") from error

    def _key(self) -> dict[str, Any]:
        items = {item.id: {k: v for k, v in asdict(item).items() if k != "id"} for item in self.items}
        return {"format": _FORMAT, "sheet": self.id, **asdict(self), "items": items}

    def _table(self) -> str:
        buffer = io.StringIO(newline="")
        writer = csv.writer(buffer)
        writer.writerow(COLUMNS)
        for item in self.items:
            writer.writerow([item.id, item.said_before, protect(item.text), "", "", ""])
        return "\ufeff" + buffer.getvalue()  # Excel takes UTF-8 for something else without the mark

    def _page(self) -> str:
        template = (resources.files("traitbasis") / "annotate.html").read_text("utf-8")
        environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
        shown = [{name: getattr(item, name) for name in ("id", "task", "agent", "text")} for item in self.items]
        return environment.from_string(template).render(
            policy=page_policy(template),
            trait=self.trait,
            definition=self.definition,
            opposite=self.opposite,
            ratings=RATINGS,
            sheet={"id": self.id, "trait": self.trait, "columns": COLUMNS, "items": shown, "runs": "".join(_RUNS)},
        )


def make_sheet(
    cells: Iterable[Cell],
    trait: str | PairSet,
    *,
    contexts: Sequence[EvaluationContext] | None = None,
    layers: Iterable[int] | None = None,
    dose: float | Iterable[float] = DEFAULT_DOSE,
    turns_per_layer: int = 10,
    seed: int = 0,
    sweep: Mapping[str, Any] | None = None,
) -> Sheet:
    """Draw turns from a sweep's cells: `turns_per_layer` for each layer and dose, and as many unsteered ones.

    The same contexts and seeds are drawn everywhere, so that layers are compared on the same tasks; no context comes
    twice before all came once. layers: by default all that the cells have. contexts: those the sweep was made on.
    sweep: the sweep's header, kept in the key; its ``contexts_hash`` is compared.

    Raises AnnotationError for a layer or dose that is not in the cells, a cell with too few turns, cells without an
    unsteered one, and contexts that are not the sweep's.
    """
    if turns_per_layer < 1:
        raise AnnotationError(f"turns_per_layer is {turns_per_layer}; a sheet needs at least one")
    pair_set = trait if isinstance(trait, PairSet) else load_pairs(trait)
    known = read_contexts() if contexts is None else contexts
    if (expected := (sweep or {}).get("contexts_hash")) and expected != contexts_hash(known):
        raise AnnotationError(
            f"the contexts have hash {contexts_hash(known)}, and the sweep was made on {expected}; "
            "give the contexts of the sweep, or run the sweep again"
        )
    doses = [dose] if isinstance(dose, int | float) else list(dose)
    chosen = _choose(list(cells), pair_set.trait, layers, doses, _select_command(pair_set.trait, sweep or {}))
    drawn = [(cell, turn) for cell in chosen for turn in _draw(cell, chosen, turns_per_layer, seed)]
    spoken = {context.id: context for context in known}
    if missing := {turn.context for _, turn in drawn} - spoken.keys():
        raise AnnotationError(f"unknown context {', '.join(sorted(missing))}; give the contexts of the sweep")

    # What stands in the items decides ids and order, and nothing else does.
    drawn.sort(key=lambda d: (d[1].text, d[1].context, d[1].seed, d[0].condition, d[0].layer or 0, d[0].dose))
    content = json.dumps([[turn.text, turn.context, turn.seed] for _, turn in drawn])
    rng = random.Random(f"{seed} {pair_set.trait} {hashlib.sha256(content.encode()).hexdigest()}")
    ids = draw_names(len(drawn), rng)
    items = [
        Item(
            id=name,
            condition="steered" if cell.condition == "steered" else "unsteered",
            layer=cell.layer,
            dose=cell.dose,
            context=turn.context,
            seed=turn.seed,
            task=one_line(*(t.text for t in spoken[turn.context].turns if t.speaker == "system")),
            agent=one_line(spoken[turn.context].turns[-1].text),
            text=turn.text,
        )
        for name, (cell, turn) in zip(ids, drawn, strict=True)
    ]
    rng.shuffle(items)
    return Sheet(pair_set.trait, pair_set.definition, pair_set.opposite, seed, tuple(items), dict(sweep or {}))


def draw_names(count: int, rng: random.Random) -> list[str]:
    """As many different names for items, which say nothing: six letters each."""
    names: dict[str, None] = {}
    while len(names) < count:
        names["".join(rng.choices(_LETTERS, k=6))] = None
    return list(names)


def protect(text: str) -> str:
    """Text as a cell that no spreadsheet runs as a formula: an apostrophe goes before ``= + - @`` and the like."""
    return f"'{text}" if text.startswith(("'", *_RUNS)) else text


def unprotect(cell: str) -> str:
    """The text that ``protect`` made a cell of."""
    return cell[1:] if cell.startswith("'") and cell[1:].startswith(("'", *_RUNS)) else cell


def page_policy(template: str) -> str:
    """A Content-Security-Policy under which the page's own script and style count and nothing else does."""

    def digest(tag: str) -> str:
        (text,) = re.findall(rf"<{tag}>(.*?)</{tag}>", template, re.DOTALL)
        return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

    return (
        f"default-src 'none'; script-src {digest('script')}; style-src {digest('style')}; base-uri 'none'; "
        "form-action 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    )


# ---- Drawing


def _select_command(trait: str, sweep: Mapping[str, Any]) -> str:
    """How the trait is swept; layers and doses go behind it."""
    which = f"--trait {trait}" if has_pairs(trait) else "--pairs YOUR_PAIRS.yaml"
    model = str(sweep.get("model", DEFAULT_MODEL))
    return f"traitbasis select {which}" + ("" if model == DEFAULT_MODEL else f" --model {model}")


def _choose(cells: list[Cell], trait: str, layers: Iterable[int] | None, doses: list[float], select: str) -> list[Cell]:
    """The unsteered cell and the steered ones asked for. select: the command that sweeps what is missing."""
    steered = [cell for cell in cells if cell.condition == "steered" and cell.trait == trait]
    control = [cell for cell in cells if cell.condition == "unsteered" and cell.trait in (trait, None)]
    if not steered:
        others = ", ".join(sorted({cell.trait for cell in cells if cell.trait})) or "no trait"
        raise AnnotationError(f"the sweep has no steered turns of {trait!r}; it has {others}; sweep it with: {select}")
    if not control:
        raise AnnotationError(
            "the sweep has no unsteered turns, which a sheet needs as its control; add baselines.jsonl"
        )
    wanted = None if layers is None else list(dict.fromkeys(layers))
    swept = sorted({cell.layer for cell in steered if cell.layer is not None})
    listed = [",".join(f"{number:g}" for number in numbers) for numbers in (wanted or swept, doses)]
    way_out = f"sweep what is missing with: {select} --layers {listed[0]} --doses {listed[1]}"
    chosen = control[:1]
    for dose in dict.fromkeys(doses):
        at_dose = {cell.layer: cell for cell in steered if math.isclose(cell.dose, dose)}
        if not at_dose:
            known = ", ".join(f"{value:g}" for value in sorted({cell.dose for cell in steered}))
            raise AnnotationError(f"the sweep of {trait} has no dose {dose:g}; it has {known}; {way_out}")
        if missing := [layer for layer in wanted or () if layer not in at_dose]:
            raise AnnotationError(
                f"the sweep of {trait} has no layer {', '.join(map(str, missing))} at dose {dose:g}; "
                f"it has {', '.join(str(layer) for layer in sorted(at_dose, key=lambda z: z or 0))}; {way_out}"
            )
        chosen += [cell for layer, cell in at_dose.items() if wanted is None or layer in wanted]
    return chosen


def _draw(cell: Cell, cells: list[Cell], count: int, seed: int) -> list[SweptTurn]:
    """`count` turns of a cell, by one order of contexts and seeds for all cells."""
    keys = sorted({(turn.context, turn.seed) for other in cells for turn in other.turns})
    random.Random(f"draw {seed}").shuffle(keys)
    came: Counter[str] = Counter()
    rounds = {}
    for key in keys:
        rounds[key] = came[key[0]]
        came[key[0]] += 1
    turns = {(turn.context, turn.seed): turn for turn in cell.turns}
    found = [turns[key] for key in sorted(keys, key=rounds.__getitem__) if key in turns][:count]
    if len(found) < count:
        name = f"layer {cell.layer} at dose {cell.dose:g}" if cell.condition == "steered" else "the unsteered model"
        raise AnnotationError(f"{name} has {len(found)} turns in the sweep, and {count} are asked for; ask for fewer")
    return found


def one_line(*texts: str) -> str:
    """Texts with every run of white space a space."""
    return " ".join(" ".join(texts).split())
