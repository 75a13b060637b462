"""What a pair file still lacks, and what is wrong with it, finished or not, each with its line.

``load_pairs`` wants a finished file and refuses any other; this reads one while it is being written. What it calls
ready ``load_pairs`` takes, and it asks for more: pairs enough, no repetition, no word that gives the sides away.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from traitbasis.errors import PairError
from traitbasis.pairs import (
    LENGTH_RATIO,
    Pair,
    PairLoader,
    PairSet,
    fold,
    known_emotions,
    known_traits,
    lexical_shortcuts,
    load_pairs,
    shipped_file,
    words,
)

# How many pairs are enough, and why.
ENOUGH = {"default": 4, "heldout": 8}
_WHY = {
    "default": "they make the vector; four were enough in the paper (section 4), and on the embedded model sixteen "
    "express half as strongly again (docs/selection.md)",
    "heldout": "they never enter the vector and measure it; the fewer they are, the coarser",
}
SHORTCUTS_FROM = 8  # finished pairs; among fewer, every other word would tell the sides apart
SIDES = ("positive", "negative")
ALSO = ("anxiety",)  # an emotion, and an alias of `anxious` from before it was one


@dataclass(frozen=True)
class Finding:
    """Something to do: where, and what.

    line: in the file, from 1 on. pair: its id, or its number when it has none; empty when it is about the whole file.
    unfinished: it is not wrong, only not written yet.
    """

    line: int
    pair: str
    field: str
    message: str
    unfinished: bool = False

    def __str__(self) -> str:
        where = [self.pair and f"pair {self.pair}", self.field and f"field {self.field!r}", self.message]
        return f"line {self.line}: " + ": ".join(part for part in where if part)


@dataclass(frozen=True)
class PairState:
    """How far a pair is. words: of its two sides. missing: sides not written yet. mistakes: how many findings else."""

    id: str
    use: str
    turn: str
    line: int
    words: tuple[int, int]
    missing: tuple[str, ...]
    mistakes: int

    @property
    def done(self) -> bool:
        return not self.missing and not self.mistakes


@dataclass(frozen=True)
class Report:
    """What a pair file holds, and what it lacks; findings are in the order of the file."""

    path: Path
    pairs: tuple[PairState, ...]
    findings: tuple[Finding, ...]

    @property
    def ready(self) -> bool:
        return not self.findings

    @property
    def mistakes(self) -> int:
        return sum(not finding.unfinished for finding in self.findings)

    def done(self, use: str) -> int:
        return sum(pair.done and pair.use == use for pair in self.pairs)


def check_pair_file(path: str | Path) -> Report:
    """Read a pair file, finished or not, and report on it. Raises PairError only when it cannot be read at all."""
    path = Path(path)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise PairError(f"cannot read pair file {path}: {error.strerror or error}") from error
    document, lines = _parse(content)
    if isinstance(document, Finding):
        return Report(path, (), (document,))
    return _Check(path, document, lines).report()


def changes(path: Path, poll: float = 0.3, stop: threading.Event | None = None) -> Iterator[None]:
    """Once at first and then whenever the file is saved, until `stop` is set. poll: seconds between two looks.

    A file that is away for a moment, as while an editor puts a new one in its place, is waited for.
    """
    stop = stop or threading.Event()
    before: tuple[int, int, int] | None = None
    while not stop.is_set():
        try:
            file = path.stat()
        except OSError:
            pass
        else:
            now = file.st_mtime_ns, file.st_size, file.st_ino
            if now != before:
                before = now
                yield
        stop.wait(poll)


_Lines = dict[tuple[str | int, ...], int]
_DEEP = 4  # pairs, 3, context, 0


def _parse(content: bytes) -> tuple[dict[str, Any] | Finding, _Lines]:
    """The document and the line of each of its places, or what keeps it from being read."""
    try:
        text = content.decode("utf-8-sig")
        loader = PairLoader(text)
        node = loader.get_single_node()
        lines = dict(_places(node))
        document = loader.construct_document(node) if node else None
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        return Finding(line, "", "", "is not written in UTF-8; save the file as UTF-8"), {}
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        message = ", ".join(part for part in (error.context, error.problem) if part)
        line, column = (mark.line + 1, mark.column + 1) if mark else (1, 1)
        return Finding(line, "", "", f"column {column}: not valid YAML: {message}"), {}
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        column = error.position - text.rfind("\n", 0, error.position)
        return Finding(line, "", "", f"column {column}: a character that YAML does not allow"), {}
    except (yaml.YAMLError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        return Finding(1, "", "", f"not valid YAML: {error}"), {}  # see load_pairs
    if not isinstance(document, dict):
        return Finding(1, "", "", f"expected a mapping with the fields {', '.join(PairSet.model_fields)}"), {}
    return document, lines


def _places(node: Any, at: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], int]]:
    if len(at) >= _DEEP:
        return
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            here = (*at, key.value if isinstance(key, yaml.ScalarNode) else "")
            yield here, key.start_mark.line + 1
            yield from _places(value, here)
    elif isinstance(node, yaml.SequenceNode):
        for number, item in enumerate(node.value):
            yield (*at, number), item.start_mark.line + 1
            yield from _places(item, (*at, number))


_SAMPLE_PAIR = {
    "id": "x",
    "domain": "x",
    "use": "default",
    "context": [{"agent": "x"}],
    "positive": "a b",
    "negative": "b b",
    "facts": ["b"],
}


class _Check:
    """One look at a document that is a mapping. Findings are collected; nothing is raised."""

    def __init__(self, path: Path, document: dict[str, Any], lines: _Lines) -> None:
        self.path, self.document, self.lines = path, document, lines
        self.findings: list[Finding] = []
        self.seen: dict[tuple[str, str], tuple[str, int]] = {}  # (what, its words): which pair, which line

    def report(self) -> Report:
        self.head()
        pairs = self.document.get("pairs")
        states: list[PairState] = []
        if isinstance(pairs, list) and pairs:
            states = [self.pair(number, pair) for number, pair in enumerate(pairs)]
            self.shortcuts([number for number, state in enumerate(states) if state.done])
        elif pairs:
            self.add("must be a list, each entry beginning with '- id:'", "pairs")
        self.enough(states)
        if not self.findings:
            try:
                load_pairs(self.path)
            except PairError as error:  # nothing above knows of it
                self.add(str(error))
        self.findings.sort(key=lambda finding: finding.line)
        return Report(self.path, tuple(states), tuple(self.findings))

    def add(self, message: str, *at: str | int, pair: str = "", unfinished: bool = False) -> None:
        """A finding at a place of the document, ``("pairs", 3, "facts")``; its line is that of what is there."""
        line = next((self.lines[at[:n]] for n in range(len(at), 0, -1) if at[:n] in self.lines), 1)
        field = ".".join(map(str, at[2:] if pair else at))
        self.findings.append(Finding(line, pair, field, message, unfinished))

    def head(self) -> None:
        blank = [name for name in ("trait", "definition", "opposite", "pairs") if _blank(self.document.get(name))]
        for name in blank:
            self.add("is not written yet", name, unfinished=True)
        for at, message in _mistakes(PairSet, {**self.document, "pairs": [_SAMPLE_PAIR]}):
            if at[0] not in blank:
                self.add(message, *at)
        aliases = self.document.get("aliases")
        for name in (self.document.get("trait"), *(aliases if isinstance(aliases, list) else ())):
            owner = shipped_names().get(name) if isinstance(name, str) else None
            if owner and owner != self.document.get("trait") and name not in ALSO:
                what = "trait" if name == self.document.get("trait") else "aliases"
                self.add(f"{name!r} is a name of {owner!r}, a trait that ships; one basis could not hold both", what)

    def pair(self, number: int, pair: Any) -> PairState:
        at = ("pairs", number)
        before = len(self.findings)
        if not isinstance(pair, dict):
            self.add(
                f"must be a mapping with the fields {', '.join(Pair.model_fields)}", *at, pair=f"number {number + 1}"
            )
            return PairState(f"number {number + 1}", "", "", self.findings[-1].line, (0, 0), (), 1)
        name = repr(pair["id"]) if pair.get("id") else f"number {number + 1}"
        missing = tuple(side for side in SIDES if _blank(pair.get(side)))
        filled = {**pair, **{side: f"{side} {pair.get('facts')}" for side in missing}}
        for where, message in _mistakes(Pair, filled):
            if where:  # what concerns both replies is looked at below, as far as they are written
                self.add(message, *at, *where, pair=name)
        replies = {side: pair[side] for side in SIDES if side not in missing and isinstance(pair[side], str)}
        self.replies(at, name, pair, replies)
        self.unlike_the_others(at, name, pair, replies)
        mistakes = len(self.findings) - before
        for side in missing:
            self.add("is not written yet", *at, side, pair=name, unfinished=True)
        context = pair.get("context")
        late = isinstance(context, list) and any(isinstance(turn, dict) and "customer" in turn for turn in context)
        lengths = [len(words(replies.get(side, ""))) for side in SIDES]
        return PairState(
            str(pair.get("id") or f"number {number + 1}"),
            str(pair.get("use", "")),
            "late" if late else "first",
            self.lines.get(at, 1),
            (lengths[0], lengths[1]),
            missing,
            mistakes,
        )

    def replies(self, at: tuple[str | int, ...], name: str, pair: dict[str, Any], replies: dict[str, str]) -> None:
        """Facts, and length."""
        facts = pair.get("facts")
        for side, text in replies.items():
            for fact in facts if isinstance(facts, list) else ():
                if isinstance(fact, str) and fold(fact) not in fold(text):
                    self.add(f"does not contain the fact {fact!r}; both sides must keep it", *at, side, pair=name)
        if len(replies) == 2 and self.document.get("length_free") is not True:
            short, long = sorted(replies, key=lambda side: len(words(replies[side])))
            counts = len(words(replies[short])), len(words(replies[long]))
            if counts[1] > LENGTH_RATIO * counts[0]:
                ratio = f"{counts[1] / counts[0]:.1f} times" if counts[0] else "more than"
                self.add(
                    f"has {counts[1]} words, {ratio} the {counts[0]} of {short!r}; at most {LENGTH_RATIO} times are "
                    "allowed, or length would be the trait (length_free: true, if it is)",
                    *at,
                    long,
                    pair=name,
                )

    def unlike_the_others(
        self, at: tuple[str | int, ...], name: str, pair: dict[str, Any], replies: dict[str, str]
    ) -> None:
        """Ids, contexts and replies that are there already."""
        texts: list[tuple[str, str, str]] = [("reply", side, text) for side, text in replies.items()]
        if isinstance(pair.get("id"), str):
            texts.append(("id", "id", pair["id"]))
        context = pair.get("context")
        if isinstance(context, list) and all(isinstance(turn, dict) for turn in context):
            told = " ".join(str(text) for turn in context for text in turn.values())
            texts.append(("context", "context", told))
        for what, field, text in texts:
            key = what, text if what == "id" else " ".join(words(text.casefold()))
            if key[1] and (before := self.seen.get(key)):
                self.add(f"is the same {what} as that of pair {before[0]} in line {before[1]}", *at, field, pair=name)
            self.seen.setdefault(key, (name, self.lines.get((*at, field), 1)))

    def shortcuts(self, done: Sequence[int]) -> None:
        """Words that tell the sides apart, once there are pairs enough to say so."""
        if len(done) < SHORTCUTS_FROM:
            return
        pairs = {number: Pair.model_validate(self.document["pairs"][number]) for number in done}
        markers = self.document.get("markers")
        own = {str(marker).casefold() for marker in markers} if isinstance(markers, list) else set()
        for word, gap in lexical_shortcuts(list(pairs.values())).items():
            if word in own:
                continue
            side, other = SIDES if gap > 0 else SIDES[::-1]
            where = [number for number, pair in pairs.items() if lexical_shortcuts([pair]).get(word, 0) * gap > 0]
            lines = ", ".join(str(self.lines["pairs", number, side]) for number in where)
            self.add(
                f"{word!r} is in the {side} reply and not in the {other} one in {len(where)} of {len(pairs)} pairs "
                f"(lines {lines}) and tells the sides apart by itself; write it on both sides, or less often; list it "
                "under 'markers' if it is the trait",
                *("pairs", where[0], side),
                pair=repr(pairs[where[0]].id),
            )

    def enough(self, states: Sequence[PairState]) -> None:
        for use, enough in ENOUGH.items():
            marked = [state for state in states if state.use == use]
            done = sum(state.done for state in marked)
            if done < enough:
                more = f"; only {len(marked)} are marked 'use: {use}'" if len(marked) < enough else ""
                self.add(
                    f"{done} of {enough} {use} pairs are done{more}; {_WHY[use]}",
                    "pairs",
                    unfinished=len(marked) >= enough,
                )


def _mistakes(model: type[Pair] | type[PairSet], document: dict[str, Any]) -> list[tuple[tuple[str | int, ...], str]]:
    """What pydantic has against a document: places and messages."""
    try:
        model.model_validate(document)
    except ValidationError as error:
        return [(detail["loc"], detail["msg"].removeprefix("Value error, ")) for detail in error.errors()]
    return []


def _blank(value: Any) -> bool:
    return value is None or (isinstance(value, str) and not value.strip()) or value == []


@cache
def shipped_names() -> dict[str, str]:
    """Every name and alias of a trait or emotion that ships, and whose it is. Reads only the heads of the files."""
    names: dict[str, str] = {}
    for trait in (*known_emotions(), *known_traits()):
        if file := shipped_file(trait):
            head = yaml.safe_load(file.read_text(encoding="utf-8").partition("\npairs:")[0])
            names |= dict.fromkeys((trait, *head.get("aliases", ())), trait)
    return names
