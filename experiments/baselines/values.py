"""Names, ids, dates and amounts: found in texts, drawn anew, and kept apart from those that evaluations are made of."""

from __future__ import annotations

import calendar
import random
import re
from collections.abc import Callable, Mapping
from datetime import date, timedelta
from functools import cache, partial
from importlib import resources
from pathlib import Path

_MONTHS = "|".join(calendar.month_name[1:])
_DATE = re.compile(rf"\b({_MONTHS}) ([0-9]{{1,2}})\b(?!,? (?:19|20)[0-9]{{2}})")
_DAY_FIRST = re.compile(rf"\b([0-9]{{1,2}}) ({_MONTHS})\b")
_AMOUNT = re.compile(r"\$[0-9]+(?:\.[0-9]{2})?(?![0-9,]*[0-9])")
_EMAIL = re.compile(r"\b[\w.]+@[\w.]+\.\w+")
# Letters with digits, or at least four digits; a year is no id.
_ID = re.compile(
    r"(?<![\w$@.:-])(?=[A-Z0-9-]*[0-9])(?!(?:19|20)[0-9]{2}\b)"
    r"(?:(?=[A-Z0-9-]*[A-Z])[A-Z0-9]+(?:-[A-Z0-9]+)*|[0-9]{4,}|[0-9]{2,}-[0-9]+)(?![\w@]|-[A-Za-z0-9])"
)
_SHORTEST_ID = 4  # a seat, such as 14C, is shorter
_PERSON = re.compile(r"\b(?:You are|named) ([A-Z]\w+) ([A-Z]\w+)")
_DOCTOR = re.compile(r"\bDr\. ([A-Z]\w+)")
# What says a date without naming its month: then dates cannot be moved.
_DAY_ALONE = re.compile(
    r"\b[0-9]{1,2}(?:st|nd|rd|th)\b|\bthe (?:first|second|third|fourth|fifth|sixth|seventh|eighth|ninth|tenth|eleventh"
    r"|twelfth|\w+teenth|twentieth|thirtieth|twenty-\w+|thirty-first)\b",
    re.IGNORECASE,
)
_YEAR = 2027  # not a leap year; only the order of days is used


def values(text: str) -> set[str]:
    """Ids, numbers of three characters or more, amounts and dates of a text, dates as ``May 3``."""
    found = {f"{month} {int(day)}" for month, day in _DATE.findall(text)}
    found |= {f"{month} {int(day)}" for day, month in _DAY_FIRST.findall(text)}
    found |= set(_EMAIL.findall(text))
    tokens = (token.strip(".,:;!?()\"'$").removesuffix("'s") for token in re.split(r"[\s/]+", text))
    found |= set(re.findall(r"[0-9]{3,}", text))  # of HM-9356, the number too
    return found | {token for token in tokens if len(token) > 2 and any(c.isdigit() for c in token)}


@cache
def taken() -> frozenset[str]:
    """Values of every evaluation context and every contrastive pair that this checkout has."""
    data = Path(str(resources.files("traitbasis.contrastive_pairs")))
    files = [*sorted(data.glob("*.yaml")), *sorted(data.glob("contexts/*.yaml"))]
    files.append(Path(__file__).parents[1] / "scenarios.yaml")
    return frozenset(set().union(*(values(file.read_text(encoding="utf-8")) for file in files)))


def draw_shape(shape: str, rng: random.Random) -> str:
    """A value of a shape: ``#`` becomes a digit, the first of them not 0, ``@`` a letter that looks like no digit."""
    drawn, first = "", True
    for mark in shape:
        if mark == "#":
            drawn, first = drawn + rng.choice("123456789" if first else "0123456789"), False
        else:
            drawn += rng.choice("ABCDEFGHJKLMNPQRSTUVWXYZ") if mark == "@" else mark
    return drawn


def draw_amount(rng: random.Random) -> str:
    return f"${rng.randint(6, 249)}.{rng.randint(1, 99):02}"


def draw_date(rng: random.Random) -> str:
    return _written(date(_YEAR, 1, 1) + timedelta(days=rng.randrange(365)))


