"""The 594 emotion conditions of a simulated customer, as text and as traits.

A condition is one of 22 emotions in five families (after the Atlas of Emotions), with a level of politeness, of urgency
and of trust: 22 x 3 x 3 x 3. It holds for a whole episode and says what the customer feels and how it talks, never what
it wants. Source: tau-Emotion-Bench (arXiv 2610.19560), 3.3 and A.1; the wording is this project's own.

As text, a condition is one of ten instructions composed from the sentences of ``data/conditions.yaml``, which a person
may edit; ``check_conditions`` finds sentences that contradict the label they stand under, as some published ones do
(docs/harness-contract.md, 1.2). As traits, it is intensities of a basis' columns.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from functools import cache, cached_property
from importlib import resources
from itertools import product
from pathlib import Path
from random import Random
from typing import Annotated, Any

import yaml
from pydantic import Field, ValidationError, model_validator

from traitbasis.errors import ReactionError
from traitbasis.pairs import PairLoader, Strict, Text

FAMILIES: dict[str, tuple[str, ...]] = {
    "anger": ("annoyance", "frustration", "argumentativeness", "bitterness", "exasperation"),
    "fear": ("anxiety", "nervousness", "dread", "desperation"),
    "disgust": ("dislike", "aversion", "distaste", "repugnance"),
    "sadness": ("disappointment", "discouragement", "helplessness", "hopelessness", "sorrow"),
    "enjoyment": ("relief", "pride", "peace", "excitement"),
}
EMOTIONS: tuple[str, ...] = tuple(emotion for emotions in FAMILIES.values() for emotion in emotions)
# The middle level of each is what a condition has that does not name one.
DIMENSIONS: dict[str, tuple[str, str, str]] = {
    "politeness": ("warm", "neutral", "cold"),
    "urgency": ("low", "moderate", "high"),
    "trust": ("trusting", "cautious", "skeptical"),
}
# The column of a basis by dimension, and what the level at its positive pole is called.
POLES: dict[str, tuple[str, str]] = {
    "politeness": ("politeness_warm", "warm"),
    "urgency": ("urgency_high", "high"),
    "trust": ("trust_trusting", "trusting"),
}
ANCHORS = 10  # instructions of a condition, as many as the paper has
VOICES = 5  # of them are made of the n-th sentences alone, so that two such share no sentence

_DIMENSION_OF = {level: dimension for dimension, levels in DIMENSIONS.items() for level in levels}
_MIDDLE = {dimension: levels[1] for dimension, levels in DIMENSIONS.items()}
# What tau-Emotion-Bench's task files call the same.
_TASK_LABELS = {
    "emotion_leaf": "emotion",
    "dimension_politeness": "politeness",
    "dimension_urgency": "urgency",
    "dimension_trust_in_agent": "trust",
}
# A cue within three words after one of these is denied: "avoid unnecessary politeness".
_DENIED = re.compile(
    r"(?:\b(?:no|not|never|nor|neither|nothing|without|hardly|avoid\w*|skip\w*|drop\w*|omit\w*|refus\w+|stop\w*"
    r"|instead of|rather than|free of|far from|leave out)|n['’]t)(?:\s+[\w'’-]+){0,3}\s*$",
    re.IGNORECASE,
)
_CLAUSE = re.compile(r"[.;:!?\n]|,(?!\s*(?:or|and)\b)")

Sentences = Annotated[tuple[Text, ...], Field(min_length=VOICES)]
Cues = Annotated[tuple[Text, ...], Field(min_length=1)]


class EmotionParts(Strict):
    """Sentences about what is felt and how it shows, and the words that speak for the emotion."""

    cues: Cues
    feels: Sentences
    shows: Sentences


class LevelParts(Strict):
    """Sentences that ask for one level of a dimension, and the words that speak for it."""

    cues: Cues
    says: Sentences


class Parts(Strict):
    """What instructions are composed from. All emotions and levels are there, and no other."""

    emotions: dict[str, EmotionParts]
    dimensions: dict[str, dict[str, LevelParts]]

    @model_validator(mode="after")
    def _are_complete(self) -> Parts:
        _same("emotions", self.emotions, EMOTIONS)
        _same("dimensions", self.dimensions, DIMENSIONS)
        for dimension, levels in DIMENSIONS.items():
            _same(dimension, self.dimensions[dimension], levels)
        return self

    def sentences(self) -> list[tuple[str, str, str]]:
        """Every sentence as (what it is of, label, sentence): "emotion" and its name, or a dimension and its level."""
        emotions = [
            ("emotion", name, text) for name, part in self.emotions.items() for text in (*part.feels, *part.shows)
        ]
        levels = [
            (dimension, level, text)
            for dimension, by_level in self.dimensions.items()
            for level, part in by_level.items()
            for text in part.says
        ]
        return emotions + levels

    @cached_property
    def cues(self) -> dict[str, re.Pattern[str]]:
        """What speaks for a label, by label."""
        levels = {level: part.cues for by_level in self.dimensions.values() for level, part in by_level.items()}
        emotions = {name: part.cues for name, part in self.emotions.items()}
        return {name: _pattern(cues) for name, cues in {**emotions, **levels}.items()}


@dataclass(frozen=True, order=True)
class Condition:
    """What a customer feels and how that comes out. Raises ReactionError for an unknown emotion or level."""

    emotion: str
    politeness: str = "neutral"
    urgency: str = "moderate"
    trust: str = "cautious"

    def __post_init__(self) -> None:
        _known("emotion", self.emotion, EMOTIONS)
        for dimension, levels in DIMENSIONS.items():
            _known(dimension, getattr(self, dimension), levels)

    @property
    def family(self) -> str:
        return next(family for family, emotions in FAMILIES.items() if self.emotion in emotions)

    @property
    def labels(self) -> dict[str, str]:
        """Emotion and the three levels, by what they are of."""
        return asdict(self)

    @property
    def name(self) -> str:
        """Such as ``frustration.cold.high.skeptical``."""
        return ".".join(self.labels.values())

    @property
    def record(self) -> dict[str, str]:
        """For JSON."""
        return {"family": self.family, **self.labels}

    @classmethod
    def from_record(cls, record: Any) -> Condition:
        """A condition from its record, or from the labels of a tau-Emotion-Bench task; other keys are let pass.

        A dimension that is not there is at its middle. Raises ReactionError naming the field.
        """
        if not isinstance(record, Mapping):
            raise ReactionError(f"a condition's record is {record!r}, not an object with 'emotion' and levels")
        labels = {_TASK_LABELS.get(key, key): value for key, value in record.items()}
        if "emotion" not in labels:
            raise ReactionError(f"a condition's record has no 'emotion': {dict(record)!r}")
        condition = cls(labels["emotion"], **{name: labels.get(name, middle) for name, middle in _MIDDLE.items()})
        if labels.get("family", condition.family) != condition.family:
            raise ReactionError(
                f"a condition's family is {labels['family']!r}, but {condition.emotion} belongs to {condition.family}"
            )
        return condition

    @classmethod
    def parse(cls, text: str) -> Condition:
        """Read ``frustration.cold.high.skeptical``: the emotion, then levels in any order, the middle where none is.

        Levels' names say what they are of, so ``frustration.skeptical`` will do; spaces, commas, ``+`` and ``/``
        separate, too. Raises ReactionError naming the word that is not known, or a dimension that is there twice.
        """
        words = [word for word in re.split(r"[\s.,;+/]+", text.casefold()) if word]
        if not words:
            raise ReactionError("a condition has no emotion; write it as frustration.cold.high.skeptical")
        _known("emotion", words[0], EMOTIONS)
        levels: dict[str, str] = {}
        for word in words[1:]:
            _known("level", word, tuple(_DIMENSION_OF))
            dimension = _DIMENSION_OF[word]
            if dimension in levels:
                raise ReactionError(f"condition {text!r} has two levels of {dimension}: {levels[dimension]}, {word}")
            levels[dimension] = word
        return cls(words[0], **levels)

    def traits(self, emotion: float = 1.0, dimensions: float = 1.0) -> dict[str, float]:
        """Intensities of a basis' columns: the emotion's, and of each dimension that is not at its middle.

        The dimensions are bipolar: ``politeness_warm`` is positive for warm and negative for cold. At the middle
        nothing is added. emotion, dimensions: intensity at a pole; 1.0 is medium.
        """
        found = {self.emotion: emotion}
        for dimension, (trait, pole) in POLES.items():
            level = getattr(self, dimension)
            if level != _MIDDLE[dimension]:
                found[trait] = dimensions if level == pole else -dimensions
        return found

    def voice(self, number: int, parts: Parts | None = None) -> str:
        """The instruction made of the number-th sentence of every list; below ``VOICES``, no two share a sentence."""
        return self._compose((number,) * 5, number, parts or shipped_parts())

    def anchors(self, parts: Parts | None = None) -> tuple[str, ...]:
        """``ANCHORS`` different instructions: the voices, then mixtures of them. Always the same for the same parts."""
        parts = parts or shipped_parts()
        found = [self.voice(number, parts) for number in range(VOICES)]
        random = Random(self.name)
        while len(found) < ANCHORS:
            choice = tuple(random.randrange(VOICES) for _ in range(5))
            text = self._compose(choice, random.randrange(6), parts)
            if text not in found:
                found.append(text)
        return tuple(found)

    def instruction(self, seed: int = 0, parts: Parts | None = None) -> str:
        """One of the anchors, drawn by `seed`: what a simulated customer is given."""
        return Random(f"{self.name} {seed}").choice(self.anchors(parts))

    def _compose(self, choice: Sequence[int], order: int, parts: Parts) -> str:
        """choice: which sentence of feels, shows and the three dimensions. order: of the dimensions, one of six."""
        emotion = parts.emotions[self.emotion]
        levels = [parts.dimensions[dimension][getattr(self, dimension)].says for dimension in DIMENSIONS]
        said = [texts[n % len(texts)] for texts, n in zip((emotion.feels, emotion.shows, *levels), choice, strict=True)]
        first, second, third = _ORDERS[order % len(_ORDERS)]
        return " ".join([*said[:2], said[2 + first], said[2 + second], said[2 + third]])


_ORDERS = ((0, 1, 2), (1, 2, 0), (2, 0, 1), (0, 2, 1), (1, 0, 2), (2, 1, 0))


@cache
def all_conditions() -> tuple[Condition, ...]:
    """All 594, by emotion."""
    return tuple(Condition(*labels) for labels in product(EMOTIONS, *DIMENSIONS.values()))


def read_parts(path: str | Path | None = None) -> Parts:
    """Sentences of a file, by default those that ship. Raises ReactionError naming the file and what is wrong in it."""
    file = Path(path) if path is not None else data_file("conditions.yaml")
    document = read_yaml(file)
    try:
        return Parts.model_validate(document)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(step) for step in first["loc"]) or "the file"
        raise ReactionError(f"{file}: {place}: {first['msg'].removeprefix('Value error, ')}") from error


@cache
def shipped_parts() -> Parts:
    """The sentences that ship, read once."""
    return read_parts()


def data_file(name: str) -> Path:
    """A data file that comes with the package."""
    return Path(str(resources.files("traitbasis.reactive") / "data" / name))


def read_yaml(file: Path) -> Any:
    """What is in a YAML file, in which no key may stand twice. Raises ReactionError naming the file."""
    try:
        return yaml.load(file.read_text(encoding="utf-8"), PairLoader)
    except OSError as error:
        raise ReactionError(f"cannot read {file}: {error.strerror or error}") from error
    except (yaml.YAMLError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise ReactionError(f"{file} is not valid YAML: {error}") from error


def contradictions(text: str, condition: Condition, parts: Parts | None = None) -> list[str]:
    """How an instruction contradicts a condition's labels, in words; empty where nothing was found.

    For the emotion and each dimension, the text may not speak for another label than the condition's, and may not deny
    that one. It speaks for a label by a cue of it, and denies one by a cue within three words after a negation, in the
    same clause; denying another label is no contradiction ("neither friendly nor rude" is neutral). Words are all that
    is looked at: an instruction that contradicts its label without any cue passes.
    """
    parts = parts or shipped_parts()
    return [
        f"{of} is {label}, but the text {claim}"
        for of, label in condition.labels.items()
        for claim in _claims(text, of, parts)
        if claim.denied == (claim.label == label)
    ]


def check_conditions(parts: Parts | None = None) -> list[str]:
    """What is wrong with the sentences, in words; empty when all 594 conditions are sound.

    Every sentence must be one, be in the file once, and contradict no label of the conditions that it is used in: it
    stands beside all labels of the other kinds, so it has no cue of those. Every condition must have ``ANCHORS``
    different instructions that do not contradict it, and no two conditions the same.
    """
    parts = parts or shipped_parts()
    problems = []
    places: dict[str, list[str]] = defaultdict(list)
    for own, label, text in parts.sentences():
        places[" ".join(re.findall(r"\w+", text.casefold()))].append(label)
        if not text[0].isupper() or text[-1] not in ".!?" or re.search(r"[{}<>\[\]\n]", text):
            problems.append(f"{label}: {text!r} is no clean sentence (capital, full stop, no brackets)")
        for of in ("emotion", *DIMENSIONS):
            for claim in _claims(text, of, parts):
                if of != own:
                    problems.append(f"{label}: the sentence is used with every {of}, but {claim}")
                elif claim.denied == (claim.label == label):
                    problems.append(f"{label}: {of} is {label}, but the text {claim}")
    for text, labels in places.items():
        if len(labels) > 1:
            problems.append(f"{' and '.join(labels)} have the same sentence: {text!r}")
    owners: dict[str, str] = {}
    for condition in all_conditions() if not problems else ():  # of sound sentences
        anchors = condition.anchors(parts)
        if len(set(anchors)) < ANCHORS:
            problems.append(f"{condition.name} has {len(set(anchors))} different instructions, not {ANCHORS}")
        for text in anchors:
            problems += [f"{condition.name}: {problem}" for problem in contradictions(text, condition, parts)]
            if (owner := owners.setdefault(text, condition.name)) != condition.name:
                problems.append(f"{owner} and {condition.name} have the same instruction: {text!r}")
    return problems


def cues_in(text: str, of: str, parts: Parts | None = None) -> set[str]:
    """Labels that a text speaks for by a cue and does not deny; `of` is "emotion" or a dimension."""
    return {claim.label for claim in _claims(text, of, parts or shipped_parts()) if not claim.denied}


@dataclass(frozen=True)
class _Claim:
    """A cue of a label in a clause, or its denial."""

    label: str
    denied: bool
    clause: str

    def __str__(self) -> str:
        return f"{'denies' if self.denied else 'speaks for'} {self.label}: {self.clause!r}"


def _claims(text: str, of: str, parts: Parts) -> list[_Claim]:
    found = []
    for label in EMOTIONS if of == "emotion" else DIMENSIONS[of]:
        if parts.cues[label].search(text) is None:
            continue
        for clause in _CLAUSE.split(text):
            for match in parts.cues[label].finditer(clause):
                found.append(_Claim(label, _DENIED.search(clause[: match.start()]) is not None, clause.strip()))
    return found


def _pattern(cues: Sequence[str]) -> re.Pattern[str]:
    """Cues as one pattern: whole words, ``*`` is any ending or a word of its own."""
    written = (r"\s+".join(re.escape(word).replace(r"\*", r"[\w'’-]*") for word in cue.split()) for cue in cues)
    return re.compile(rf"(?<![\w-])(?:{'|'.join(written)})(?![\w-])", re.IGNORECASE)


def _same(what: str, found: Mapping[str, Any], expected: Sequence[str] | Mapping[str, Any]) -> None:
    """Raises ValueError naming what is missing or unknown."""
    for problem, names in (("lacks", set(expected) - set(found)), ("has unknown", set(found) - set(expected))):
        if names:
            raise ValueError(f"{what} {problem} {', '.join(sorted(names))}")


def _known(what: str, name: Any, names: Sequence[str]) -> None:
    """Raises ReactionError for a name that is none of `names`, with the nearest of them."""
    if name in names:
        return
    near = get_close_matches(name, names, n=1) if isinstance(name, str) else []
    hint = f"did you mean {near[0]}? " if near else ""
    raise ReactionError(f"unknown {what} {name!r}; {hint}known: {', '.join(names)}")
