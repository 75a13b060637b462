"""Identifiers a customer could not know: order numbers, booking codes, e-mail addresses, phone and card numbers.

A rule on the text alone. A token is an identifier by its shape; years, dates, times, prices, quantities, round numbers
and words with a small number (``COVID-19``) are taken out first. Names and plain words are no identifiers, so an
invented name passes, and so does an invented flight number of three digits.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable

_UNITS = (
    r"(?:dollars?|usd|pounds?|gbp|quid|euros?|eur|cents?|pence|rupees?|yen|bucks|points?|miles|credits?|kilomet\w+|kms?"
    r"|meters?|metres?|feet|foot|ft|inch(?:es)?|cm|mm|kgs?|grams?|lbs?|ounces?|oz|ml|lit(?:er|re)s?|gallons?|hours?"
    r"|hrs?|minutes?|mins?|seconds?|secs?|days?|weeks?|months?|years?|times|people|persons|customers|words|steps|pages"
    r"|units|items|pieces|copies|calls|texts|messages|watts?|kwh?|volts?|mah|[mgtk]b|[mg]bps|[mg]hz|hz|rpm|mc?g|iu"
    r"|calories|kcal|percent|degrees?|sq|square|thousand|million|st|nd|rd|th|am|pm)"
)
_YEAR = r"(?:19|20)\d\d"
_NO_IDENTIFIER = re.compile(
    rf"""
    [$£€¥₹]\s?\d[\d.,]*(?:-[$£€¥₹]?\d[\d.,]*)?                      # $1349.99
  | (?<![\w#@.,-])(?:
        \d[\d.,]*\s?-?{_UNITS}\b | \d[\d.,]*\s?%                    # 5000 miles
      | \d[\d.,]*[a-z]\b                                            # 5000m, 1080p, 1990s
      | \d{{1,4}}x\d{{1,4}}\b                                       # 1080x1920
      | \d{{1,3}}(?:,\d{{3}})+(?:\.\d+)?(?!\w)                      # 1,250
      | \d+[.,]\d{{1,2}}(?![\w.,]?\w)                               # 64.50
      | \d{{1,2}}:\d\d(?::\d\d)?(?!\d)                              # 17:40
      | (?:\d{{4}}([-/.])\d{{1,2}}\1\d{{1,2}} | \d{{1,2}}([-/.])\d{{1,2}}\2(?:\d{{4}}|\d\d))(?![\w-])  # 2024-05-03
      | (?:[a-z]+-)?{_YEAR}(?:s|-(?:{_YEAR}|\d\d))?(?![\w-])        # 2024, mid-2023, 2023-24
      | [1-9]\d?0{{2,}}(?:-[1-9]\d?0{{2,}})?(?![\w-])               # 1500, 20000
    )
  | \b(?:paid|costs?|charged|worth|spent|owe|than|nearly|almost|roughly|approximately
      | (?:price|total|amount)\ (?:is|was|of))\ (?:me\ )?\d[\d.,]*    # paid 1349
  | \b(?:at|by|before|after|until|till|from)\ (?:[01]\d|2[0-3])[0-5]\d(?![\w-])  # by 1730
    """,
    re.VERBOSE | re.IGNORECASE | re.ASCII,
)
_EMAIL = re.compile(r"(?<![\w.+-])[\w.+-]{1,64}@[\w-]+(?:\.[\w-]+)*", re.ASCII)
_PHONE = re.compile(r"(?<!\w)\+?\(?\d{2,}\)?(?:[ .-]\(?\d{2,}\)?)+(?!\w)", re.ASCII)
_TOKEN = re.compile(r"#?[A-Za-z0-9]+(?:[-_][A-Za-z0-9]+)*")
_WORD_AND_NUMBER = re.compile(r"[A-Za-z]{3,}-?\d{1,2}")
_DASHES = dict.fromkeys(map(ord, "‐‑‒–—−"), "-")


def unknown_identifiers(text: str, known: str) -> list[str]:
    """The identifiers in `text` that do not occur in `known`, which is ``flat_text`` of all that was said before.

    Compared without case, spaces, dashes, dots and the like: ``#W-100`` is known where ``w100`` is.
    """
    return [found for found in _identifiers(text) if flat_text([found]).replace(" ", "") not in known]


def flat_text(texts: Iterable[str]) -> str:
    """Letters and digits of texts, in lower case; a space before a digit is dropped (``LB 60931`` is ``lb60931``)."""
    flat = re.sub(r"[^\w\s]|_", "", _plain(" ".join(texts)).casefold())
    return re.sub(r" (?=\d)", "", " ".join(flat.split()))


def _plain(text: str) -> str:
    return unicodedata.normalize("NFKC", text).translate(_DASHES)


def _identifiers(text: str) -> list[str]:
    text = _plain(text)
    if not re.search(r"[\d@]", text):
        return []
    found: list[str] = []

    def take(match: re.Match[str]) -> str:
        found.append(match.group())
        return " ; "

    text = _NO_IDENTIFIER.sub(" ; ", _EMAIL.sub(take, text))
    text = _PHONE.sub(lambda match: take(match) if _digits(match.group()) >= 7 else match.group(), text)
    return found + [token for token in _TOKEN.findall(text) if _is_identifier(token)]


def _is_identifier(token: str) -> bool:
    parts = re.split(r"[-_]", token.removeprefix("#"))
    core = "".join(parts)
    digits = _digits(core)
    if digits == len(core):  # a number; 10-15 is a range, 77-1940 is not
        return max(map(len, parts)) >= (3 if token.startswith("#") else 4) or digits >= 7
    if digits == 0 or _WORD_AND_NUMBER.fullmatch(token):
        return False
    if token.startswith("#"):
        return len(core) >= 3
    if "_" in token:  # sara_doe_496
        return digits >= 2
    return digits >= 4 or (len(core) >= 5 and core == core.upper())


def _digits(text: str) -> int:
    return sum(map(str.isdigit, text))
