"""What of an agent's reply claims something that one could look up: a number, a time, a named place, an event.

Rules on the text alone; whether a claim is grounded is ``grounding.py``'s question. Comfort, general advice and guesses
that are asked as questions claim nothing (TEA-Bench, arXiv 2601.18700, 3.4). What stands in advice, in a question or in
an ``if`` is found all the same but marked as *weak*: it restates something where it can be traced, and is no claim
where it cannot. "Walk for ten minutes" needs no source; "the park is ten minutes away" does.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from importlib.resources import files
from itertools import pairwise
from typing import Any

import yaml

from traitbasis.metrics.entities import entities

_WORDS: Mapping[str, Any] = yaml.safe_load(
    files("traitbasis.reactive").joinpath("data/factual_words.yaml").read_text(encoding="utf-8")
)
KINDS = (
    "name",  # of a person, an organisation, a place
    "event",  # an exam, a wedding, a cancelled train
    "place",  # one that has no name: "a café two blocks from you"
    "person",  # one of the customer's own: "your sister"
    "work",  # a song, a post, an article, by its title
    "time",  # of the day
    "date",  # calendar dates, months, weekdays
    "money",
    "identifier",  # order and phone numbers, addresses, "Hall B", "r/insomnia"
    "number",  # with or without a unit
    "condition",  # weather
)


@dataclass(frozen=True)
class Found:
    """One unit. start, end: its place in the text. key: what is compared, by kind. weak: only counts when traced.

    Keys: a number is (value, unit or None, digits are rounded), a time (candidates in minutes of the day, tolerance), a
    date (year, month, day, weekday; None where not said); an event, place, person or condition is the words that say
    the same; all others are the words as written.
    """

    kind: str
    text: str
    start: int
    end: int
    key: tuple[object, ...]
    weak: bool = False


def factual_units(text: str, *, every: bool = False) -> list[Found]:
    """The units of a text in order; none lies within another. every: small numbers that count nothing, too."""
    text = unicodedata.normalize("NFC", text).translate(_STRAIGHT)
    taken: list[tuple[int, int]] = []
    found: list[Found] = []
    for unit in _candidates(text, every):
        if not any(unit.start < end and start < unit.end for start, end in taken):
            taken.append((unit.start, unit.end))
            if unit.kind:  # what is quoted speech only takes its place
                found.append(unit)
    clauses = list(_clauses(text))
    return sorted(
        (checked for unit in found if (checked := _in_its_clause(unit, clauses, text))), key=lambda unit: unit.start
    )


def sentences(text: str) -> list[str]:
    """A text cut after its sentences' ends; abbreviations and decimals end none."""
    return [text[start:end] for start, end in _sentences(text) if text[start:end].strip()]


def folded(text: str) -> str:
    """In lower case, without accents."""
    return "".join(c for c in unicodedata.normalize("NFKD", text.casefold()) if not unicodedata.combining(c))


def words_of(text: str) -> list[str]:
    """Words in lower case, without accents and without the ``'s`` of a genitive."""
    return [word.removesuffix("'s") for word in re.findall(r"\w+(?:'\w+)?", folded(text.translate(_STRAIGHT)))]


def name_words(text: str) -> list[str]:
    """The words by which a name is known: without titles and without what many places are called."""
    return [word for word in words_of(text) if word not in _GENERIC]


# --- clauses and how they speak ---------------------------------------------------------------------------------------

