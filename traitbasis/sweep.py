"""The layer sweep: turns generated at many layers and doses, measured, and kept on disk as they come.

A *cell* is one condition: ``steered`` with a trait at a layer and dose, ``random`` (a random direction of that dose at
that layer), ``prompted`` (no steering, the trait's definition in the instruction) or ``unsteered``. Every cell draws
the same contexts with the same seeds, so cells are compared turn by turn. Guards are off: what a dose does must be
seen.

Cells are appended to a file a trait, ``<folder>/<trait>.jsonl``, and to ``baselines.jsonl`` for what all traits share.
A sweep that was killed goes on where it was; the first line says what the cells were made with, and a sweep with other
settings does not mix with them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from traitbasis.chat import As, Turn, render_prompt, tokenize
from traitbasis.contexts import EvaluationContext, contexts_hash
from traitbasis.engines.base import Request, Sampling, generate_all
from traitbasis.engines.transformers import TransformersEngine
from traitbasis.errors import SweepError
from traitbasis.files import append_whole, write_whole
from traitbasis.metrics.turns import Instruments, measure_turns
from traitbasis.model import LanguageModel
from traitbasis.pairs import PairSet
from traitbasis.reading import Reader
from traitbasis.tries import SILENCE, digest_seed

FORMAT = "traitbasis.sweep/1"
BASELINES = "baselines"
Condition = Literal["steered", "unsteered", "random", "prompted"]
_BATCH = 48  # turns generated together
_ABSENT = object()
_PERSONA = "Your manner in every message"
_GROUP = 12  # cells generated before they are measured and written


@dataclass(frozen=True)
class Spec:
    """What a cell is: layer is None and dose 0 where nothing is added; trait is None for what all traits share."""

    condition: Condition
    trait: str | None = None
    layer: int | None = None
    dose: float = 0.0


UNSTEERED = Spec("unsteered")


@dataclass(frozen=True)
class SweptTurn:
    """One turn: id of its context, its seed, and its scores by name (``metrics/turns.py``)."""

    context: str
    seed: int
    text: str
    scores: Mapping[str, float]


@dataclass(frozen=True)
class Cell(Spec):
    """A spec with its turns, in the order of contexts and seeds that all cells share."""

    turns: tuple[SweptTurn, ...] = ()

    @property
    def spec(self) -> Spec:
        return Spec(self.condition, self.trait, self.layer, self.dose)

    def scores(self, name: str) -> Tensor:
        """Scores ``(turns,)`` of one name. Raises KeyError when they were not measured."""
        return torch.tensor([turn.scores[name] for turn in self.turns])


class Store:
    """Lines of JSON that only grow, under a header; a line that was cut off by a kill is dropped."""

    def __init__(self, path: Path, header: Mapping[str, Any]) -> None:
        self.path = path
        self._header = dict(header)
        self.reload()

    def reload(self) -> None:
        """Read the file again: other processes may have added to it. Without a file it is begun."""
        path, header = self.path, {"format": FORMAT, **self._header}
        self.lines: list[dict[str, Any]] = []
        self.cells: dict[Spec, Cell] = {}
        if path.is_file():
            found, self.lines, cells, whole = _read_lines(path)
            if found != header:
                keys = found.keys() | header.keys()
                different = sorted(key for key in keys if found.get(key, _ABSENT) != header.get(key, _ABSENT))
                raise SweepError(
                    f"{path} holds a sweep with other settings ({', '.join(different)}); delete the folder "
                    f"{path.parent}, or write elsewhere with --out"
                )
            if whole < path.stat().st_size:
                os.truncate(path, whole)
            self.cells = {cell.spec: cell for cell in cells}
        else:
            write_whole(path, json.dumps(header) + "\n")

    def append(self, line: Mapping[str, Any]) -> None:
        """Add a line and have it on disk."""
        append_whole(self.path, json.dumps(line, ensure_ascii=False) + "\n")
        self.lines.append(dict(line))
        if "condition" in line:
            cell = _cell(line)
            self.cells[cell.spec] = cell

    def find(self, kind: str) -> dict[str, Any] | None:
        """The latest line of another kind than a cell."""
        return next((line for line in reversed(self.lines) if line.get("kind") == kind), None)


class Generator:
    """Draws the turns of cells on one model, and measures them."""

    def __init__(
        self,
        lm: LanguageModel,
        contexts: Sequence[EvaluationContext],
        *,
        as_: As = "user",
        turns: int = 10,
        seed: int = 0,
        max_tokens: int = 40,
        temperature: float = 0.7,
    ) -> None:
        if turns < 2:
            raise SweepError(f"turns is {turns}; a cell needs at least 2")
        self.lm, self.contexts, self.as_, self.reader = lm, list(contexts), as_, Reader(lm, as_)
        self.settings: dict[str, Any] = {
            "model": lm.name,
            "model_fingerprint": lm.fingerprint,
            "template_hash": lm.template_hash,
            "dtype": lm.dtype_name,
            "as_": as_,
            "contexts_hash": contexts_hash(contexts),
            "turns": turns,
            "seed": seed,
            "max_tokens": max_tokens,
            "temperature": temperature,
        }
        # (number of the context, seed): each context once, then each again.
        self.cases = [(i % len(contexts), digest_seed([seed, i])) for i in range(turns)]
        self._sampling = Sampling(temperature=temperature, max_tokens=max_tokens)
        self._engine = TransformersEngine(lm, max_batch=_BATCH, max_queue=10**6)
        self.states: dict[Spec, Tensor] = {}
        self._prompts: dict[tuple[int, str], tuple[int, ...]] = {}
        # In half precision a prompt read from the prefix cache differs from one that is read anew: what all traits'
        # prompts share is in it from the beginning, so that nothing depends on what was drawn before.
        try:
            for number, persona in product(range(len(contexts)), ("", _PERSONA)):
                prompt, stops = self._prompt(number, persona), lm.stop_ids(as_)
                generate_all(self._engine, [Request(prompt, 0, Sampling(max_tokens=1), stops)])
        except BaseException:
            self.close()
            raise

    def draw(self, additions: Sequence[Mapping[int, Tensor]], personas: Sequence[str]) -> list[list[str]]:
        """Texts of several cells' turns. additions: float32 ``(d_model,)`` by layer, personas: what the instruction
        says besides (empty: nothing), both by cell."""
        stop_ids = self.lm.stop_ids(self.as_)
        requests = [
            Request(self._prompt(number, persona), seed, self._sampling, stop_ids, added)
            for added, persona in zip(additions, personas, strict=True)
            for number, seed in self.cases
        ]
        # What is empty is said as the simulator says it: harnesses take no empty turn.
        drawn = generate_all(self._engine, requests, self._engine.hold())
        texts = [generation.text.strip() or SILENCE for generation in drawn]
        n = len(self.cases)
        return [texts[i : i + n] for i in range(0, len(texts), n)]

    def measure(self, specs: Sequence[Spec], texts: Sequence[Sequence[str]], instruments: Instruments) -> list[Cell]:
        """Cells of drawn texts, read together: replies to one context are one batch. ``states`` keeps those of cells
        that all traits share, ``(turns, layers, d_model)`` by spec, for instruments that come later."""
        turns = [(number, text) for cell in texts for (number, _), text in zip(self.cases, cell, strict=True)]
        found, states = measure_turns(self.reader, self.contexts, turns, instruments)
        for spec, rows in zip(specs, torch.split(states, len(self.cases)), strict=True):
            if spec.trait is None:
                self.states[spec] = rows.clone()
        scores = iter(found)
        return [
            Cell(
                **asdict(spec),
                turns=tuple(
                    SweptTurn(self.contexts[number].id, seed, text, {k: round(v, 4) for k, v in next(scores).items()})
                    for (number, seed), text in zip(self.cases, cell, strict=True)
                ),
            )
            for spec, cell in zip(specs, texts, strict=True)
        ]

    def cells(
        self,
        specs: Sequence[Spec],
        store: Store,
        addition: Callable[[Spec], Mapping[int, Tensor]],
        instruments: Instruments,
        persona: str = "",
        done: Callable[[int], None] = lambda cells: None,
    ) -> list[Cell]:
        """Cells of all specs: those that the store has, and the others drawn, measured and stored, some at a time."""
        done(sum(spec in store.cells for spec in specs))
        for start in range(0, len(specs), _GROUP):
            group = specs[start : start + _GROUP]
            missing = [spec for spec in group if spec not in store.cells]
            if missing:  # in half precision a turn depends on what it is drawn with: then the group is drawn whole
                drawn = missing if self.lm.exact else group
                personas = [persona if spec.condition == "prompted" else "" for spec in drawn]
                texts = dict(zip(drawn, self.draw([addition(spec) for spec in drawn], personas), strict=True))
                for cell in self.measure(missing, [texts[spec] for spec in missing], instruments):
                    store.append(asdict(cell))
                done(len(missing))
        return [store.cells[spec] for spec in specs]

    def close(self) -> None:
        """Stop the engine."""
        self._engine.close()
        self.reader.forget()

    def __enter__(self) -> Generator:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _prompt(self, number: int, persona: str) -> tuple[int, ...]:
        if (number, persona) not in self._prompts:
            turns = self.contexts[number].turns
            if persona:
                turns = (Turn("system", f"{turns[0].text}\n\n{persona}"), *turns[1:])
            text = render_prompt(self.lm.tokenizer, turns, self.as_)
            self._prompts[number, persona] = tuple(tokenize(self.lm.tokenizer, text))
        return self._prompts[number, persona]


def versions() -> dict[str, str]:
    """Of what measures; beside a generator's settings they say what made a figure (contract 11)."""
    return {f"{name}_version": version(name) for name in ("traitbasis", "transformers", "torch")}


