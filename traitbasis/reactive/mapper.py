"""From a feeling in free words to the nearest of the 594 conditions.

As tau-Emotion-Bench (arXiv 2610.19560, A.1) does it: anchors, the instructions of the conditions, are read into
vectors; a classifier with a head for the emotion and one for each dimension is trained on them; a feeling is projected
into the classifier's space, and the nearest anchors there vote, weighted by similarity. Ours is linear: with X the
anchors' centred features ``(n, d)`` and Y their labels, centred, one column for each label of each head,

    W = (X'X + ridge * trace(X'X) / d * I)^-1 X'Y        (ridge regression; ``(d, 31)``)
    z = (x - mean) W                                     (the learned space: 22 + 3 + 3 + 3 numbers)
    P(label) = softmax over its head of sharpness * (z + how often the labels hold)
    P(condition) = product of its four labels' P                                        (what conditions are ranked by)
    similarity(z, a) = mean over the heads of cosine(z's part, a's part)
    vote of an anchor a = exp(similarity / SOFTNESS) / number of its condition's anchors, normalised     (A.1's way)

On anchors that were left out the product finds the condition more often than the vote, which is there for comparison.

Three readers make the features: bags of words, two hidden states of a language model, or an embedding model. The
layers, the ridge and each head's sharpness are chosen on anchors, by leaving one voice out: no sentence of it is in the
others. No phrasing of ``data/phrasings.yaml`` takes part; those are what ``measure`` is for.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from traitbasis.errors import ArtifactError, ReactionError
from traitbasis.metrics.estimate import Estimate, mean_over_tasks
from traitbasis.reactive.conditions import (
    DIMENSIONS,
    EMOTIONS,
    FAMILIES,
    VOICES,
    Condition,
    Parts,
    all_conditions,
    cues_in,
    data_file,
    read_yaml,
    shipped_parts,
)

if TYPE_CHECKING:
    from traitbasis.model import LanguageModel

Array = NDArray[np.float64]

HEADS: dict[str, tuple[str, ...]] = {"emotion": EMOTIONS, **DIMENSIONS}
RIDGES = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)  # in units of the features' mean variance
NEIGHBOURS = 10  # anchors that vote
SOFTNESS = 0.1  # similarity by which a vote falls to 1/e: one head of four that differs is 0.3 or more
EMBEDDING_MODEL = "sentence-transformers/all-MiniLM-L6-v2"
PREFIX = "The customer's state of mind:"  # read before a text, never counted: a first token's state is like no other
QUESTION = "\nIn one word, this customer is feeling"  # read after it: what the model would answer is a state, too
MAX_TOKENS = 512  # of a text; the rest is not read

_FORMAT = "traitbasis.emotion_mapper/1"
_WORD = re.compile(r"[^\W\d_]+(?:['’][^\W\d_]+)*")


class TextReader(Protocol):
    """What turns texts into vectors. name: for reports."""

    name: str

    def read(self, texts: Sequence[str]) -> Array:
        """Features ``(n, d)`` of n texts."""
        ...


@dataclass(frozen=True)
class Anchor:
    """An instruction with its condition. voice: which sentences it is made of."""

    condition: Condition
    voice: int
    text: str


def fitting_anchors(parts: Parts | None = None) -> tuple[Anchor, ...]:
    """990 voices, one or two of each condition, that a mapper is fitted on.

    A third of each voice, so that with every emotion each level of each dimension, and each two of them, stand equally
    often: more would say the same sentences again.
    """
    parts = parts or shipped_parts()
    found = []
    for number, condition in enumerate(all_conditions()):
        # Emotions are 27 conditions apart; a voice begins each at another third.
        residue = number // 27 + sum(levels.index(getattr(condition, of)) for of, levels in DIMENSIONS.items())
        voices = [voice for voice in range(VOICES) if (residue + voice) % 3 == 0]
        found += [Anchor(condition, voice, condition.voice(voice, parts)) for voice in voices]
    return tuple(found)


# --- readers ----------------------------------------------------------------------------------------------------------


class WordReader:
    """Bags of words, the baseline: ``(1 + log count) * log((1 + n) / (1 + texts with the word)) + 1``, length 1.

    vocabulary: the words of `texts`, n of them; words that are not there count nothing.
    """

    name = "bag of words"

    def __init__(self, texts: Sequence[str]) -> None:
        bags = [set(_words(text)) for text in texts]
        self.vocabulary = {word: i for i, word in enumerate(sorted(set().union(*bags)))}
        found = np.array([sum(word in bag for bag in bags) for word in self.vocabulary], np.float64)
        self.rarity = np.log((1 + len(texts)) / (1 + found)) + 1

    def read(self, texts: Sequence[str]) -> Array:
        table = np.zeros((len(texts), len(self.vocabulary)))
        for row, text in zip(table, texts, strict=True):
            for word in _words(text):
                if (place := self.vocabulary.get(word)) is not None:
                    row[place] += 1
        table = np.where(table > 0, 1 + np.log(np.maximum(table, 1)), 0) * self.rarity
        return _unit(table)


class ModelReader:
    """A language model's own unsteered states, one after the other: the text's mean and the answer to come.

    layers: of the mean over the text's tokens, and of the last token of ``QUESTION`` after it. The text is read alone,
    after ``PREFIX``, without a chat template. Raises IndexError for a layer that is not there.
    """

    def __init__(self, lm: LanguageModel, layers: tuple[int, int], batch_size: int = 16) -> None:
        self.lm = lm
        self.layers = layers
        self.name = f"states of {lm.name}, layers {layers[0]} and {layers[1]}"
        self._batch_size = batch_size

    def read(self, texts: Sequence[str]) -> Array:
        return _both(*read_states(self.lm, texts, sorted(set(self.layers)), self._batch_size), self._places)

    @property
    def _places(self) -> tuple[int, int]:
        """Where the two layers are among those that are read."""
        read = sorted(set(self.layers))
        return read.index(self.layers[0]), read.index(self.layers[1])


class EmbeddingReader:
    """A sentence-embedding model by sentence-transformers (extra ``emotions``): a hub id or a folder.

    Raises ReactionError when the package is missing or the model cannot be loaded.
    """

    def __init__(self, model: str = EMBEDDING_MODEL) -> None:
        self.name = f"embeddings of {Path(model).name if Path(model).is_dir() else model}"
        try:
            from sentence_transformers import SentenceTransformer
        except ImportError as error:
            raise ReactionError(
                "an embedding model needs sentence-transformers: pip install 'traitbasis[emotions]', "
                "or read with the language model"
            ) from error
        try:
            self._model = SentenceTransformer(model)
        except Exception as error:  # whatever a hub that is out of reach or a damaged folder makes it raise
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise ReactionError(
                f"cannot load the embedding model {model!r}: {reason}. Give a folder, or read with the language model"
            ) from error

    def read(self, texts: Sequence[str]) -> Array:
        return np.asarray(self._model.encode(list(texts), show_progress_bar=False), np.float64)


def read_states(
    lm: LanguageModel,
    texts: Sequence[str],
    layers: Sequence[int] | None = None,
    batch_size: int = 16,
    step: Callable[[int], None] = lambda done: None,
) -> tuple[Array, Array]:
    """Hidden states ``(n, layers, d_model)`` at some layers, by default all: texts' means, and ``QUESTION``'s last.

    `step` is told how many texts have been read since it was told last. Raises ReactionError for an empty text.
    """
    import torch

    from traitbasis.hooks import record
    from traitbasis.model import pad_left

    if empty := [text for text in texts if not text.strip()]:
        raise ReactionError(f"there is no feeling in the text {empty[0]!r}")
    indices = list(range(len(lm.layers))) if layers is None else list(layers)
    prefix = lm.tokenizer(PREFIX)["input_ids"]
    rows = [lm.tokenizer(f" {text.strip()}", add_special_tokens=False)["input_ids"][:MAX_TOKENS] for text in texts]
    question = lm.tokenizer(QUESTION, add_special_tokens=False)["input_ids"]
    means, answers = (np.zeros((len(texts), len(indices), lm.width)) for _ in range(2))
    order = sorted(range(len(rows)), key=lambda i: len(rows[i]))  # alike ones together: little padding
    for start in range(0, len(order), batch_size):
        batch = order[start : start + batch_size]
        ids, mask = pad_left([prefix + rows[i] + question for i in batch], 0, lm.device)
        weights = torch.zeros(ids.shape)
        for row, i in enumerate(batch):
            weights[row, -len(rows[i]) - len(question) : -len(question)] = 1 / len(rows[i])

        def both(hidden: torch.Tensor, weights: torch.Tensor = weights) -> Any:
            mean = torch.einsum("btd,bt->bd", hidden.float(), weights.to(hidden.device))
            return torch.stack([mean, hidden[:, -1].float()]).cpu().numpy()

        with record(lm.layers, indices, keep=both) as states:
            lm.forward(ids, mask)
        for place, layer in enumerate(indices):
            means[batch, place], answers[batch, place] = states[layer]
        step(len(batch))
    return means, answers


def _both(means: Array, answers: Array, layers: tuple[int, int]) -> Array:
    return np.concatenate([means[:, layers[0]], answers[:, layers[1]]], axis=1)


# --- the mapper -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mapped:
    """Where a feeling lies.

    ranked: all conditions with their probability, best first. voted: those that the nearest anchors are of, with their
    share of the vote, best first. heads: probability of each label, by head.
    """

    ranked: tuple[tuple[Condition, float], ...]
    voted: tuple[tuple[Condition, float], ...]
    heads: Mapping[str, Mapping[str, float]]

    @property
    def condition(self) -> Condition:
        """The likeliest: of each head the likeliest label."""
        return self.ranked[0][0]

    @property
    def record(self) -> dict[str, Any]:
        """For JSON: the first five conditions, the votes and all heads."""
        return {
            "condition": self.condition.name,
            "ranked": [{"condition": condition.name, "probability": round(p, 4)} for condition, p in self.ranked[:5]],
            "voted": [{"condition": condition.name, "vote": round(vote, 4)} for condition, vote in self.voted],
            "heads": {head: {name: round(s, 4) for name, s in by.items()} for head, by in self.heads.items()},
        }


@dataclass(frozen=True, eq=False)
class Mapper:
    """A fitted mapper.

    centre, scale: ``(d,)``, of the anchors' features. weights: ``(d, 31)``. base: ``(31,)``, how often each label
    holds. sharpness: ``(31,)``, alike within a head. places: ``(n, 31)``, the anchors in the learned space; conditions:
    theirs.
    """

    reader: TextReader
    centre: Array
    scale: Array
    weights: Array
    base: Array
    sharpness: Array
    places: Array
    conditions: tuple[Condition, ...]
    ridge: float

    def map(self, texts: Sequence[str]) -> list[Mapped]:
        """Where each text lies. Raises ReactionError for an empty one."""
        if empty := [text for text in texts if not text.strip()]:
            raise ReactionError(f"there is no feeling in the text {empty[0]!r}")
        return self.map_features(self.reader.read(texts)) if texts else []

    def map_features(self, features: Array) -> list[Mapped]:
        """The same of what the reader made of them, ``(n, d)``."""
        places = (features - self.centre) / self.scale @ self.weights
        logs = _log_softmax((places + self.base) * self.sharpness)
        return [self._mapped(place, log) for place, log in zip(places, logs, strict=True)]

    def _mapped(self, place: Array, log: Array) -> Mapped:
        likely = np.exp(log[_TARGETS].sum(1))
        order = np.argsort(-likely, kind="stable")
        nearness = self._near @ _by_head(place[None])[0] / len(HEADS)
        nearest = np.argsort(-nearness, kind="stable")[:NEIGHBOURS]
        votes: dict[int, float] = defaultdict(float)
        for i, weight in zip(nearest, np.exp((nearness[nearest] - nearness[nearest[0]]) / SOFTNESS), strict=True):
            votes[int(self._owners[i])] += float(weight / self._shares[i])
        by_vote = sorted(votes.items(), key=lambda item: -item[1])
        return Mapped(
            tuple((_ALL[i], float(likely[i])) for i in order),
            tuple((_ALL[i], vote / sum(votes.values())) for i, vote in by_vote),
            {
                head: dict(zip(labels, map(float, np.exp(log[_SLICES[head]])), strict=True))
                for head, labels in HEADS.items()
            },
        )

    @cached_property
    def _near(self) -> Array:
        return _by_head(self.places)

    @cached_property
    def _owners(self) -> NDArray[np.int64]:
        """Number of each anchor's condition."""
        return np.array([_INDEX[condition] for condition in self.conditions])

    @cached_property
    def _shares(self) -> NDArray[np.int64]:
        """How many anchors each anchor's condition has."""
        return np.bincount(self._owners)[self._owners]