def fresh(draw: Callable[[], str], tries: int = 200) -> str:
    """A drawn value that nothing of an evaluation has. Raises ValueError when there seems to be none."""
    for _ in range(tries):
        value = draw()
        if not values(value) & taken():
            return value
    raise ValueError(f"every value that is drawn, such as {value!r}, is one of an evaluation")


class Slots:
    """The parts of some texts that stand for others like them, replaced in all of the texts alike.

    Persons, ids, emails; dates, all moved by the same number of days; an amount, where it is the only one. Dates and
    amounts stay where something is said about them that would no longer be true: a day without its month, a second
    amount.
    """

    def __init__(self, texts: list[str]) -> None:
        whole = "\n".join(texts)
        self.persons = list(dict.fromkeys(_PERSON.findall(whole)))
        self.doctors = list(dict.fromkeys(_DOCTOR.findall(whole)))
        self.emails = list(dict.fromkeys(_EMAIL.findall(whole)))
        self.ids = [found for found in dict.fromkeys(_ID.findall(whole)) if len(found) >= _SHORTEST_ID]
        dates = list(dict.fromkeys(_DATE.findall(whole)))
        months = {month for month in re.findall(rf"\b({_MONTHS})\b(?! [0-9])", whole) if month != "May"}
        may = re.search(r"\b(?:my|the|your|in|last|this|since|by|back in|Your|My|The) May\b(?! [0-9])", whole)
        self.dates = [] if months or may or _DAY_ALONE.search(whole) else dates
        amounts = list(dict.fromkeys(_AMOUNT.findall(whole)))
        others = re.search(r"\$[0-9,.]*[0-9]", "".join(_AMOUNT.split(whole)))
        self.amounts = amounts if len(amounts) == 1 and not others else []

    def __bool__(self) -> bool:
        return any((self.persons, self.doctors, self.emails, self.ids, self.dates, self.amounts))

    def draw(self, names: Mapping[str, list[str]], rng: random.Random) -> dict[str, str]:
        """Replacements by what they replace. names: ``first`` and ``last`` names to choose from."""
        new: dict[str, str] = {}
        for first, last in self.persons:
            new |= {first: rng.choice(names["first"]), last: rng.choice(names["last"])}
        new |= {name: rng.choice(names["last"]) for name in self.doctors if name not in new}
        for email in self.emails:
            address = f"{rng.choice(names['first'])}.{rng.choice(names['last'])}".lower()
            new[email] = f"{address}@{email.partition('@')[2]}"
        new |= {found: fresh(partial(draw_shape, _shape(found), rng)) for found in self.ids}
        new |= {amount: fresh(lambda: draw_amount(rng)) for amount in self.amounts}
        if self.dates:
            days = [_day(month, day) for month, day in self.dates]
            first_day, last_day = min(days), max(days)
            span = (last_day - first_day).days
            for _ in range(200):
                moved = rng.randrange(365 - span) - (first_day - date(_YEAR, 1, 1)).days
                dates = [_written(day + timedelta(days=moved)) for day in days]
                if not set(dates) & taken():
                    break
            else:
                raise ValueError(f"the dates {self.dates} cannot be moved to where no evaluation has one")
            new |= {f"{month} {day}": drawn for (month, day), drawn in zip(self.dates, dates, strict=True)}
        if len(set(new.values())) < len(new):  # two that were drawn alike
            return self.draw(names, rng)
        return new


def replace_all(text: str, new: Mapping[str, str]) -> str:
    """`text` with every value replaced at once, longest first, whole words only."""
    if not new:
        return text
    keys = "|".join(re.escape(key) for key in sorted(new, key=len, reverse=True))
    return re.sub(rf"(?<![\w@])(?:{keys})(?![\w@]|,[0-9]|\.[0-9])", lambda match: new[match[0]], text)


def _shape(found: str) -> str:
    return "".join("#" if c.isdigit() else "@" if c.isalpha() else c for c in found)


def _day(month: str, day: str) -> date:
    return date(_YEAR, list(calendar.month_name).index(month), int(day))


def _written(day: date) -> str:
    return f"{calendar.month_name[day.month]} {day.day}"
