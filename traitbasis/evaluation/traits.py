"""Which trait does a customer's turn, and a whole dialogue, show? Instruments of the unsteered model.

Three instruments read a turn's mean hidden states, each turn by itself, without what was said before it: the *probe*
and the *classifier* of ``metrics/`` say how much of one trait there is (0 as neutral pairs, 1 as the trait's), the
*namer* says which trait it is, of all that are evaluated, or none. All are made from contrastive pairs and checked on
pairs that they are not made from; ``quality.py`` has the figures, and every table prints them.

A dialogue shows what its turns show on average: the mean of their probabilities names it. On dialogues put together
from ``default`` pairs that names as well as the sum of log-probabilities does, and it lets two traits stand beside each
other, or a trait beside turns without any.

Weak where: a turn is measured by what a small model makes of it. Probe and classifier take a list of a trait's words
for the trait (``Quality.fooled``); the namer is trained not to, and is the one that decides what is there.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from traitbasis.chat import As, Turn
from traitbasis.dialogues import Dialogue
from traitbasis.errors import ArtifactError, EvaluationError, ModelError, PairError
from traitbasis.evaluation.namer import Namer, checking_examples, train_namer, training_examples
from traitbasis.evaluation.quality import Quality, measure
from traitbasis.evaluation.stuffing import CHECKING, TRAINING, stuffed_turns
from traitbasis.files import append_whole
from traitbasis.metrics.classifier import TraitClassifier, train_classifier
from traitbasis.metrics.estimate import mean
from traitbasis.metrics.fidelity import Sides, TraitProbe, read_sides
from traitbasis.model import LanguageModel
from traitbasis.pairs import PairSet, file_hash
from traitbasis.reading import Reader
from traitbasis.trait_vector import read_safetensors, write_safetensors

FORMAT = "traitbasis.instruments/1"  # changes when instruments made from the same pairs would be others
_CONTEXTS = 24  # read before their keys and values are freed, and what was found is written


@dataclass(frozen=True, eq=False)
class TraitInstruments:
    """The instruments of several traits on one model.

    settings: what they were made with. Probes and classifiers are by trait; ``labels`` are the traits, then "none".
    """

    as_: As
    probes: Mapping[str, TraitProbe]
    classifiers: Mapping[str, TraitClassifier]
    namer: Namer
    quality: Quality
    settings: Mapping[str, Any]

    @classmethod
    def build(
        cls,
        lm: LanguageModel,
        pair_sets: Sequence[PairSet],
        as_: As = "user",
        *,
        cache: Path | None = None,
        progress: Callable[[int], None] = lambda traits: None,
    ) -> TraitInstruments:
        """Read all responses once and make the instruments.

        cache: of scores (``score_dialogues``); instruments are taken from a file beside it, or written there.
        progress: told 1 for every trait read. Raises PairError for a trait without ``default``, ``extra`` or
        ``heldout`` pairs, or that is there twice.
        """
        traits = [pair_set.trait for pair_set in pair_sets]
        if not traits or len(set(traits)) < len(traits):
            raise PairError(f"instruments need one pair set a trait; there are: {', '.join(traits) or 'none'}")
        for pair_set in pair_sets:
            for use in {"default", "extra", "heldout"} - {pair.use for pair in pair_set.pairs}:
                raise PairError(f"{pair_set.trait}: no pair is marked 'use: {use}'; instruments need all three uses")
        settings = {
            "format": FORMAT,
            "model": lm.name,
            "model_fingerprint": lm.fingerprint,
            "template_hash": lm.template_hash,
            "dtype": lm.dtype_name,
            "as_": as_,
            "pairs": {pair_set.trait: file_hash(pair_set) for pair_set in pair_sets},
        }
        home = cache and cache.with_name(f"{cache.stem}-instruments-{_hash(settings)[:12]}.safetensors")
        if home and (kept := _load(home, settings)):
            progress(len(traits))
            return kept
        reader, sides, training, checking = Reader(lm, as_), {}, {}, {}
        for pair_set in pair_sets:
            trait = pair_set.trait
            sides[trait] = read_sides(reader, pair_set)
            training[trait] = _states(reader, stuffed_turns(pair_set, TRAINING, "extra"))
            checking[trait] = {
                use: _states(reader, stuffed_turns(pair_set, CHECKING, use)) for use in ("default", "heldout")
            }
            reader.forget()
            progress(1)
        found = _make(sides, training, checking, as_, len(lm.layers), settings)
        if home:
            _save(found, home)
        return found

    @property
    def traits(self) -> tuple[str, ...]:
        return self.labels[:-1]

    @property
    def labels(self) -> tuple[str, ...]:
        return self.namer.labels

    @cached_property
    def hash(self) -> str:
        """Identifies instruments: model, header, pairs and how they are made."""
        return _hash(self.settings)

    def expression(self, states: Tensor) -> dict[str, dict[str, Tensor]]:
        """By trait and instrument ``(n,)`` of mean states ``(n, layers, d_model)``: 0 as neutral pairs, 1 as the
        trait's."""
        return {
            trait: {
                "probe": states[:, probe.layer] @ probe.direction - probe.offset,
                "classifier": self.classifiers[trait].score(states),
            }
            for trait, probe in self.probes.items()
        }

    def names(self, states: Tensor) -> Tensor:
        """Probability ``(n, labels)`` of each trait, and of none."""
        return self.namer.probabilities(states)