def random_direction(width: int, layer: int, seed: int) -> Tensor:
    """A unit direction ``(d_model,)``, the same for one layer and seed."""
    direction = torch.randn(width, generator=torch.Generator().manual_seed(1000 * seed + layer))
    return torch.nn.functional.normalize(direction, dim=0)


def persona_prompt(pair_set: PairSet) -> str:
    """The trait as a prompt: what an instruction says to a user who is not steered."""
    return f"{_PERSONA}, {pair_set.trait.replace('_', ' ')}: {pair_set.definition}"


def read_cells(path: str | Path) -> tuple[dict[str, Any], list[Cell]]:
    """Header and cells of a sweep's file. Raises SweepError when it is none."""
    path = Path(path)
    if not path.is_file():
        raise SweepError(f"no sweep at {path}; make one with: traitbasis select --trait {path.stem}")
    header, _, cells, _ = _read_lines(path)
    return header, cells


def _read_lines(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]], list[Cell], int]:
    """Header, whole lines, the cells among them, and how many bytes they take."""
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    try:
        lines = [json.loads(line) for line in data[:whole].decode("utf-8").split("\n")[:-1]]
        if lines[0]["format"] != FORMAT:
            raise SweepError(f"{path} is no sweep of this version (its format is {lines[0]['format']!r})")
        cells = [_cell(line) for line in lines if "condition" in line]
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise SweepError(f"{path} is no sweep, or damaged ({error}); delete it and sweep again") from error
    return lines[0], lines[1:], cells, whole


def _cell(line: Mapping[str, Any]) -> Cell:
    return Cell(**{**line, "turns": tuple(SweptTurn(**turn) for turn in line["turns"])})