_STRAIGHT = str.maketrans("‘’‚“”„‐‑‒–−\u00a0\u202f", "'''\"\"\"-----  ")
_END = re.compile(r"(?<!\bDr)(?<!\bMr)(?<!\bMrs)(?<!\bMs)(?<!\bSt)(?<!\b[ap]\.m)(?<!\b[A-Z])[.!?]+[\"')]*(?=\s|\Z)|\n+")
_CLAUSE = re.compile(
    r"[;:,](?=\s)|\s(?=(?:because|since|so|which|where|while|but|although|if|when|whether)\b)|(?<=\w)\s(?=and\s)"
    r"|(?<=from)\s(?=the\b)|\s-+\s",
    re.IGNORECASE,
)
_LEAD = (
    r"(?:[\s\"'*•-]*(?:\d+[.)]\s+)?"
    r"(?:(?:and|or|but|then|so|please|first|maybe|perhaps|also|next|just|instead|today|tonight|tomorrow)\b,?\s*)*)"
)
# What tells the customer to do something goes on until a clause claims something; what holds in general is for once.
_ADVICE = re.compile(
    rf"{_LEAD}(?:{'|'.join(_WORDS['advice_verbs'].split())})\b(?!\s+(?:\w+\s+)?(?:is|was|has)\b)"
    r"|.*\b(?:you|we|one|they|each|both)\s+(?:could|can|might|may|should|would|don't have to)\b"
    r"|\s*(?:maybe|perhaps)\b|.*\b(?:how|what) about\b|.*\bI(?:'d| would) (?:suggest|like you to|start)\b",
    re.IGNORECASE | re.DOTALL,
)
_GENERAL = re.compile(
    r"\b(?:could|can|may|might|would|will)\s+(?:\w+\s+)?"
    r"(?:help|ease|calm|soothe|reduce|lower|lift|improve|clear|make|feel|do you good)\b"
    r"|\b(?:could|can|might|would)\s+be\s+(?:a|an|enough|worth|good|nice|the)\b"
    r"|\b(?:try|trying|worth|helps?|even)\s+\w+ing\b|\b(?:many|most|some|other) people\b"
    r"|\b(?:often|usually|sometimes|typically|generally|tends? to)\b",
    re.IGNORECASE,
)
# What holds of the world even where it stands in advice: "go to the library, it closes at six".
_CLAIM = re.compile(
    r"\b(?:(?:it|they|he|she|there|that|this|which|who|tickets?|you(?:'ve)?|your \w+|the \w+)"
    r"(?:'s|'re|'ll)?\s+(?:still\s+|only\s+|also\s+)?(?:is|are|was|were|will|has|have|had"
    r"|earn(?:ed)?|paid|spent|owe|runs?"
    r"|opens?|closes?|starts?"
    r"|begins?|costs?|leaves?|arrives?|takes|lasts?|stays?|gives?|serves?|wrote|said|says|live)\b"
    r"|(?:it|there|he|she)'s|'ve had|you earn|leaves|stays open|open until"
    r"|(?:starts?|arrives?|begins?|ends?|departs?|opens?) at"
    r"|closes? at|says?|away\b|from you\b)",
    re.IGNORECASE,
)
_SUGGESTS = re.compile(
    r"\b(?:have you (?:ever )?(?:tried|heard|seen|been|thought|considered)"
    r"|did you (?:know|see|hear|try)|how about|what about"
    r"|why not"
    r"|why don't you|would you like|shall we|do you know|want (?:me )?to|could you (?:go|try|visit|call|make|get))\b",
    re.IGNORECASE,
)
_ASIDE = re.compile(r"(?:which|where|who|because|since|while)\b", re.IGNORECASE)
_IF = re.compile(rf"{_LEAD}(?:if|whether|when|whenever|in case)\b", re.IGNORECASE)


@dataclass(frozen=True)
class _Clause:
    start: int
    end: int
    text: str
    advice: bool
    guess: bool  # a question or a condition
    suggests: bool  # a question that names something: "have you tried"


def _sentences(text: str) -> Iterator[tuple[int, int]]:
    ends = [0, *(match.end() for match in _END.finditer(text)), len(text)]
    yield from ((start, end) for start, end in pairwise(ends) if start < end)


def _clauses(text: str) -> Iterator[_Clause]:
    for start, end in _sentences(text):
        sentence = text[start:end]
        suggests = bool(_SUGGESTS.search(sentence))
        asked = sentence.rstrip(" \"')\n").endswith("?") and not suggests
        advice, cuts = False, [0, *(match.end() for match in _CLAUSE.finditer(sentence)), len(sentence)]
        for left, right in pairwise(cuts):
            clause, before = sentence[left:right], advice
            if _ADVICE.match(clause):
                advice = True
            elif _CLAIM.search(clause):
                advice = False
            guess = asked or bool(_IF.match(clause))
            general = advice or bool(_GENERAL.search(clause))
            yield _Clause(start + left, start + right, clause, general, guess, suggests)
            if _ASIDE.match(clause) or sentence[:left].endswith("from "):
                advice = before  # what follows goes on where the aside came in


