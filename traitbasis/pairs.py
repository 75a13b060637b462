"""Contrastive pairs: one context, two responses with the same facts and intent, differing in one trait's intensity.

A pair file is YAML that a person can write; ``contrastive_pairs/impatience.yaml`` is the model to copy. Speakers are
``system``, ``agent`` and ``customer``. ``user`` and ``assistant`` are refused on purpose: harnesses and chat
templates give them opposite meanings (see ``chat.py``).

Each pair says what it is used for: ``default`` pairs make the trait vector (the paper, section 4: the effect
saturates at n=4), ``extra`` pairs are there for larger n, and ``heldout`` pairs never enter a vector: they measure it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    field_validator,
    model_validator,
)

from traitbasis.chat import Turn
from traitbasis.errors import PairError
from traitbasis.spec import LEVELS

Use = Literal["default", "extra", "heldout"]
Family = Literal[
    "temperament", "communication", "conduct", "knowledge", "anger", "fear", "disgust", "sadness", "enjoyment"
]
PAPER_TRAITS = ("confusion", "impatience", "incoherence", "skeptical")
Text = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)]
Name = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_]*$")]

# What a trait cannot be called: these mean something else in commands and trait specs, or are files beside a trait's.
RESERVED = ("all", "emotions", "basis", "baselines", "judge", *LEVELS)

LENGTH_RATIO = 1.6  # a longer response must not be the trait: the longer side has at most this many times the words

_WORD = re.compile(r"[^\W_]+(?:['’][^\W_]+)*")
_SIGNAL = re.compile(r"[^\W_]+(?:['’][^\W_]+)*|\.\.\.|…|--|—|[?!]+")


class Strict(BaseModel):
    """A part of a file that a person writes: a field that is not known is an error, most likely a misspelt one."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def _read_turn(value: Any) -> Any:
    """YAML writes a turn as a mapping with one key, the speaker: ``- agent: text``."""
    if isinstance(value, Turn):
        return value
    if not isinstance(value, dict) or len(value) != 1:
        raise ValueError("a turn is one speaker and its text, such as '- agent: How can I help?'")
    ((speaker, text),) = value.items()
    if speaker in ("user", "assistant"):
        raise ValueError(f"speaker {speaker!r} is ambiguous here; write 'agent' or 'customer'")
    return {"speaker": speaker, "text": text.strip() if isinstance(text, str) else text}


ContextTurn = Annotated[Turn, BeforeValidator(_read_turn)]


class Pair(Strict):
    """A context and two responses to it. ``positive`` shows the trait, ``negative`` does not."""

    id: Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9-]*$")]
    domain: Name
    use: Use
    context: Annotated[tuple[ContextTurn, ...], Field(min_length=1)]
    positive: Text
    negative: Text
    facts: Annotated[tuple[Text, ...], Field(min_length=1)]

    @field_validator("context")
    @classmethod
    def _ends_before_the_customer(cls, context: tuple[Turn, ...]) -> tuple[Turn, ...]:
        if any(not turn.text for turn in context):
            raise ValueError("a turn has no text")
        if any(turn.speaker == "system" for turn in context[1:]):
            raise ValueError("a system turn can only come first")
        if context[-1].speaker != "agent":
            raise ValueError("the last turn must be the agent's, since the responses are the customer's")
        return context

    @model_validator(mode="after")
    def _same_facts(self) -> Pair:
        if self.positive == self.negative:
            raise ValueError("fields 'positive' and 'negative' are the same text")
        for side in ("positive", "negative"):
            folded = fold(getattr(self, side))
            for fact in self.facts:
                if fold(fact) not in folded:
                    raise ValueError(
                        f"field {side!r} does not contain the fact {fact!r}; both sides must keep every fact"
                    )
        return self

    @property
    def lengths(self) -> tuple[int, int]:
        """Words of the positive and of the negative response."""
        return len(words(self.positive)), len(words(self.negative))

    @property
    def turn(self) -> Literal["first", "late"]:
        """``late`` when the customer has already spoken in the context."""
        return "late" if any(turn.speaker == "customer" for turn in self.context) else "first"