def fit(reader: TextReader, features: Array, anchors: Sequence[Anchor], ridge: float, *, scaled: bool = True) -> Mapper:
    """A mapper from anchors of two voices or more, and what the reader made of them, ``(n, d)``.

    scaled: features are brought to variance 1 first; for states, of which a few numbers are a thousand times the rest.
    """
    centre, scale = _standard(features, scaled)
    labels = _labels(anchors)
    base = labels.mean(0)
    x = (features - centre) / scale
    weights = _solutions(x, labels - base, (ridge,))[0]
    sharpness = _sharpness(_left_out(features, anchors, (ridge,), scaled)[0], labels)
    conditions = tuple(anchor.condition for anchor in anchors)
    return Mapper(reader, centre, scale, weights, base, sharpness, x @ weights, conditions, ridge)


@dataclass(frozen=True)
class Choice:
    """What leaving voices out says of a layer and a ridge: the heads' mean accuracy on anchors that were left out."""

    layer: int
    ridge: float
    accuracy: float


def choose(
    states: Array, anchors: Sequence[Anchor], ridges: Sequence[float] = RIDGES, *, scaled: bool = True
) -> list[Choice]:
    """All layers of `states` ``(n, layers, d)`` and ridges, best first; of equals the lower layer, the larger ridge.

    Each voice is left out once, and what was fitted on the others says which label each head gives its anchors.
    """
    labels = _labels(anchors)
    found = []
    for layer in range(states.shape[1]):
        for ridge, heads in zip(ridges, _left_out(states[:, layer], anchors, ridges, scaled), strict=True):
            right = [heads[:, part].argmax(1) == labels[:, part].argmax(1) for part in _SLICES.values()]
            found.append(Choice(layer, ridge, float(np.mean(right))))
    return sorted(found, key=lambda choice: (-choice.accuracy, choice.layer, -choice.ridge))


