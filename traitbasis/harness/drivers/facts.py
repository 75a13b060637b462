"""What a customer has to say: values in the words of an instruction, and whether they were said, in any form.

Standard library only. The folding is that of ``traitbasis.metrics.identifiers``, made to know dates and small numbers.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import date
from typing import Any

_LABELS = {
    "zip": "zip code",
    "dob": "date of birth",
    "address1": "street address",
    "address2": "second address line",
    "cabin": "cabin class",
    "origin": "departure airport",
    "destination": "destination airport",
    "flight_type": "type of trip",
    "reason": "reason",
    "payment_id": "payment method",
    "payment_method_id": "payment method",
}
_MONTHS = "january february march april may june july august september october november december".split()  # noqa: SIM905
_NUMBERS = ("", "", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")


@dataclass(frozen=True)
class Fact:
    """What the customer has to say. label: what it is asked for as. forms: folded; any of them will do."""

    argument: str
    label: str
    value: str
    forms: tuple[str, ...]

    def told(self, heard: str) -> bool:
        return any(holds(heard, form) for form in self.forms)


def facts_of(argument: str, value: Any, instruction: str) -> list[Fact]:
    """The argument as a fact, if the instruction holds it."""
    forms = forms_of(value)
    label = _LABELS.get(argument) or words(re.sub(r"_ids?$", "_number", argument))
    found = Fact(argument, label, str(value), forms)
    return [found] if forms and found.told(instruction) else []


def leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Names and values of nested arguments; the items of a list have the list's name."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from leaves(inner, key)
    elif isinstance(value, list):
        for inner in value:
            yield from leaves(inner, name)
    else:
        yield name, value


def forms_of(value: Any) -> tuple[str, ...]:
    """How a value may be said, folded. None for what cannot be told from chance: yes, no, 0, 1, two letters."""
    if isinstance(value, bool) or value is None or value in (0, 1):
        return ()
    if isinstance(value, int | float):
        if value != int(value):
            return (fold(f"{value:.2f}"),)
        return (f"{int(value)}", *([_NUMBERS[int(value)]] if 1 < value < len(_NUMBERS) else []))
    if re.fullmatch(r"\d{4}-\d{2}-\d{2}", value):
        with suppress(ValueError):
            return _date_forms(date.fromisoformat(value))
    folded = fold(value)
    return (folded,) if len(folded) > 2 and folded != "yes" else ()


def _date_forms(value: date) -> tuple[str, ...]:
    year, month, day = value.year, value.month, value.day
    ordinal = {1: "st", 2: "nd", 3: "rd"}.get(day % 10 if day not in (11, 12, 13) else 0, "th")
    names = (_MONTHS[month - 1], _MONTHS[month - 1][:3], *(["sept"] if month == 9 else []))
    days = (f"{day}", f"{day:02}", f"{day}{ordinal}")
    spoken = [form for name in names for d in days for form in (f"{name} {d}", f"{d} {name}", f"{d} of {name}")]
    numbers = [f"{month} {day}", f"{month:02} {day:02}", f"{year} {month:02} {day:02}", f"{year} {month} {day}"]
    return tuple(dict.fromkeys((*spoken, *numbers, f"{names[0]} the {day}{ordinal}")))


def holds(text: str, form: str) -> bool:
    """Whether folded words stand in a text; what has digits also with other gaps: ``w2378156`` in "W 2378 156"."""
    folded = fold(text)
    if f" {form} " in f" {folded} ":
        return True
    squeezed = form.replace(" ", "")
    if len(squeezed) < 5 or not re.search(r"\d", squeezed):
        return False
    return re.search(rf"(?<!\d){squeezed}(?!\d)", folded.replace(" ", "")) is not None


def fold(text: str) -> str:
    """Words of letters and digits, in lower case: ``#W-100`` is ``w 100``, ``1,234`` is ``1234``."""
    plain = unicodedata.normalize("NFKC", str(text)).casefold()
    plain = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", plain)
    return " ".join(re.findall(r"[^\W_]+", plain))


def words(name: str) -> str:
    """An argument's or a tool's name in plain words."""
    return name.replace("_", " ")
