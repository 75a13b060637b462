"""Benchmarks whose user turns are fixed texts, as records that can be given other turns: JSON lines of BFCL, of OpenAI
messages, or lines of plain text. Whatever is no user turn stays as it is.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from traitbasis.errors import EvaluationError

Format = Literal["bfcl", "messages", "text"]
FORMATS = get_args(Format)


@dataclass(frozen=True)
class Record:
    """One record of a benchmark.

    data: as it was read. form: ``bfcl`` is ``{"question": [[message, ...], ...]}`` beside any other fields,
    ``messages`` is ``{"messages": [message, ...]}`` or the list alone, ``text`` is ``{"text": ...}`` or a line.
    """

    data: Any
    form: Format
    number: int

    @property
    def id(self) -> str:
        """Its own id, else its place in the file."""
        found = self.data.get("id") if isinstance(self.data, dict) else None
        return str(found) if isinstance(found, str | int) else str(self.number)

    @property
    def digest(self) -> str:
        """Of what it holds, to know it again."""
        return hashlib.sha256(json.dumps(self.data, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def turns(self) -> list[str]:
        """The texts of the user's turns, in order; content that is no text counts as no turn."""
        return [message["content"] for message in _messages(self.data, self.form) if _is_turn(message)]

    @property
    def replies(self) -> list[str]:
        """For each user turn what the record lets the agent say between the turn before and this one."""
        found, said = [], ""
        for message in _messages(self.data, self.form):
            if _is_turn(message):
                found.append(said)
                said = ""
            elif message.get("role") == "assistant" and isinstance(message.get("content"), str):
                said = message["content"]
        return found

    def rewritten(self, turns: Sequence[str], note: Mapping[str, Any]) -> dict[str, Any]:
        """The record with other user turns, and a `note` in the field ``traitbasis``."""
        data = copy.deepcopy(self.data)
        if self.form == "text":
            data = {**data} if isinstance(data, dict) else {}
            return {**data, "text": turns[0] if turns else self.data, "traitbasis": note}
        texts = iter(turns)
        for message in _messages(data, self.form):
            if _is_turn(message):
                message["content"] = next(texts)
        return {**(data if isinstance(data, dict) else {"messages": data}), "traitbasis": note}


def read_records(path: str | Path, form: Format | None = None) -> list[Record]:
    """The records of a file. form: by default what the first one looks like.

    A file that begins with ``[`` may be one JSON list. Raises EvaluationError naming the file and the line that cannot
    be read, or when nothing is in it.
    """
    path = Path(path)
    if not path.is_file():
        raise EvaluationError(f"no benchmark at {path}")
    try:
        text = path.read_text("utf-8-sig")
    except UnicodeDecodeError as error:
        raise EvaluationError(f"{path} is no text in UTF-8: {error}") from error
    if form == "text" or (form is None and text.lstrip()[:1] not in ("{", "[")):
        records: list[Any] = [line for line in text.split("\n") if line.strip()]
        form = "text"
    else:
        records = _json(path, text)
        form = form or (_form(path, records) if records else "text")
    if not records:
        raise EvaluationError(f"{path} is empty; a benchmark has a record a line")
    found = [Record(data, form, number) for number, data in enumerate(records)]
    for record in found:
        try:
            record.turns  # noqa: B018  (reads every message)
        except (LookupError, TypeError, AttributeError, ValueError) as error:
            raise EvaluationError(
                f"{path}, record {record.number + 1}: no record of format {form} ({error})"
            ) from error
    return found


def _json(path: Path, text: str) -> list[Any]:
    records, lines = [], text.split("\n")
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                records.append(json.loads(line))
            except ValueError as error:
                whole = _list(text) if number == 1 else None
                if whole is not None:
                    return whole
                raise EvaluationError(f"{path}, line {number}: no JSON ({error})") from error
    if len(records) == 1 and isinstance(records[0], list) and not _is_talk(records[0]):
        return records[0]
    return records


def _list(text: str) -> list[Any] | None:
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return found if isinstance(found, list) else [found]


def _form(path: Path, records: Sequence[Any]) -> Format:
    first = records[0] if records else {}
    if isinstance(first, dict) and "question" in first:
        return "bfcl"
    if _is_talk(first) or (isinstance(first, dict) and "messages" in first):
        return "messages"
    if isinstance(first, dict) and "text" in first:
        return "text"
    keys = ", ".join(first) if isinstance(first, dict) else type(first).__name__
    raise EvaluationError(
        f"{path} is of no known format: its first record has {keys or 'nothing'}; known are bfcl (question), messages "
        "(messages) and text (text, or plain lines)"
    )


def _is_talk(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict) and "role" in value[0]


def _messages(data: Any, form: Format) -> Iterator[dict[str, Any]]:
    if form == "text":
        text = data["text"] if isinstance(data, dict) else data
        yield {"role": "user", "content": text}
        return
    turns = data["question"] if form == "bfcl" else [data["messages"] if isinstance(data, dict) else data]
    for messages in turns:
        for message in messages:
            if not isinstance(message, dict):
                raise TypeError(f"{message!r:.80} is no message")
            yield message


def _is_turn(message: Mapping[str, Any]) -> bool:
    return message.get("role") == "user" and isinstance(message.get("content"), str)