def _in_its_clause(unit: Found, clauses: list[_Clause], text: str) -> Found | None:
    """The unit, weak where its clause claims nothing; None where the clause makes it no unit at all."""
    clause = next(clause for clause in clauses if clause.start <= unit.start < clause.end)
    weak = unit.weak or clause.guess
    if unit.kind in ("date", "time", "money", "number"):
        fixed = "%" in unit.key or (unit.kind == "date" and unit.key[2])  # nobody advises a share, or the 14th of June
        weak = weak or (clause.advice and not fixed)
    elif unit.kind in ("person", "event", "place"):
        weak = weak or clause.advice
    elif unit.kind == "condition" and not _WEATHER_FRAME.search(clause.text):
        return None
    if unit.kind == "place" and not weak:
        weak = not any((clause.suggests, _THERE.search(clause.text), _NEAR.search(clause.text)))
    if unit.kind == "event" and _THERE.search(clause.text) and not clause.guess:
        weak = False
    return Found(unit.kind, unit.text, unit.start, unit.end, unit.key, weak)


# --- the rules, first come first served -------------------------------------------------------------------------------


def _candidates(text: str, every: bool) -> Iterator[Found]:
    for rule in (_works, _designations, _clock_times, _ordinals):
        yield from rule(text)
    yield from _by_entities(text, every)
    yield from _opening_names(text)
    yield from _lexicon(text)


_QUOTED = re.compile(r"\"([^\"\n]{2,200})\"|(?<!\w)'([^'\n]{2,120}(?:'\w[^'\n]*)?)'(?!\w)|\*([^*\n]{2,80})\*")
_WORK_BEFORE = re.compile(
    r"\b(?:song|track|album|book|novel|poem|film|movie|series|podcast|article|post|thread|story|piece|video|headline|playlist"
    r"|called|titled|listen to|put on|play|read|watch)\W*\Z",
    re.IGNORECASE,
)


def _works(text: str) -> Iterator[Found]:
    """Titles in quotation marks; whatever else is quoted is somebody's words."""
    for match in _QUOTED.finditer(text):
        title = next(group for group in match.groups() if group)
        words = re.findall(r"[^\W\d_]{4,}", title)
        large = len(words) > 0 and all(word[0].isupper() for word in words)
        named = _WORK_BEFORE.search(text, max(0, match.start() - 25), match.start())
        by = re.match(r",? by [A-Z]", text[match.end() :])
        kind = "work" if by or (large and (named or len(words) > 1)) or (named and title[0].isupper()) else ""
        title = title.rstrip(".,;!?")
        yield Found(kind, title, match.start(), match.end(), (title,))


_PLACED = (
    "hall|room|flat|gate|platform|line|bus|tram|route|floor|apartment|suite|terminal|building|ward|track|exit|level"
)
_DESIGNATION = re.compile(
    rf"\b(?:{_PLACED})\ (?:no\.?\ |number\ )?(?:\d+[A-Za-z]?|[A-Z])\b(?![:.]\d|')"
    r"|\b(?-i:r)/\w+"
    r"|\b\d+[a-z]?\ (?-i:[A-Z])\w+\ (?-i:(?:[A-Z]\w+\ )?)(?:street|st|road|rd|avenue|ave|lane|square|way|drive)\b",
    re.IGNORECASE,
)


def _designations(text: str) -> Iterator[Found]:
    for match in _DESIGNATION.finditer(text):
        if match.group().split()[-1] not in ("I", "A") or not match.group()[0].islower():
            yield Found("identifier", match.group(), match.start(), match.end(), (match.group(),))