def fit_words(parts: Parts | None = None) -> Mapper:
    """The baseline, in a few seconds."""
    anchors = fitting_anchors(parts)
    texts = [anchor.text for anchor in anchors]
    reader = WordReader(texts)
    features = reader.read(texts)
    ridge = choose(features[:, None], anchors, scaled=False)[0].ridge
    return fit(reader, features, anchors, ridge, scaled=False)


def fit_embeddings(reader: TextReader, parts: Parts | None = None) -> Mapper:
    """On what an embedding model makes of the anchors."""
    anchors = fitting_anchors(parts)
    features = reader.read([anchor.text for anchor in anchors])
    ridge = choose(features[:, None], anchors)[0].ridge
    return fit(reader, features, anchors, ridge)


def fit_model(lm: LanguageModel, parts: Parts | None = None, step: Callable[[int], None] = lambda done: None) -> Mapper:
    """On a language model's states, each at the layer that tells unseen voices' labels best: reads 990 short texts."""
    anchors = fitting_anchors(parts)
    means, answers = read_states(lm, [anchor.text for anchor in anchors], step=step)
    layers = choose(means, anchors)[0].layer, choose(answers, anchors)[0].layer
    features = _both(means, answers, layers)
    ridge = choose(features[:, None], anchors)[0].ridge
    return fit(ModelReader(lm, layers), features, anchors, ridge)