class PairSet(Strict):
    """The pairs of one trait, in file order.

    family: where the trait stands in the library, or an emotion's own family. markers: words and marks that belong to
    the trait (``please`` to politeness) and are no shortcut. length_free: the trait is a matter of length (terse,
    rambling), so its two sides may differ in it.
    """

    trait: Name
    definition: Text
    opposite: Text
    family: Family | None = None
    aliases: tuple[Name, ...] = ()
    markers: tuple[Text, ...] = ()
    length_free: bool = False
    pairs: Annotated[tuple[Pair, ...], Field(min_length=1)]

    @field_validator("trait")
    @classmethod
    def _is_not_reserved(cls, trait: str) -> str:
        if trait in RESERVED:
            raise ValueError(
                f"{trait!r} cannot name a trait; it means something else in commands, trait specs or file names"
            )
        return trait

    @field_validator("aliases")
    @classmethod
    def _are_not_reserved(cls, aliases: tuple[str, ...]) -> tuple[str, ...]:
        for alias in aliases:
            cls._is_not_reserved(alias)
        return aliases

    @model_validator(mode="after")
    def _ids_are_unique(self) -> PairSet:
        seen: set[str] = set()
        for pair in self.pairs:
            if pair.id in seen:
                raise ValueError(f"pair {pair.id!r}: field 'id' is used twice")
            seen.add(pair.id)
        return self

    @model_validator(mode="after")
    def _sides_are_of_similar_length(self) -> PairSet:
        for pair in () if self.length_free else self.pairs:
            positive, negative = pair.lengths
            if max(pair.lengths) > LENGTH_RATIO * min(pair.lengths):
                raise ValueError(
                    f"pair {pair.id!r}: field 'positive' has {positive} words and field 'negative' {negative}; the "
                    f"longer may have at most {LENGTH_RATIO} times the words of the shorter (length_free: true lifts "
                    "this for a trait that is a matter of length)"
                )
        return self

    def shortcuts(self, threshold: float = 0.4) -> dict[str, float]:
        """``lexical_shortcuts`` of all pairs, but for the trait's own markers."""
        own = {marker.casefold() for marker in self.markers}
        return {word: gap for word, gap in lexical_shortcuts(self.pairs, threshold).items() if word not in own}

    def select(self, *uses: Use) -> tuple[Pair, ...]:
        """The pairs marked with one of `uses`, in file order."""
        return tuple(pair for pair in self.pairs if pair.use in uses)

    def for_extraction(self, n: int | None = None) -> tuple[Pair, ...]:
        """The pairs that make a vector: the ``default`` ones, or the first `n` of default followed by extra.

        Raises PairError when `n` is not between 1 and the number of pairs that are not held out.
        """
        default, extra = self.select("default"), self.select("extra")
        if n is None:
            if not default:
                raise PairError(f"{self.trait}: no pair is marked 'use: default'; mark some, or say how many with n")
            return default
        if not 1 <= n <= len(default) + len(extra):
            raise PairError(
                f"{self.trait}: cannot take {n} pairs; {len(default) + len(extra)} are not held out, so n is 1 to that"
            )
        return (*default, *extra)[:n]