_HOURS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
_HOUR = rf"(?:1[0-2]|0?[1-9]|{'|'.join(_HOURS)})"
_AFTER_HOUR = (
    r"(?=\s*(?:[.,;!?)]|\Z)"
    r"|\ (?:in|at|on|every|each|and|or|to|when|so|but|right|sharp|for|today|tomorrow|tonight|as|is)\b)"
)
_CLOCK = re.compile(
    rf"""\b(?:(?P<hedge>around|about|nearly|almost|just\ (?:before|after)|shortly\ (?:before|after)|past)\ )?(?:
        (?P<part>half\ past|quarter\ past|quarter\ to)\ (?P<h1>{_HOUR})\b
      | (?P<h2>{_HOUR})\ ?(?:o'clock\b)?(?:\ ?in\ the\ (?P<d2>morning|afternoon|evening)|\ at\ (?P<n2>night))\b
      | (?P<h3>{_HOUR})\ o'clock\b
      | (?:(?<=\bat\ )|(?<=\buntil\ )|(?<=\btill\ )|(?<=\bby\ )|(?<=\bbefore\ )|(?<=\bpast\ )|(?<=\bfrom\ ))
        (?P<h4>{_HOUR})\b(?:\ to\ (?P<h5>{_HOUR})\b)?{_AFTER_HOUR}
    )
    | \b(?:it'?s|it\ is|it\ will\ be|this)\ (?:(?!past\b|half\b|quarter\b|{_HOUR}\b)\w+\ ){{0,3}}?
        (?P<daypart>(?:late|early)(?:\ (?:in\ the|at)\ (?:morning|night|afternoon|evening))?
        |morning|afternoon|evening|night)\b
    """,
    re.VERBOSE | re.IGNORECASE,
)
_DAYPARTS = {
    "morning": (4, 12),
    "afternoon": (12, 18),
    "evening": (17, 24),
    "night": (20, 30),
    "late": (21, 29),
    "early": (4, 9),
}
_SOON = 30  # minutes that "around six" may be off


def _clock_times(text: str) -> Iterator[Found]:
    for match in _CLOCK.finditer(text):
        if daypart := match["daypart"]:
            words = daypart.casefold().split()
            if match.group().casefold().startswith("this") and words[0] in _DAYPARTS and len(words) == 1:
                continue  # "this morning" only says that it is today
            low, high = _DAYPARTS["late" if words[0] == "late" else words[-1]]
            minutes = tuple(hour % 24 * 60 + m for hour in range(low, high) for m in (0, 15, 30, 45))
            start = match.start("daypart")
            yield Found("time", text[start : match.end()], start, match.end(), (minutes, 15))
            continue
        hours = [_hour(match[group]) for group in ("h1", "h2", "h3", "h4", "h5") if match[group]]
        half = (match["d2"] or match["n2"] or "").casefold()
        minute = {"half past": 30, "quarter past": 15, "quarter to": -15}.get((match["part"] or "").casefold(), 0)
        times = [h % 12 * 60 + minute + noon for h in hours for noon in (0, 720) if _fits(h, noon, half)]
        if len(hours) > 1:  # "from ten to two" is one unit that needs both ends
            yield Found("time", match.group(), match.start(), match.end(), (tuple(times[:2]), 0, tuple(times[2:])))
        else:
            yield Found(
                "time",
                match.group(),
                match.start(),
                match.end(),
                (tuple(times), _SOON if match["hedge"] or _past(text, match) else 0),
            )


def _past(text: str, match: re.Match[str]) -> bool:
    return text[: match.start()].casefold().endswith("past ")


def _hour(word: str) -> int:
    return int(word) if word.isdigit() else _HOURS.index(word.casefold()) + 1


def _fits(hour: int, noon: int, half: str) -> bool:
    """Whether an hour of the morning (noon 0) or of the afternoon (720) is meant."""
    if half == "night":
        return (noon == 720) == (6 <= hour < 12)
    return not half or (noon == 0) == (half == "morning")


_ORDINAL_WORDS = ("second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth")
_ORDINAL = re.compile(
    rf"\b({'|'.join(_ORDINAL_WORDS)})\ "
    r"(?:floor|try|attempt|time|week|month|year|day|row|street|avenue|marriage|child|chapter)\b",
    re.IGNORECASE,
)


def _ordinals(text: str) -> Iterator[Found]:
    for match in _ORDINAL.finditer(text):
        value = Decimal(_ORDINAL_WORDS.index(match[1].casefold()) + 2)
        yield Found("number", match.group(), match.start(), match.end(), (value, None, False))


_WEEKDAYS = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")
_MONEY = ("$", "€", "£", "¥", "jpy", "₹")
_MANY = Decimal(10)  # smaller numbers without a unit count things that only the talk knows
_VAGUE_NOUNS = frozenset(_WORDS["vague_nouns"].split())
_RANGE = re.compile(
    r"(?<![\w-])(\d+)\s?(?:-|to|or)\s?(\d+)\ ?"
    r"((?:(?:business|working)\ )?(?:days?|hours?|minutes?|weeks?|months?|years?|km|kilometers?|miles?|%))(?!\w)",
    re.IGNORECASE,
)
_HEDGE = re.compile(
    r"\b(?:about|around|nearly|almost|roughly|some|only about|just (?:under|over)|over|under|(?:less|more) than)\ \Z",
    re.IGNORECASE,
)
_SAYINGS = re.compile(r"\b24/7\b|\b50/50\b|\b100\s?(?:%|percent)|\ba million\b", re.IGNORECASE)