def save_mapper(mapper: Mapper, path: str | Path, parts: Parts | None = None) -> Path:
    """Write a mapper that reads with a language model: what ``load_mapper`` reads. Raises ReactionError for others."""
    import torch

    from traitbasis.trait_vector import write_safetensors

    if not isinstance(mapper.reader, ModelReader):
        raise ReactionError(f"only a mapper that reads a language model's states is kept, not {mapper.reader.name}")
    tensors = {name: torch.from_numpy(getattr(mapper, name)) for name in _TENSORS}
    return write_safetensors(
        path,
        _FORMAT,
        tensors,
        {
            **_identity(mapper.reader.lm, parts),
            "layers": mapper.reader.layers,
            "ridge": mapper.ridge,
            "conditions": [condition.name for condition in mapper.conditions],
        },
    )


def load_mapper(lm: LanguageModel, path: str | Path, parts: Parts | None = None) -> Mapper:
    """A mapper from a file that ``save_mapper`` wrote.

    Raises ArtifactError for a file that is not there or is no such file, ReactionError for one that was made with
    another model or from other sentences, or whose parts do not fit together.
    """
    from traitbasis.trait_vector import read_safetensors

    tensors, description = read_safetensors(path, _FORMAT, _TENSORS)
    for name, own in _identity(lm, parts).items():
        if (found := description.get(name)) != own:
            raise ReactionError(f"{path} was made with another {name}: {found!r}, not {own!r}; fit it again")
    arrays = {name: tensor.numpy().astype(np.float64) for name, tensor in tensors.items()}
    names, layers, ridge = (description.get(name) for name in ("conditions", "layers", "ridge"))
    if not isinstance(layers, list) or [z for z in layers if z not in range(len(lm.layers))] or len(layers) != 2:
        raise ReactionError(f"{path} is damaged: its layers are {layers!r}; fit it again")
    if not isinstance(ridge, float):
        raise ReactionError(f"{path} is damaged: its ridge is {ridge!r}; fit it again")
    conditions = tuple(Condition.parse(str(name)) for name in names) if isinstance(names, list) else ()
    d = 2 * lm.width
    shapes = [(d,), (d,), (d, _WIDTH), (_WIDTH,), (_WIDTH,), (len(conditions), _WIDTH)]
    if [arrays[name].shape for name in _TENSORS] != shapes or not all(np.isfinite(a).all() for a in arrays.values()):
        raise ReactionError(f"{path} is damaged: its parts do not fit together; fit it again")
    return Mapper(ModelReader(lm, (layers[0], layers[1])), **arrays, conditions=conditions, ridge=ridge)