@dataclass(frozen=True)
class TurnScore:
    """One customer turn. names: probability by label, expression: by trait and instrument; all nan for a turn that says
    nothing but a stop token."""

    names: Mapping[str, float]
    expression: Mapping[str, Mapping[str, float]]


def score_dialogues(
    instruments: TraitInstruments,
    lm: LanguageModel,
    dialogues: Sequence[Dialogue],
    cache: Path | None = None,
    progress: Callable[[int], None] = lambda turns: None,
) -> list[list[TurnScore]]:
    """Scores of every customer turn of every dialogue, in order; what is read twice is read once.

    cache: a JSONL file that grows as turns are read, so that a killed evaluation goes on and commands share one
    reading. progress: told how many different turns each step has done. Raises EvaluationError when `lm` is not what
    the instruments were made on, ModelError when a state is not finite.
    """
    made_on = (instruments.settings["model_fingerprint"], instruments.settings["dtype"])
    if made_on != (lm.fingerprint, lm.dtype_name):
        raise EvaluationError(f"the instruments were made on {instruments.settings['model']} ({made_on[1]}), not on "
                              f"{lm.name} ({lm.dtype_name}); make them on the model that reads")  # fmt: skip
    items = [_items(dialogue) for dialogue in dialogues]
    keys = [[_key(instruments.hash, item) for item in row] for row in items]
    known = _read_scores(cache) if cache else {}
    missing: dict[tuple[Turn, ...], dict[str, str]] = {}
    for row, names in zip(items, keys, strict=True):
        for (context, text), key in zip(row, names, strict=True):
            if text and key not in known:
                missing.setdefault(context, {})[key] = text
    progress(len({key for row in keys for key in row if key in known}))
    reader, contexts = Reader(lm, instruments.as_), list(missing)
    for start in range(0, len(contexts), _CONTEXTS):
        chunk = [(c, text, key) for c in contexts[start : start + _CONTEXTS] for key, text in missing[c].items()]
        scores = _score(instruments, _states(reader, [(context, text) for context, text, _ in chunk]))
        reader.forget()
        fresh = dict(zip([key for _, _, key in chunk], scores, strict=True))
        known |= fresh
        if cache:
            append_whole(cache, "".join(_line(key, score) for key, score in fresh.items()))
        progress(len(fresh))
    silent = _score(instruments, torch.full((1, len(lm.layers), lm.width), math.nan))[0]
    return [
        [known[key] if text else silent for (_, text), key in zip(row, names, strict=True)]
        for row, names in zip(items, keys, strict=True)
    ]


def read_dialogues_states(reader: Reader, dialogues: Sequence[Dialogue]) -> list[Tensor]:
    """Mean states ``(turns, layers, d_model)`` of every customer turn, each read without what was said before the
    agent's last message; nan for a turn that says nothing but a stop token. For what the instruments do not measure."""
    items = [_items(dialogue) for dialogue in dialogues]
    states = iter(_states(reader, [item for row in items for item in row if item[1]]))
    nothing = torch.full((len(reader.lm.layers), reader.lm.width), math.nan)
    return [
        torch.stack([next(states) if text else nothing for _, text in row]) if row else torch.zeros(0, *nothing.shape)
        for row in items
    ]


def names_of(scores: Sequence[TurnScore]) -> dict[str, float]:
    """Probability by label of a whole dialogue: the mean over the turns that say something; nan without any."""
    return {label: mean([score.names[label] for score in scores]) for label in scores[0].names} if scores else {}


def strength_of(scores: Sequence[TurnScore], trait: str) -> float:
    """Expression of a trait in a whole dialogue: mean over instruments and over the turns that say something."""
    return mean([mean(list(score.expression[trait].values())) for score in scores])


# ---- Reading


def _items(dialogue: Dialogue) -> list[tuple[tuple[Turn, ...], str]]:
    """Context and text of each customer turn; a stop token is no text."""
    found = []
    for context, text in zip(dialogue.contexts(), dialogue.said, strict=True):
        for token in dialogue.stop_tokens:
            text = text.replace(token, " ")
        found.append((context, text.strip()))
    return found