def _by_entities(text: str, every: bool) -> Iterator[Found]:
    """Dates, times, numbers, identifiers and names, as ``metrics/entities.py`` finds them."""
    for match in _SAYINGS.finditer(text):
        yield Found("", match.group(), match.start(), match.end(), ())
    for match in _RANGE.finditer(text):  # "3 to 5 days" counts by its end
        for entity in entities(f"{match[2]} {match[3].split()[-1]}"):
            yield Found("number", match.group(), match.start(), match.end(), (*entity.key[1:3], False))
    found = [entity for entity in entities(_unquoted(text)) if entity.kind not in ("quoted", "file")]
    for entity in found:
        kind, key, words = entity.kind, entity.key, entity.text
        if kind == "date":
            if calendar := date_key(words, key):
                yield Found("date", words, entity.start, entity.end, calendar)
        elif kind == "time":
            hour, minute = int(str(key[1])), int(str(key[2]))
            minutes = {hour * 60 + minute}
            if re.fullmatch(r"[1-9]:\d\d|1[0-2]:\d\d", words):
                minutes |= {(hour * 60 + minute + 720) % 1440}
            yield Found("time", words, entity.start, entity.end, (tuple(sorted(minutes)), 0))
        elif kind == "number":
            yield from _number(text, entity.text, entity.start, entity.end, key, every)
        elif kind in ("identifier", "url", "email", "tag"):
            yield Found("identifier", words, entity.start, entity.end, (words,))
        else:  # a name, or a code
            yield from _named(words, entity.start, entity.end)


def _unquoted(text: str) -> str:
    """Every character in its place, quotation marks blank, so that what stands between them is read as text."""
    return re.sub(r"[\"*]", " ", text)


def _number(text: str, words: str, start: int, end: int, key: tuple[object, ...], every: bool) -> Iterator[Found]:
    value, unit = Decimal(str(key[1])), key[2]
    rounded = bool(_HEDGE.search(text, max(0, start - 14), start))
    if unit is None and abs(value) <= _MANY and not every and not re.search(r"(?:st|nd|rd|th)\Z", words):
        noun = re.match(r"\ ([a-z]{3,}s)\b", text[end:])
        if not noun or noun[1] in _VAGUE_NOUNS:
            return
        words, end = words + noun.group(), end + noun.end()
    yield Found("money" if unit in _MONEY else "number", words, start, end, (value, unit, rounded))


def date_key(words: str, key: tuple[object, ...]) -> tuple[int | None, int | None, int | None, int | None] | None:
    """Year, month, day, weekday of an entity's date, None where it does not say; None for "tomorrow" and the like."""
    if isinstance(key[0], int):
        return int(key[0]), int(str(key[1])), int(str(key[2])), None
    if len(key) == 4:
        year, month, day = (part if isinstance(part, int) else None for part in key[1:])
        return year, month, day, None
    if len(key) == 2:  # the calendar's dates are ("date", words) otherwise
        plain = str(key[1])
        for number, name in enumerate(_WEEKDAYS):
            if name in plain:
                return None, None, None, number
        if slashed := re.fullmatch(r"(\d{1,2})/(\d{1,2})/(\d{2,4})", plain):
            month, day, year = map(int, slashed.groups())
            return year if year > 99 else 2000 + year, month, day, None
    return None


# Titles and what many places are called; names that everybody knows.
_GENERIC = frozenset(_WORDS["name_parts"].split())
_COMMON = frozenset(_WORDS["common_names"].split())


def _named(words: str, start: int, end: int) -> Iterator[Found]:
    parts = [word for word in words_of(words) if word not in _COMMON]
    if parts and any(len(part) > 1 or part.isdigit() for part in parts):
        yield Found("name", words, start, end, (words,))