def model_mapper(
    lm: LanguageModel, parts: Parts | None = None, step: Callable[[int], None] = lambda done: None
) -> Mapper:
    """A language model's mapper: from the user's cache, or fitted, which takes minutes on a CPU, and kept there."""
    from traitbasis.embedded import cache_folder

    path = cache_folder() / "emotions" / f"{lm.slug}-{_identity(lm, parts)['sentences']}.safetensors"
    if path.is_file():
        try:
            return load_mapper(lm, path, parts)
        except (ReactionError, ArtifactError):
            pass  # of another model of that name, or damaged: written anew
    mapper = fit_model(lm, parts, step)
    save_mapper(mapper, path, parts)
    return mapper


# --- how well it does -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Phrasing:
    """A feeling in free words, and the condition it was written for."""

    condition: Condition
    text: str


@dataclass(frozen=True)
class Measured:
    """How often a mapper finds the condition that a phrasing was written for, with 95 % bootstrap intervals.

    n_named: how many of the n phrasings have a cue of their own emotion in them. top1, top5: of the 594 conditions, by
    probability; vote1, vote5: by vote. heads: of each head's own labels; family: of the emotion head's family.
    """

    reader: str
    n: int
    n_named: int
    top1: Estimate
    top5: Estimate
    vote1: Estimate
    vote5: Estimate
    family: Estimate
    heads: Mapping[str, Estimate]

    @property
    def record(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "reader": self.reader,
            "n": self.n,
            "n_named": self.n_named,
            **{name: estimate.record for name, estimate in self.figures.items()},
        }

    @property
    def figures(self) -> dict[str, Estimate]:
        """All accuracies by what they are of, as in ``CHANCE``."""
        names = ("top1", "top5", "vote1", "vote5", "family")
        return {**{name: getattr(self, name) for name in names}, **self.heads}