class PairLoader(yaml.SafeLoader):
    """YAML in which a key that is there twice is refused; PyYAML would take the last and say nothing."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if before := lines.get(key.value):
                    problem = f"{key.value!r} is there already, in line {before}; keep one"
                    raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
                lines[key.value] = key.start_mark.line + 1
        return node


def known_traits() -> list[str]:
    """Names of the traits whose pairs ship with the package and whose vectors do, too: what ``all`` means."""
    return _names_in(resources.files("traitbasis.contrastive_pairs"))


def known_emotions() -> list[str]:
    """Names of the emotions and dimensions whose pairs ship; their vectors are for you to extract.

    They are 22 emotions and what goes with each in tau-Emotion-Bench: ``politeness_warm`` (at the other pole cold),
    ``urgency_high`` (low) and ``trust_trusting`` (skeptical).
    """
    return _names_in(resources.files("traitbasis.contrastive_pairs") / "emotions")


def has_pairs(name: str) -> bool:
    """Whether pairs of a trait or emotion of this name ship."""
    return name in known_traits() or name in known_emotions()


def shipped_file(name: str) -> Path | None:
    """The pair file of a shipped trait or emotion; its name may say where it is: ``emotions/frustration``."""
    places = {place: place for place in (f"emotions/{name}" for name in known_emotions())}
    places |= {place.removeprefix("emotions/"): place for place in places} | {name: name for name in known_traits()}
    place = places.get(name.replace("\\", "/"))
    return Path(str(resources.files("traitbasis.contrastive_pairs") / f"{place}.yaml")) if place else None


def written_out(names: Iterable[str]) -> list[str]:
    """Names with ``all`` (the traits) and ``emotions`` written out, each once."""
    groups = {"all": known_traits, "emotions": known_emotions}
    return list(dict.fromkeys(one for name in names for one in (groups[name]() if name in groups else [name])))


def load_pairs(source: str | Path) -> PairSet:
    """Read and validate a pair file, given its path or the name of a shipped trait or emotion.

    Raises PairError naming the file, the pair and the field.
    """
    path = Path(source)
    if path.suffix not in (".yaml", ".yml"):
        shipped = shipped_file(str(source))
        if shipped is None:
            raise PairError(
                f"no contrastive pairs for trait {str(source)!r}; shipped: {', '.join(known_traits())}; emotions: "
                f"{', '.join(known_emotions())}; for your own, give the path of a .yaml file"
            )
        path = shipped
    try:
        document = yaml.load(path.read_text(encoding="utf-8"), PairLoader)
    except OSError as error:
        raise PairError(f"cannot read pair file {path}: {error.strerror or error}") from error
    except (yaml.YAMLError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        # Besides its own errors PyYAML lets through those of int(), date() and others it builds values with.
        raise PairError(f"{path} is not valid YAML: {error}") from error
    if not isinstance(document, dict):
        raise PairError(f"{path}: expected a mapping with the fields {', '.join(PairSet.model_fields)}")
    try:
        return PairSet.model_validate(document)
    except ValidationError as error:
        raise PairError("\n".join(_explain(path, document, detail) for detail in error.errors())) from error


def pair_set_hash(pairs: Iterable[Pair]) -> str:
    """SHA-256 over everything of the pairs that a vector depends on, in order (not ids, uses or facts)."""
    content = [[[[turn.speaker, turn.text] for turn in pair.context], pair.positive, pair.negative] for pair in pairs]
    return hashlib.sha256(json.dumps(content, ensure_ascii=True).encode()).hexdigest()


def file_hash(pair_set: PairSet) -> str:
    """SHA-256 over everything a pair file says: what was measured with one version of it is not the next one's."""
    return hashlib.sha256(pair_set.model_dump_json().encode()).hexdigest()


def lexical_shortcuts(pairs: Sequence[Pair], threshold: float = 0.4) -> dict[str, float]:
    """Words or marks that tell the two sides apart on their own.

    For each word (and each of ``? ! ... —``), the share of positives that contain it minus the share of negatives
    that do. Returns those whose absolute difference exceeds `threshold`, strongest first. A vector made from pairs
    with such a shortcut may write the word and not the trait.
    """
    if not pairs:
        return {}
    positive = [_signals(pair.positive) for pair in pairs]
    negative = [_signals(pair.negative) for pair in pairs]
    gaps = {
        signal: (sum(signal in text for text in positive) - sum(signal in text for text in negative)) / len(pairs)
        for signal in set().union(*positive, *negative)
    }
    found = {signal: gap for signal, gap in gaps.items() if abs(gap) > threshold}
    return dict(sorted(found.items(), key=lambda item: (-abs(item[1]), item[0])))


def words(text: str) -> list[str]:
    """The words of a text, as lengths are counted: marks are none, and ``a-b`` is two."""
    return _WORD.findall(text)


def fold(text: str) -> str:
    """Text as facts are compared: case and runs of white space do not matter."""
    return " ".join(text.casefold().split())


def _names_in(folder: Traversable) -> list[str]:
    return sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml"))


def _signals(text: str) -> set[str]:
    marks = {"?": "?", "!": "!", ".": "...", "…": "...", "-": "—", "—": "—"}
    return {marks.get(signal[0], signal) for signal in _SIGNAL.findall(text.casefold().replace("’", "'"))}


def _explain(path: Path, document: dict[str, Any], detail: Any) -> str:
    location = list(detail["loc"])
    where = str(path)
    if len(location) >= 2 and location[0] == "pairs" and isinstance(location[1], int):
        raw = list(document["pairs"])[location[1]]  # a YAML set has no index
        name = raw.get("id") if isinstance(raw, dict) else None
        where += f": pair {name!r}" if name else f": pair number {location[1] + 1}"
        location = location[2:]
    if location:
        where += f": field {'.'.join(str(part) for part in location)!r}"
    return f"{where}: {detail['msg'].removeprefix('Value error, ')}"