def _states(reader: Reader, turns: Sequence[tuple[Sequence[Turn], str]]) -> Tensor:
    if not turns:
        return torch.zeros(0, len(reader.lm.layers), reader.lm.width)
    found = torch.stack([reading.states for reading in reader.read(turns, states=True) if reading.states is not None])
    if not torch.isfinite(found).all():
        raise ModelError(f"{reader.lm.name} gives hidden states that are not finite in {reader.lm.dtype_name}; "
                         "load it in bfloat16 or float32")  # fmt: skip
    return found


def _score(instruments: TraitInstruments, states: Tensor) -> list[TurnScore]:
    names, shown = instruments.names(states), instruments.expression(states)
    return [
        TurnScore(
            {label: _short(names[n, i]) for i, label in enumerate(instruments.labels)},
            {t: {name: _short(values[n]) for name, values in by.items()} for t, by in shown.items()},
        )
        for n in range(len(states))
    ]


def _short(value: Tensor) -> float:
    return float(f"{float(value):.6g}")


def _key(made_by: str, item: tuple[Sequence[Turn], str]) -> str:
    context, text = item
    return _hash([made_by, [[turn.speaker, turn.text] for turn in context], text])


def _read_scores(path: Path) -> dict[str, TurnScore]:
    """What a cache holds; a line that a kill cut off is cut away, what cannot be read is read again."""
    if not path.is_file():
        return {}
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole < len(data):
        os.truncate(path, whole)
    found = {}
    for line in data[:whole].decode("utf-8", "replace").splitlines():
        try:
            record = json.loads(line)
            found[str(record["key"])] = TurnScore(record["names"], record["expression"])
        except (ValueError, LookupError, TypeError):
            continue
    return found


def _line(key: str, score: TurnScore) -> str:
    return json.dumps({"key": key, **asdict(score)}) + "\n"


# ---- Making


def _make(
    sides: Mapping[str, Sides],
    training: Mapping[str, Tensor],
    checking: Mapping[str, Mapping[str, Tensor]],
    as_: As,
    depth: int,
    settings: Mapping[str, Any],
) -> TraitInstruments:
    layers = sorted({depth // 2, *range(depth // 3, max(depth - 1, 1), max(1, depth // 10))})
    traits = tuple(sides)
    probes = {trait: TraitProbe.from_sides(trait, side, as_) for trait, side in sides.items()}
    classifiers = {trait: train_classifier(trait, sides, layers) for trait in traits}
    examples = training_examples(sides, training)
    others = checking_examples(sides, {trait: checking[trait]["default"] for trait in traits}, "default")
    namer = train_namer(traits, examples, others, layers)
    quality = measure(probes, classifiers, namer, sides, examples, checking)
    return TraitInstruments(as_, probes, classifiers, namer, quality, settings)


# ---- On disk


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _save(instruments: TraitInstruments, path: Path) -> None:
    tensors = {"namer.weights": instruments.namer.weights, "namer.bias": instruments.namer.bias}
    tensors |= {f"probe.{trait}": probe.direction for trait, probe in instruments.probes.items()}
    tensors |= {f"classifier.{trait}": c.weights for trait, c in instruments.classifiers.items()}
    told = {
        "settings": instruments.settings,
        "quality": json.dumps(asdict(instruments.quality)),  # as text, which keeps the order
        "namer": [instruments.labels, instruments.namer.layer],
        "probes": {t: [p.layer, p.offset, p.auc] for t, p in instruments.probes.items()},
        "classifiers": {t: [c.layer, c.offset, c.auc, c.auc_others] for t, c in instruments.classifiers.items()},
    }
    write_safetensors(path, FORMAT, tensors, told)


def _load(path: Path, settings: Mapping[str, Any]) -> TraitInstruments | None:
    """None when there is no such file, or it holds other instruments."""
    names = [
        "namer.weights",
        "namer.bias",
        *(f"{kind}.{t}" for kind in ("probe", "classifier") for t in settings["pairs"]),
    ]
    try:
        tensors, told = read_safetensors(path, FORMAT, tuple(names))
    except ArtifactError:
        return None
    if told["settings"] != settings:
        return None
    as_ = cast(As, settings["as_"])
    probes = {
        t: TraitProbe(t, layer, as_, tensors[f"probe.{t}"], offset, rank)
        for t, (layer, offset, rank) in told["probes"].items()
    }
    classifiers = {
        t: TraitClassifier(t, layer, tensors[f"classifier.{t}"], offset, *ranks)
        for t, (layer, offset, *ranks) in told["classifiers"].items()
    }
    labels, layer = told["namer"]
    namer = Namer(tuple(labels), layer, tensors["namer.weights"], tensors["namer.bias"])
    return TraitInstruments(as_, probes, classifiers, namer, Quality(**json.loads(told["quality"])), settings)