CHANCE: dict[str, float] = {
    "top1": 1 / 594,
    "top5": 5 / 594,
    "vote1": 1 / 594,
    "vote5": 5 / 594,
    "family": sum((len(emotions) / len(EMOTIONS)) ** 2 for emotions in FAMILIES.values()),
    **{head: 1 / len(labels) for head, labels in HEADS.items()},
}


def read_phrasings(path: str | Path | None = None) -> tuple[Phrasing, ...]:
    """Phrasings of a file, by default those that ship: a mapping of emotions to mappings of levels to texts.

    Raises ReactionError naming the file and the entry.
    """
    file = Path(path) if path is not None else data_file("phrasings.yaml")
    document = read_yaml(file)
    if not isinstance(document, dict) or not document:
        raise ReactionError(f"{file}: phrasings are a mapping of emotions, not {type(document).__name__}")
    found = []
    for emotion, texts in document.items():
        if not isinstance(texts, dict):
            raise ReactionError(f"{file}: {emotion}: a mapping of levels to texts is needed, not {texts!r}")
        for levels, text in texts.items():
            try:
                condition = Condition.parse(f"{emotion}.{levels}")
            except ReactionError as error:
                raise ReactionError(f"{file}: {emotion}, {levels}: {error}") from error
            if not isinstance(text, str) or not text.strip():
                raise ReactionError(f"{file}: {emotion}, {levels}: a text is needed, not {text!r}")
            found.append(Phrasing(condition, text.strip()))
    return tuple(found)


def phrasings_hash(phrasings: Sequence[Phrasing] | None = None) -> str:
    """Identifies phrasings and what they were written for (16 hex digits)."""
    content = [(one.condition.name, one.text) for one in (read_phrasings() if phrasings is None else phrasings)]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


def measure(mapper: Mapper, phrasings: Sequence[Phrasing] | None = None) -> Measured:
    """Accuracies on phrasings, by default those that ship. Raises ReactionError without one."""
    phrasings = read_phrasings() if phrasings is None else phrasings
    if not phrasings:
        raise ReactionError("there is no phrasing to measure on")
    found = list(zip(mapper.map([one.text for one in phrasings]), (one.condition for one in phrasings), strict=True))

    def share(right: Callable[[Mapped, Condition], bool]) -> Estimate:
        return mean_over_tasks((f"{i}", float(right(*one))) for i, one in enumerate(found))

    def is_in(ranking: str, first: int) -> Estimate:
        return share(lambda mapped, wanted: wanted in [one for one, _ in getattr(mapped, ranking)[:first]])

    def head_is_right(head: str) -> Estimate:
        return share(lambda mapped, wanted: mapped.condition.labels[head] == wanted.labels[head])

    return Measured(
        mapper.reader.name,
        len(phrasings),
        sum(one.condition.emotion in cues_in(one.text, "emotion") for one in phrasings),
        is_in("ranked", 1),
        is_in("ranked", 5),
        is_in("voted", 1),
        is_in("voted", 5),
        share(lambda mapped, wanted: mapped.condition.family == wanted.family),
        {head: head_is_right(head) for head in HEADS},
    )


# --- details ----------------------------------------------------------------------------------------------------------

_TENSORS = ("centre", "scale", "weights", "base", "sharpness", "places")
_WIDTH = sum(map(len, HEADS.values()))
_SHARPNESSES = np.geomspace(0.1, 100, 61)
_STARTS = np.cumsum([0, *map(len, HEADS.values())]).tolist()
_SLICES = {head: slice(start, end) for head, start, end in zip(HEADS, _STARTS, _STARTS[1:], strict=False)}
_ALL = all_conditions()
_INDEX = {condition: i for i, condition in enumerate(_ALL)}
# Of each condition, where its four labels stand among the 31.
_TARGETS = np.array(
    [[_SLICES[head].start + HEADS[head].index(label) for head, label in c.labels.items()] for c in _ALL]
)


