"""The log: one line a request, as JSON or as text, without what was said in it unless that is asked for."""

from __future__ import annotations

import json
import logging
import re
import sys
from collections import Counter
from contextvars import ContextVar
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from typing import Any, Literal, TextIO

LogFormat = Literal["json", "text"]

_LONGEST = 256  # of what a client names: a model, a path


@dataclass
class RequestRecord:
    """What is known of one request; all of it is in its line of the log, except what is empty.

    spec, dose: of its first turn. turns, tokens, tries, rejected: of all of them. first_token_seconds: until the first
    text could be sent, which with guards is that of a whole turn. asked, replies: only with ``--log-text``.
    """

    request_id: str
    method: str
    path: str
    status: int | None = None
    seconds: float = 0.0
    model: str | None = None
    spec: str | None = None
    dose: float | None = None
    turns: int = 0
    tokens_in: int = 0
    tokens_out: int = 0
    first_token_seconds: float | None = None
    tries: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    failed_guards: list[str] = field(default_factory=list)
    disconnected: bool = False
    error: str | None = None
    asked: Any = None
    replies: list[str] = field(default_factory=list)

    def line(self) -> dict[str, Any]:
        """The fields that say something."""
        found = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        for name in ("path", "model"):
            found[name] = found[name] and found[name][:_LONGEST]
        for name in ("seconds", "first_token_seconds"):
            found[name] = found[name] and round(found[name], 4)
        return {name: value for name, value in found.items() if value or (name == "dose" and value == 0)}


# The request that is being served in this context; threads and tasks started for it inherit it.
current: ContextVar[RequestRecord | None] = ContextVar("current", default=None)


def configure(style: LogFormat, stream: TextIO | None = None) -> None:
    """Send every log of this process to `stream` (standard output) in one form."""
    handler = logging.StreamHandler(stream or sys.stdout)
    handler.setFormatter(JsonLines() if style == "json" else TextLines())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    for name in ("traitbasis", "uvicorn"):
        logging.getLogger(name).setLevel(logging.INFO)


class JsonLines(logging.Formatter):
    """One JSON object a line. Escaped to ASCII, so that nothing a client sends can break a line or the encoding."""

    def format(self, record: logging.LogRecord) -> str:
        return json.dumps(_line(record, self), default=str)


class TextLines(logging.Formatter):
    """Time, level, logger and message, then name=value; values with anything unusual are JSON."""

    def format(self, record: logging.LogRecord) -> str:
        line = _line(record, self)
        head = [line.pop(name) for name in ("time", "level", "logger", "message")]
        exception = line.pop("exception", None)
        text = " ".join([*head, *(f"{name}={_word(value)}" for name, value in line.items())])
        return f"{text}\n{exception}" if exception else text


def _line(record: logging.LogRecord, formatter: logging.Formatter) -> dict[str, Any]:
    request = current.get()
    line: dict[str, Any] = {
        "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
        "level": record.levelname.casefold(),
        "logger": record.name,
        "message": record.getMessage(),
        **({"request_id": request.request_id} if request else {}),
        **getattr(record, "fields", {}),
    }
    if record.exc_info:
        line["exception"] = formatter.formatException(record.exc_info)
    return line


def _word(value: Any) -> str:
    plain = isinstance(value, str) and re.fullmatch(r"[\w./@+:=-]+", value, re.ASCII)
    return str(value) if plain else json.dumps(value, default=str)
