"""What a clause of an agent's turn does, and whether a customer's turn shows distress. Rules for English text.

An agent's turn is cut into clauses, and each clause does one thing: it asks, declines, stalls, comforts, states. The
phrases that tell which stand in ``data/cues.yaml``, where a person can edit them; a negation, a condition or another
grammatical person turns most of them round ("it is not your fault", "if you can't log in", "I can't see why not").
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from typing import Any, Final, Literal

import yaml

Does = Literal["asks", "declines", "finds nothing", "stalls", "blames", "comforts", "formula", "states"]
Asks = Literal["for", "to do", "leave", "opening", "closing"]

# --- words ------------------------------------------------------------------------------------------------------------

_MOST = 12_000
_STRAIGHT = str.maketrans("‘’‚“”„‐‑‒–−…\u00a0\u202f", "'''\"\"\"-----.  ")
_SENTENCE_END = re.compile(
    r"(?<!\bDr)(?<!\bMr)(?<!\bMrs)(?<!\bMs)(?<!\bSt)(?<!\bNo)(?<!\b[ap]\.m)(?<!\be\.g)(?<!\bi\.e)"
    r"(?:[.!?]+[\"')\]]*(?=\s|\Z)|\n+)"
)
_CLAUSE_END = re.compile(
    r"""[;:]\s | \s-+\s | (?<!sorry)(?<!sorry,)\s(?=but\s)
    | ,\s(?=(?:and|so|or)\s(?:i|we|you|it|they|she|he|the|your)(?:'\w+)?\s)
    | (?<!sorry),\s(?=(?:i|we|you|it|they|there)(?:'\w+)?\s)
    | ,\s(?=(?:could|can|would|may|shall|should|will)\s(?:you|i|we)\s | please\s | is\s(?:this|that|it)\s | don't\s)""",
    re.IGNORECASE | re.VERBOSE,
)
_WORD = re.compile(r"[^\W_]+(?:[._@'][^\W_]+)*")
_STOP = frozenset(
    """
    a about above after again ago ahead all already also although am an and any anybody anyone anything are as at away
    back be because been before being below both but by can cannot could d did do does doing done down each either
    else even ever every exactly few first for from get gets getting go goes going got had has have having he her here
    hers him his how however i if in indeed instead into is it its itself just kind kindly know let like ll m made
    make many may maybe me might mind mine more most much must my myself need needs no nor not now of off oh ok okay
    on once one only onto or other our ours out over own per perhaps please possible quite rather re really right s
    said same say see seem seems shall she should since so some somebody someone something still such sure t take than
    thank thanks that the their them then there these they thing things this those though through to today too two
    under until up us use used ve very want wants was way we well were what when where whether which while who whom
    whose why will wish with within without won would yes yet you your yours yourself able assist assistance help
    hello hi hey sorry unfortunately afraid provide share give tell send let look looking don isn aren won didn doesn
    couldn wouldn shouldn hasn haven wasn weren ain confirm mean moment
    """.split()  # noqa: SIM905
)
_IRREGULAR = {
    "bought": "buy", "broke": "break", "broken": "break", "came": "come", "chose": "choose", "chosen": "choose",
    "felt": "feel", "flew": "fly", "found": "find", "gave": "give", "given": "give", "kept": "keep", "left": "leave",
    "lost": "lose", "meant": "mean", "paid": "pay", "sent": "send", "shipped": "ship", "sold": "sell", "spent": "spend",
    "spoke": "speak", "spoken": "speak", "stolen": "steal", "told": "tell", "took": "take", "taken": "take",
    "went": "go", "gone": "go", "wrote": "write", "written": "write", "children": "child", "people": "person",
}  # fmt: skip
_SAME = {
    word: group.split()[0]
    for group in (
        "rule policy regulation terms", "booking reservation", "parcel package shipment", "last final",
        "number digit numeral", "buy purchase", "refund reimburse reimbursement", "phone mobile cellphone",
        "waive remove", "restart reboot", "cancel annul", "arrive deliver delivery reach come", "cost price charge fee",
        "child kid", "doctor dr physician", "amount sum total", "problem issue trouble matter", "zip postcode postal",
        "birth born birthday", "late overdue", "flat apartment", "exchange swap replace", "change modify alter",
    )
    for word in group.split()
}  # fmt: skip
_PLURALS = (
    ("ies", "y", 2), ("xes", "x", 2), ("ches", "ch", 2), ("shes", "sh", 2), ("sses", "ss", 2), ("ss", "ss", 1),
    ("us", "us", 1), ("s", "", 2),
)  # fmt: skip
_ENDINGS = (
    ("ied", "y", 2), ("ation", "", 4), ("ment", "", 5), ("ing", "", 3), ("ed", "", 3), ("ly", "", 4), ("al", "", 5),
)  # fmt: skip


def plain(text: str) -> str:
    """Compatibility forms folded, quotation marks and dashes straight, without a list's or emphasis' marks.

    Of a text of more than ``_MOST`` characters only so many are read: whatever an agent sends, it is read in a moment.
    """
    text = unicodedata.normalize("NFKC", text[:_MOST]).translate(_STRAIGHT)
    return re.sub(r"(?m)^[ \t]*(?:[-*•#>]+|\d{1,3}[.)])[ \t]+|[*`]+|(?<!\w)_+|_+(?!\w)", " ", text)


def sentences(text: str) -> list[str]:
    """A text cut after its sentences' ends and at line breaks; the marks stay."""
    text, found, start = plain(text), [], 0
    for match in _SENTENCE_END.finditer(text):
        found.append(text[start : match.end()])
        start = match.end()
    return [kept for part in (*found, text[start:]) if re.search(r"\w", kept := " ".join(part.split()))]


@lru_cache(maxsize=20_000)
def stem(word: str) -> str:
    """A word without its ending, by its first synonym: ``cancelled`` and ``cancellation`` are one word."""
    word = _IRREGULAR.get(word := word.casefold(), word)
    return _root(_SAME.get(word) or _SAME_ROOTS.get(_root(word), word))


def _root(word: str) -> str:
    if any(char.isdigit() for char in word):
        return word
    for endings in (_PLURALS, _ENDINGS):
        for ending, instead, least in endings:
            if word.endswith(ending) and len(word) - len(ending) >= least:
                word = word.removesuffix(ending) + instead
                break
    if len(word) > 4 and word[-1] == word[-2] and word[-1] != "s":
        word = word[:-1]
    if len(word) > 3 and word[-1] == "e":
        word = word[:-1]
    return word[:-1] if len(word) > 4 and word[-1] == "y" else word


_SAME_ROOTS = {_root(word): first for word, first in _SAME.items()}


def stems(text: str) -> list[str]:
    """Stems of a text's content words, in order; what has a digit is a word, too, without currency and commas."""
    text = re.sub(r"(?<=\d),(?=\d{3}\b)", "", plain(text))
    words = [re.sub(r"'\w+$", "", word.casefold()) for word in _WORD.findall(text)]
    return [stem(word) for word in words if word not in _STOP and (len(word) > 1 or word.isdigit())]


def similar(a: Iterable[str], b: Iterable[str]) -> float:
    """Jaccard's coefficient of two sets of stems; 0 when either is empty."""
    left, right = set(a), set(b)
    return len(left & right) / len(left | right) if left and right else 0.0


def values(words: Iterable[str]) -> set[str]:
    """Those with a digit: what tells one order, date or amount from another."""
    return {word for word in words if any(char.isdigit() for char in word)}


_PHRASES: Final[dict[str, Any]] = yaml.safe_load(
    resources.files("traitbasis.reactive").joinpath("data", "cues.yaml").read_text(encoding="utf-8")
)


def _any(*patterns: str) -> re.Pattern[str]:
    joined = "|".join(f"(?:{pattern})" for pattern in patterns)
    return re.compile(re.sub(r"<([a-z]+)>", lambda name: _PHRASES["fragments"][name[1]], joined), re.IGNORECASE)


def _patterns(name: str) -> re.Pattern[str]:
    return _any(*_PHRASES[name])


def _weighted(name: str) -> tuple[tuple[float, re.Pattern[str]], ...]:
    return tuple((weight, _any(*patterns)) for weight, patterns in _PHRASES[name].items())


# --- the agent's clauses ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Clause:
    """A part of an agent's turn. does: the one thing it does. stems: of its content words. asks: what kind of question.
    warmth: how warm it is, 0 to 1. cold: how cold."""

    text: str
    does: Does
    stems: tuple[str, ...]
    asks: Asks | None = None
    slots: frozenset[str] = frozenset()
    warmth: float = 0.0
    cold: float = 0.0

    @property
    def done(self) -> bool:
        """Whether it says that a step was done."""
        return self.does == "states" and bool(_DONE.search(self.text)) and not _UNDONE.search(self.text)

    @property
    def gives(self) -> bool:
        """Whether it offers or promises something that the customer gets, and not only to look."""
        return self.does in ("states", "comforts") and bool(_GIVES.search(self.text))

    @property
    def dismisses(self) -> bool:
        """Whether it speaks coldly of the feeling itself."""
        return self.cold > 0 and bool(_DISMISSES.search(self.text))

    @property
    def brushes_off(self) -> bool:
        """Whether it declines by being cold."""
        return self.cold > 0 and bool(_BRUSHES_OFF.search(self.text))

    @property
    def found(self) -> bool:
        """Whether it says that something was looked up."""
        return self.does == "states" and bool(_FOUND.search(self.text)) and not _UNDONE.search(self.text)

    @property
    def once_more(self) -> bool:
        """Whether a question says itself that it asks again."""
        return self.asks == "for" and bool(_ONCE_MORE.search(self.text))

    @property
    def chooses(self) -> bool:
        """Whether a question lets the customer choose."""
        return self.asks == "for" and bool(_WISH.search(self.text) or re.search(r"\bor\b|\binstead\b", self.text))

    @property
    def promises(self) -> bool:
        """Whether it only says what the agent is going to do."""
        return bool(_PROMISE.search(self.text))


@lru_cache(maxsize=4096)
def read(text: str) -> tuple[Clause, ...]:
    """The clauses of an agent's turn, in order."""
    found = []
    for sentence in sentences(text):
        parts = [part for part in _CLAUSE_END.split(sentence) if re.search(r"\w", part)]
        for number, part in enumerate(parts):
            found.append(_clause(part.strip(" ,"), sentence.rstrip("\"') ").endswith("?") and number == len(parts) - 1))
    return tuple(found)


def _clause(text: str, question: bool) -> Clause:
    words = tuple(stems(text))
    spoken = re.sub(r'"[^"]*"', '""', text)  # what is quoted is nobody's tone
    cold = _strength(spoken, _COLD)
    warmth = 0.0 if cold else _strength(spoken, _WARM)
    does: Does = "states"
    kind: Asks | None = None
    if cold:
        does = "blames"
    elif kind := _kind_of_question(text, question):
        does = "asks"
    elif _REFUSAL.search(text) and not _NO_REFUSAL.search(text):
        does = "declines"
    elif _NOT_FOUND.search(text):
        does = "finds nothing"
    elif _STALL.search(text):
        does = "stalls"
    elif warmth:
        does = "comforts"
    elif _FORMULA.search(text):
        does = "formula"
    if does == "declines" or (does == "asks" and kind == "closing"):
        warmth = warmth if warmth > 0.5 else 0.0  # the sorry of a refusal
    return Clause(text, does, words, kind, slots_asked(text) if kind else frozenset(), warmth, cold)


def _strength(text: str, patterns: Sequence[tuple[float, re.Pattern[str]]]) -> float:
    return max((weight for weight, pattern in patterns if pattern.search(text)), default=0.0)


_CLOSING = _patterns("closing")
_OPENING = _patterns("opening")
_LEAVE = _patterns("leave")
_TO_DO = _patterns("to_do")
_WANTS = _patterns("wants")
_RHETORIC = _patterns("rhetoric")


def _kind_of_question(text: str, question: bool) -> Asks | None:
    if question and _RHETORIC.search(text):
        return None
    if question and _CLOSING.search(text):
        return "closing"
    if question and _OPENING.search(text):
        return "opening"
    if _LEAVE.search(text) and (question or "confirm" in text.casefold() or "(yes" in text.casefold()):
        return "leave"
    if _TO_DO.search(text):
        return "to do"
    return "for" if question or _WANTS.search(text) else None


# What an agent may be unable to do without declining anything.
_REFUSAL = _patterns("refusal")
_NO_REFUSAL = _patterns("no_refusal")
_NOT_FOUND = _patterns("not_found")
_STALL = _patterns("stall")
_FORMULA = _patterns("formula")
_DONE = _patterns("done")
_FOUND = _patterns("found")
_ONCE_MORE = _patterns("once_more")
_UNDONE = _patterns("undone")
_PROMISE = _patterns("promise")

_GIVES = _patterns("gives")

# --- warm and cold ----------------------------------------------------------------------------------------------------

_WARM = _weighted("warm")
_COLD = _weighted("cold")

# Cold words about the feeling itself: it is hurt, but it is not ignored.
_DISMISSES = _patterns("dismisses")
_BRUSHES_OFF = _patterns("brushes_off")


# --- what is asked for ------------------------------------------------------------------------------------------------

_CODE = r"#?(?=[\w-]*\d)[A-Za-z0-9][\w-]{1,}"
_TIME = (
    r"(?:yesterday|today|tonight|this\s(?:morning|afternoon|evening|week|month)|last\s(?:night|week|month|year|\w+day)|(?:on\s)?\w+day\b|\w+\s"
    r"(?:days?|weeks?|months?|years?|hours?)\sago|(?:in|on|since|until|by|of|from)\s(?:january|february|march|april|may|june|july|august|september"
    r"|october|november|december)\b|\b\d{1,2}(?:st|nd|rd|th)?\s(?:of\s)?(?:jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)\w*"
    r"|(?:jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)\w*\s\d{1,2}\b|\d{1,2}[/.]\d{1,2}[/.]\d{2,4}|\d{4}-\d\d-\d\d)"
)
_NUMBERED: Final = {
    "order": "order",
    "phone": r"(?:tele|mobile\s|cell)?phone",
    "booking": r"(?:booking|reservation|confirmation|pnr)",
    "parcel": r"(?:parcel|package|tracking|shipment)",
    "user": r"(?:user|customer|client)",
    "case": r"(?:case|ticket|claim|reference|complaint)",
    **dict.fromkeys(("account", "policy", "member", "employee", "student", "patient", "invoice", "serial"), ""),
    **dict.fromkeys(("flight", "card", "meter", "contract"), ""),
}
# What there is one answer to: how it is asked for, and how a customer says it.
_FIRM: dict[str, tuple[re.Pattern[str], re.Pattern[str]]] = {
    f"{name} number": (
        _any(
            rf"\b{noun or name}\w*\s?(?:reference\s)?(?:number|id|code|no\b|#|reference|name\b|reading)",
            r"(?<!phone\s)\b(?:number|id|code|digits|reading)\w*\s(?:on|of|for|to|from)\s(?:your|the|this|that)\s(?:\w+\s)?"
            rf"{noun or name}\b",
        ),
        re.compile(
            rf"\b(?i:{noun or name})\w*(?:\s(?i:number|id|code|no|reference|ending|ends|is|in|it's|with|name))*"
            rf"\s?[.:#,]*\s*(?:(?i:is|in)\s)?{_CODE}"
        ),
    )
    for name, noun in _NUMBERED.items()
}
_FIRM |= {
    "email": (
        _any(r"\be-?mail(?:\saddress)?\b(?!\s(?:you|to|is|has|with|was|that))"),
        re.compile(r"[\w.+-]+@[\w-]+\.\w+"),
    ),
    "name": (
        _any(r"\b(?:your|full|first|last|the)\s(?:full\s|first\s|last\s)?(?:sur)?name\b(?!\sof\sthe)"),
        re.compile(r"\b(?:[Mm]y\s(?:full\s)?name(?:'s|\sis)|[Tt]his\sis|I'm|I\sam)\s[A-Z][a-z]+\s[A-Z][a-z]+"),
    ),
    "address": (
        _any(r"(?<!email\s)(?<!mail\s)\b(?:street\s|home\s|shipping\s|delivery\s|postal\s|current\s)?address\b"),
        re.compile(r"\b\d+\s(?:[A-Z]\w+\s)+(?:Street|St|Road|Rd|Avenue|Ave|Lane|Drive|Way|Court|Place|Boulevard)\b"),
    ),
    "zip code": (
        _any(r"\b(?:zip|post(?:al)?)\s?code\b"),
        _any(r"\b(?:zip|post(?:al)?)\s?(?:code)?(?:\sis|:)?\s[\w\d]+\d"),
    ),
    "birth date": (
        _any(r"\b(?:date\sof\sbirth|birth\s?date|birthday|when\swere\syou\sborn|dob)\b"),
        _any(r"\b(?:born|birth\w*|dob)\b.{0,25}\d"),
    ),
}
_OPEN: dict[str, re.Pattern[str]] = {
    "when": _any(
        r"\bwhen\b|\b(?:what|which)\s(?:date|day|time|month|year)\b|\bhow\slong\sago\b|\bdate\sof\b(?!\sbirth)|\bthe\sdate\b"
    ),
    "amount": _any(r"\bhow\smuch\b|\b(?:what|which|the)\s(?:\w+\s){0,3}?amount\b|\bamount\b"),
    "why": _any(r"\bwhy\b|\breason\b|\bhow\scome\b"),
    "where": _any(r"\bwhere\b"),
    "who": _any(r"\bwho(?:m)?\b"),
    "how many": _any(r"\bhow\smany\b"),
    "how": _any(r"\bhow\b(?!\s(?:much|many|long))"),
    "which": _any(r"\b(?:what|which)\b"),
}
_WISH = _patterns("wish")
_REQUESTS = _patterns("requests")
_VAGUE = frozenset(
    "happen start begin occur notice day dat time month year amount reason long involv last".split()  # noqa: SIM905
)
_TRIED = _patterns("tried")
_BECAUSE = _patterns("because")
_AMOUNT = re.compile(
    r"[$€£]\s?\d+|\b\d+(?:\.\d\d)?\s?(?:dollars|euros|pounds|usd|eur|less|more|bucks)\b", re.IGNORECASE
)


def slots_asked(text: str) -> frozenset[str]:
    """What a question asks for: firm slots (an order number), else the kind of question word (when, why)."""
    firm = frozenset(name for name, (asked, _) in _FIRM.items() if asked.search(text))
    return firm or frozenset([name for name, asked in _OPEN.items() if asked.search(text)][:1])


def form(text: str) -> tuple[bool, bool]:
    """Whether a question is about what the customer wishes, and whether it requests something to be done."""
    return bool(_WISH.search(text)), bool(_REQUESTS.search(text))


def is_firm(slot: str) -> bool:
    """Whether there is one answer, and whoever asks for it twice asks the same."""
    return slot in _FIRM


@lru_cache(maxsize=1024)
def _parts(text: str) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """A turn's sentences with their stems."""
    return tuple((part, tuple(stems(part))) for part in sentences(text))


def told(question: Clause, customer: Sequence[str]) -> str | None:
    """The words in which a customer's turns answer a question before it was asked; None when they do not."""
    parts = [part for turn in customer for part in _parts(turn)]
    if question.asks == "opening":
        return next(
            (part for part, words in parts if len(words) >= 4 or (len(words) >= 2 and _REQUEST.search(part))), None
        )
    if question.asks == "to do":
        wanted = {word for word in question.stems if word not in _EMPTY_ACTS}
        for part, words in parts:
            hits = {word for word in wanted if word in words or any(_same_act(word, other) for other in words)}
            if wanted and len(hits) / len(wanted) >= 0.5 and _TRIED.search(part):
                return part
        return None
    if question.asks != "for":
        return None
    firm = [slot for slot in question.slots if is_firm(slot)]
    if firm:
        found = [match[0] for slot in firm for turn in customer if (match := _FIRM[slot][1].search(plain(turn)))]
        return found[0] if len(found) >= len(firm) else None
    content = {word for word in question.stems if word not in _VAGUE}
    for part, words in parts:
        if part.endswith("?") and not re.search(
            r"\b(?:can|could|would|will) (?:you|i|we)\b|\bplease\b", part, re.IGNORECASE
        ):
            continue
        shared = content & set(words)
        if (
            "when" in question.slots
            and re.search(_TIME, part, re.IGNORECASE)
            and (shared or not content)
            and _past(question)
        ):
            return part
        if "amount" in question.slots and _AMOUNT.search(part) and (shared or not content or content <= _MONEY):
            return part
        if "why" in question.slots and _BECAUSE.search(part):
            return part
        if "which" in question.slots and (named := _names_it(question.text, part)):
            return named
    return None


_REQUEST = _patterns("request")
_EMPTY_ACTS = frozenset(
    stem(word)
    for word in ["try", "check", "please", "suggest", "recommend", "remember", "so", "whether", "well", "well"]
)
_MONEY = frozenset(
    map(stem, ("pay", "paid", "charge", "missing", "owe", "bill", "refund", "payment", "less", "lack", "short"))
)
_WHICH = re.compile(
    r"\b(?:which|what)(?:\s(?:kind|type|sort)\sof)?\s(?P<noun>[a-z]+)\b(?:.*?\b(?P<verb>return|exchange|cancel|change)\b)?",
    re.I,
)


def _same_act(a: str, b: str) -> bool:
    return a.removeprefix("re") == b.removeprefix("re") and len(a) > 4


def _past(question: Clause) -> bool:
    return bool(
        re.search(
            r"\b(?:did|was|were|have|has|bought|happened|started|purchase|the\sdate)\b", question.text, re.IGNORECASE
        )
    )


def _names_it(question: str, said: str) -> str | None:
    """ "Which department?" is answered by "department Logistics" and by "the Logistics department"."""
    match = _WHICH.search(question)
    if not match or match["noun"].casefold() in (
        "is",
        "are",
        "was",
        "do",
        "did",
        "would",
        "can",
        "the",
        "your",
        "part",
        "happened",
    ):
        return None
    noun = stem(match["noun"])
    words = _WORD.findall(plain(said))
    for at, word in enumerate(words):
        if stem(word) != noun:
            continue
        after, before = words[at + 1 : at + 2], words[max(0, at - 1) : at]
        for near in (*after, *before):
            named = near[0].isupper() and near.casefold() not in _STOP and not near.isupper() and near is not words[0]
            if named or any(char.isdigit() for char in near):
                return f"{word} {near}" if near in after else f"{near} {word}"
    if match["verb"]:
        thing = re.search(
            rf"\b{match['verb']}(?:ing)?\s(?:my|the|this|these|a|an)\s((?:[a-z]+\s?){{1,3}})", said, re.IGNORECASE
        )
        if thing and noun not in stems(thing[1]):
            return thing[0]
    return None


# --- the customer's distress ------------------------------------------------------------------------------------------

_DISTRESS = _weighted("distress")
_CALM = re.compile(
    r"(?:\b(?:not|n't|never|no\slonger|isn't|wasn't|without|nothing|don't|no|hardly|less)\b)(?:\s\w+){0,3}\s*$",
    re.IGNORECASE,
)
_OVER = _patterns("over")
_GLAD = _patterns("glad")
_NO_DISTRESS = _patterns("no_distress")


def distress(text: str, before: Sequence[str] = ()) -> tuple[float, str] | None:
    """How much distress a customer's turn shows (above 0, at most 1), and the words; None when it shows none.

    before: the customer's earlier turns; whoever writes everything in capitals does not shout.
    """
    text = " ".join(plain(text).split())
    if _OVER.search(text):
        return None
    for strength, pattern in _DISTRESS:
        for match in pattern.finditer(text):
            calm = _CALM.search(text, max(0, match.start() - 40), match.start()) and not re.match(
                r"(?:not|no|can't|aren't)\b", match[0], re.IGNORECASE
            )
            near = text[max(0, match.start() - 20) : match.end() + 20]
            if strength < 0.5 and _GLAD.search(text):
                continue
            if not calm and not _NO_DISTRESS.search(near):
                return strength, match[0]
    if (
        _shouts(text)
        and not (before and all(_shouts(turn) or len(turn.split()) < 2 for turn in before))
        and (before or "!" in text)
    ):
        return 0.7, text[:40]
    return None


def _shouts(text: str) -> bool:
    words = re.findall(r"[^\W\d_]{2,}", text)
    return len(words) >= 3 and sum(word.isupper() for word in words) > 0.7 * len(words)


def names_feeling(text: str, words: str) -> bool:
    """Whether an agent's text takes up the words in which a customer showed distress."""
    return bool(set(stems(words)) & set(stems(text))) or any(
        len(word) > 4 and other.startswith(word[:5]) for word in stems(words) for other in stems(text)
    )