def _labels(anchors: Sequence[Anchor]) -> Array:
    """``(n, 31)``, 1 where a label holds."""
    labels = np.zeros((len(anchors), _WIDTH))
    for row, anchor in zip(labels, anchors, strict=True):
        row[_TARGETS[_INDEX[anchor.condition]]] = 1
    return labels


def _standard(features: Array, scaled: bool) -> tuple[Array, Array]:
    """Mean and, where scaled, standard deviation of each feature, else 1."""
    scale = np.maximum(features.std(0), 1e-6) if scaled else np.ones(features.shape[1])
    return features.mean(0), scale


def _solutions(x: Array, y: Array, ridges: Sequence[float]) -> list[Array]:
    """``(X'X + ridge * trace(X'X) / d * I)^-1 X'Y`` for each ridge, from one eigendecomposition."""
    n, d = x.shape
    tall = n >= d
    values, vectors = np.linalg.eigh(x.T @ x if tall else x @ x.T)
    penalties = [ridge * float((x * x).sum()) / d for ridge in ridges]
    right = vectors.T @ (x.T @ y if tall else y)
    found = [vectors @ (right / (np.maximum(values, 0)[:, None] + penalty)) for penalty in penalties]
    return found if tall else [x.T @ one for one in found]


def _left_out(features: Array, anchors: Sequence[Anchor], ridges: Sequence[float], scaled: bool) -> list[Array]:
    """What each ridge's heads say of the anchors, ``(n, 31)``, when fitted on the other voices."""
    voices = np.array([anchor.voice for anchor in anchors])
    labels = _labels(anchors)
    found = [np.zeros(labels.shape) for _ in ridges]
    for voice in np.unique(voices):
        kept, out = voices != voice, voices == voice
        centre, scale = _standard(features[kept], scaled)
        base = labels[kept].mean(0)
        solutions = _solutions((features[kept] - centre) / scale, labels[kept] - base, ridges)
        for heads, weights in zip(found, solutions, strict=True):
            heads[out] = (features[out] - centre) / scale @ weights + base
    return found


def _sharpness(heads: Array, labels: Array) -> Array:
    """What each head's numbers are multiplied with before the softmax, so that the labels that hold are likeliest.

    Temperature scaling (Guo et al., 2017), on a grid; ``(31,)``, alike within a head.
    """
    found = np.zeros(_WIDTH)
    for part in _SLICES.values():
        fits = [(_log_softmax(heads[:, part] * by, one=True) * labels[:, part]).sum() for by in _SHARPNESSES]
        found[part] = _SHARPNESSES[int(np.argmax(fits))]
    return found


def _log_softmax(rows: Array, one: bool = False) -> Array:
    """Log-probabilities within each head, or, with `one`, of rows that are a single head's."""
    found = np.empty_like(rows)
    for part in (slice(None),) if one else _SLICES.values():
        shifted = rows[:, part] - rows[:, part].max(1, keepdims=True)
        found[:, part] = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
    return found


def _by_head(places: Array) -> Array:
    """Each head's part of each place at length 1."""
    return np.concatenate([_unit(places[:, part]) for part in _SLICES.values()], axis=1)


def _unit(rows: Array) -> Array:
    unit: Array = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)
    return unit


def _words(text: str) -> list[str]:
    return _WORD.findall(text.casefold())


def _identity(lm: LanguageModel, parts: Parts | None) -> dict[str, str]:
    """What a mapper of a language model is made from."""
    content = json.dumps([PREFIX, QUESTION, [anchor.text for anchor in fitting_anchors(parts)]])
    return {
        "model": lm.name,
        "model_fingerprint": lm.fingerprint,
        "sentences": hashlib.sha256(content.encode()).hexdigest()[:16],
    }