# A sentence's first word is large whatever it is. It is a name where a person's or a city's verb follows it and it is
# no word that one finds at the beginning of such talk.
_OPENING = re.compile(
    r"(?:\A|(?<=[.!?:]\s)|(?<=\n)|(?<=\"))(?P<name>[A-ZÀ-Ö][a-zà-ÿ]{2,})"
    r"(?='s\ \w|\ (?:is|was|has|had|will|would|must|probably|really"
    r"|needs"
    r"|wants|says|said|told|loves?|misses|sounds|seems|knows|still|only|just|opens|closes|starts|might|may|can)\b)"
)
_NO_NAME = frozenset(_WORDS["no_names"].split())
_ENDING = re.compile(r"(?:ing|ness|tion|sion|ity|ment|ship|ance|ence|ism|ies|hood|ly)\Z")


def _opening_names(text: str) -> Iterator[Found]:
    for match in _OPENING.finditer(text):
        word, verb = folded(match["name"]), text[match.end() :].split(maxsplit=1)[0]
        if word.endswith("s") and not verb.endswith("s"):
            continue  # "nights can be long"
        if (
            word not in _NO_NAME
            and word not in _COMMON
            and word not in _WEEKDAYS
            and not _ENDING.search(word)
            and word not in _SAME
        ):
            yield Found("name", match["name"], match.start(), match.end(), (match["name"],))


# --- things that have no name: words that say the same stand together ------------------------------------------------

_NEAR = re.compile(
    r"\b(?:near (?:you|by|here|your|the)|nearby|at the corner|(?:around|round) the corner|down the (?:street|road)"
    r"|blocks?\b"
    r"|close (?:to you|by)"
    r"|in your (?:area|neighbou?rhood|town|city|building|street)|from (?:you|your|here)|across from|across the"
    r"|next (?:to|door)|away)",
    re.IGNORECASE,
)
_THERE = re.compile(
    r"\bthere(?:'s| is| are| was| will be)\b|\bI (?:found|see|saw|checked)\b|\byou(?:'ll| will| can) find\b",
    re.IGNORECASE,
)
_WEATHER_FRAME = re.compile(
    r"\b(?:the storm|it'?s|it is|it was|it will|it'll|weather|forecasts?|outside|sky|skies|degrees"
    r"|roads?|alert|warning|rains?|snows?|and it)\b|°",
    re.IGNORECASE,
)
_DETERMINER = r"(?:your|the|her|his|their|that|this|our)(?: own)?"


def _groups(kind: str) -> tuple[list[str], dict[str, tuple[str, ...]]]:
    """The words that are units of a kind, longest first, and by word those that say the same."""
    heads, same = set[str](), dict[str, tuple[str, ...]]()
    for line in _WORDS[kind]:
        before, _, after = line.partition(" - ")
        heads.update(before.split())
        for word in before.split():
            same[word] = (*same.get(word, ()), *before.split(), *after.split())
    return sorted(heads, key=len, reverse=True), same


_LEXICON = {kind: _groups(kind) for kind in ("person", "event", "place", "condition")}
_SAME = frozenset(word for _, groups in _LEXICON.values() for word in groups)


def _lexicon(text: str) -> Iterator[Found]:
    """People of the customer's, events, places without a name and the weather."""
    plain = _unaccented(text)
    for kind, (words, groups) in _LEXICON.items():
        heads = "|".join(map(re.escape, words))
        pattern = rf"\b(?:(?P<det>{_DETERMINER})\ (?:[a-z][\w'-]*\ ){{0,2}})?(?P<head>{heads})s?\b(?!-\w)"
        for match in re.finditer(pattern, plain, re.IGNORECASE):
            det, head = (match["det"] or "").casefold().split(" ")[0], match["head"].casefold()
            if kind == "person":
                weak = det != "your" or (match.group()[-1] == "s" and head != "twins")  # "your friends" are anybody's
            elif kind == "event":
                weak = det not in ("your", "the", "her", "his", "their")
            else:
                weak = False
            start = match.start() if kind == "person" and det else match.start("head")
            yield Found(kind, text[start : match.end()], start, match.end(), groups[head], weak)


def _unaccented(text: str) -> str:
    """Every character in its place: é is e, and stays one character."""
    return "".join(unicodedata.normalize("NFKD", character)[0] for character in text)


def any_of(words: Iterable[object], said: frozenset[str]) -> bool:
    """Whether one of the words that say the same was said, in the singular or the plural."""
    return any(form in said for word in words for form in (str(word), f"{word}s", str(word).removesuffix("s")))
