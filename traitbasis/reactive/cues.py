"""What a clause of an agent's turn does, and whether a customer's turn shows distress. Rules for English text.

An agent's turn is cut into clauses, and each clause does one thing: it asks, declines, stalls, comforts, states. What is
done is told from words in a small grammar: a negation, a condition or another grammatical person turns most of them
round ("it is not your fault", "if you can't log in", "you can't imagine").
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, Literal

Does = Literal["asks", "declines", "finds nothing", "stalls", "blames", "comforts", "formula", "states"]
Asks = Literal["for", "to do", "leave", "opening", "closing"]

# --- words ------------------------------------------------------------------------------------------------------------

_STRAIGHT = str.maketrans("‘’‚“”„‐‑‒–−…\u00a0\u202f", "'''\"\"\"-----.  ")
_SENTENCE_END = re.compile(
    r"(?<!\bDr)(?<!\bMr)(?<!\bMrs)(?<!\bMs)(?<!\bSt)(?<!\bNo)(?<!\b[ap]\.m)(?<!\be\.g)(?<!\bi\.e)"
    r"(?:[.!?]+[\"')\]]*(?=\s|\Z)|\n+)"
)
_CLAUSE_END = re.compile(
    r";\s|:\s|\s-+\s|(?<!sorry)(?<!sorry,)\s(?=but\s)|,\s(?=(?:and|so|or)\s(?:i|i'm|i've|i'll|we|we've|you|you'll|it|they|she|he|the|your)\b)"
    r"|(?<!sorry),\s(?=(?:i|we|you|it|they|there)(?:'\w+)?\s)|,\s(?=(?:could|can|would|may|shall|should|will)\s(?:you|i|we)\b|please\b|is\s(?:this|that|it)\b|don't\b|there's\b)",
    re.IGNORECASE,
)
_WORD = re.compile(r"[^\W_]+(?:[._@'][^\W_]+)*")
_STOP = frozenset(
    """a about above after again ago ahead all already also although am an and any anybody anyone anything are as at
    away back be because been before being below both but by can cannot could d did do does doing done down each either
    else even ever every exactly few first for from get gets getting go goes going got had has have having he her here
    hers him his how however i if in indeed instead into is it its itself just kind kindly know let like ll m made make
    many may maybe me might mind mine more most much must my myself need needs no nor not now of off oh ok okay on once
    one only onto or other our ours out over own per perhaps please possible quite rather re really right s said same
    say see seem seems shall she should since so some somebody someone something still such sure t take than thank thanks
    that the their them then there these they thing things this those though through to today too two under until up us
    use used ve very want wants was way we well were what when where whether which while who whom whose why will wish
    with within without won would yes yet you your yours yourself able assist assistance help hello hi hey sorry
    unfortunately afraid provide share give tell send let look looking don isn aren won didn doesn couldn wouldn shouldn hasn haven wasn weren ain confirm mean moment""".split()  # noqa: SIM905
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
_ENDINGS = (
    ("ied", "y", 2), ("ies", "y", 2), ("ation", "", 4), ("ment", "", 5), ("ing", "", 3), ("ed", "", 3), ("ly", "", 4),
    ("al", "", 5), ("xes", "x", 2), ("ches", "ch", 2), ("shes", "sh", 2), ("sses", "ss", 2), ("ss", "ss", 1), ("us", "us", 1),
    ("s", "", 2),
)  # fmt: skip


def plain(text: str) -> str:
    """Compatibility forms folded, quotation marks and dashes straight, without a list's or emphasis' marks."""
    text = unicodedata.normalize("NFKC", text).translate(_STRAIGHT)
    return re.sub(r"(?m)^\s*(?:[-*•#>]+|\d+[.)])\s+|[*`]+|(?<!\w)_+|_+(?!\w)", " ", text)


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
    for ending, instead, least in _ENDINGS:
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


def _any(*patterns: str) -> re.Pattern[str]:
    return re.compile("|".join(f"(?:{pattern})" for pattern in patterns), re.IGNORECASE)


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


_TELL = (
    r"(?:provide|share|give|tell|send|confirm|specify|clarify|describe|explain|say|read|spell|repeat|verify|state"
    r"|let\s(?:me|us)\sknow|remind|elaborate|supply|enter|type|list|name)"
)
_CLOSING = _any(
    r"\b(?:any|some)(?:thing|one|\w*)?\s(?:else|other|further|more)\b.*\b(?:help|assist|do|can|need|question|concern)",
    r"\belse\s(?:can|may|could)\b|\bwhat\selse\b|\bhow\selse\b",
    r"\b(?:make\ssense|does\s(?:that|this)\shelp|is\sthat\sall|(?:any|other)\squestions)\b",
    r"^(?:ok|okay|alright|right|fine|deal|good|really|yes|no|so)\W*$",
)
_OPENING = _any(
    r"\b(?:how|what)\s(?:can|may|could|might)\s(?:i|we)\s(?:help|assist|do)\b(?!\s(?:to|if|when|about|with)\b)",
    r"\bwhat\s(?:brings\syou|are\syou\scalling\sabout|do\syou\sneed\shelp\swith|would\syou\slike\shelp\swith)\b",
)
_LEAVE = _any(
    r"\b(?:shall|should)\s(?:i|we)\b|\bdo\syou\swant\s(?:me|us)\sto\b|\bwould\syou\slike\s(?:me|us)\sto\b",
    r"\b(?:may|can|could)\s(?:i|we)\s(?:go\sahead|proceed|charge|book|cancel|place|process|submit|continue|apply|use)\b",
    r"\b(?:is|are|does)\s(?:this|that|it|everything|all|these|the\sabove|the\sdetails)\b[^?]*"
    r"\b(?:correct|right|okay|ok|accurate|fine|good|work\sfor\syou|sound)\b",
    r"\b(?:do\syou|can\syou|could\syou|please)\sconfirm\b(?!\s(?:your|the)\s[\w\s]*\b(?:number|id|name|email|address|date"
    r"|code|digits|phone|amount))",
    r"\(?yes\s?(?:/|or)\s?no\)?|\bdo\syou\s(?:agree|approve|want\sto\s(?:proceed|continue|go\sahead))\b|\bare\syou\s(?:okay|ok)"
    r"\swith\b|^(?:correct|is\sthat\sso)\W*$",
)
_TO_DO = _any(
    r"\b(?:could|can|would|will)\syou\s(?:please\s|kindly\s|also\s|now\s)*(?:try|check|restart|reboot|reset|open|close|turn"
    r"|switch|press|hold|unplug|plug|remove|reinstall|install|update|click|tap|go|log|clear|swap|move|wait|look)",
    r"\b(?:have|did)\syou\s(?:already\s|tried\s|try\s|ever\s)*(?:tried|try|check|checked|restart|restarted|reset|turned|turn"
    r"|switched|reinstalled|updated|cleared|swapped|replaced|looked|called|contacted|talked|spoken|asked|unplugged)\b",
    r"^(?:so\s|then\s|now\s|first,?\s|and\s|next,?\s|ok,?\s|okay,?\s)*(?:please|kindly|try|you\s(?:could|should|can|might)\stry"
    r"|(?:i|we)\s(?:suggest|recommend|advise)|how\sabout\strying|why\sdon't\syou|so\stry|try\sto)\b(?!\s*,?\s*"
    rf"(?:{_TELL}|wait|hold\son|bear|note|be|don't|do\snot|accept|allow|stay|rest|feel|know|excuse|forgive|understand"
    r"|give\s(?:me|us)\sa)\b)",
)
_WANTS = _any(
    rf"\b(?:please|kindly|i\sneed\syou\sto|i'?ll\sneed\syou\sto|you\sneed\sto)\s(?:also\s|first\s)?{_TELL}\b",
    r"\b(?:i|we)(?:'ll|\swill|'d|\swould)?\s(?:also\s|still\s|first\s|just\s)*(?:need|require|want)\s(?:to\sknow|to\shave|your"
    r"|the|some|a\sfew|more|one\smore)\b",
    r"^(?:and\s|so\s)?(?:tell|give|send|let)\sme\s(?!know\sif|check|see|look|know\swhen|open|get|find|just)(?:have\s)?\w+",
    r"\b(?:your|the)\s[\w\s]{2,30}(?:number|id|name|email|code),?\splease\b",
)
_RHETORIC = _any(
    r"\bdo\syou\shave\sany\sidea\b", r"\bwho\scares\b", r"\bwhat\sdid\syou\sexpect\b", r"\bisn't\sthat\snice\b"
)


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


_CANNOT = (
    r"(?:can(?:no|')t|can\snot|couldn't|could\snot|won't|will\snot|wouldn't|unable\sto|not\sable\sto|not\sgoing\sto"
    r"|not\sin\sa\sposition\sto|not\sauthori[sz]ed\sto|not\sallowed\sto|not\spermitted\sto|don't|do\snot)"
)
# What an agent may be unable to do without declining anything.
_OTHERWISE = (
    r"(?:find|locate|see|imagine|wait|thank|agree|hear|recall|remember|know|understand|tell|think|believe|blame|mean|worry"
    r"|hesitate|mind|want\syou|reproduce|reach\s(?:you|him|her|them)|say\s(?:that|for\ssure)|need|have\s(?:your|the|an?y?\s)"
    r"|stress|emphasi[sz]e|show|speak\sfor|read|recognize|recognise|match)"
)
_REFUSAL = _any(
    rf"\b(?:i|we|our\s\w+|the\s(?:system|company|policy|bank|shop|store|hotel|airline))(?:'m|'re|\sam|\sare|\sis|\sdoes)?\s"
    rf"(?:really\s|simply\s|just\s|also\s|still\s|currently\s|therefore\s|unfortunately\s|sadly\s)*{_CANNOT}\s(?!{_OTHERWISE}\b)\w+",
    rf"\byou\s(?:{_CANNOT}|may\snot|aren't\s(?:eligible|entitled|allowed))\s(?!{_OTHERWISE}\b|worry\b|need\b|have\sto\b|be\b)\w+",
    r"\b(?:can(?:no|')t|can\snot|won't|will\snot|may\snot)\sbe\s(?:\w+ly\s)?\w+(?:ed|en|de|nt|id|ld|wn|ne)\b",
    r"\bno\s(?:exceptions?|refunds?|way\saround|longer\spossible|chance)\b|\bout\sof\sthe\squestion\b|\bhave\sto\s(?:decline|refuse|say\sno)",
    r"\b(?:must|have\sto)\s(?:decline|refuse|turn\s(?:this|that|it|you)\sdown)\b|\bnothing\s(?:more\s|else\s)?(?:i|we)\scan\sdo\b"
    r"|\bthere(?:'s|\sis)\snothing\s(?:more\s|else\s)?(?:i|we)\b|\bagainst\s(?:our|the)\s(?:rules?|polic)",
    r"\bno\s\w+(?:\s\w+)?\s(?:is|are|will\sbe)\s(?:due|possible|given|granted|paid)\b",
    r"^only\s.+\bmay\b|\b(?:is|are|strictly)\s(?:reserved|limited|only)\sfor\b|\b(?:falls?|is|are)\soutside\b|\bpast\sthe\s\w+\s(?:window|deadline)",
    r"(?:\bnot|n't)\s(?:eligible|possible|allowed|permitted|refundable|negotiable|entitled|something\s(?:i|we)|an\soption)\b",
)
_NO_REFUSAL = _any(
    r"^(?:and\s|so\s|but\s)?(?:if|when|whenever|in\scase|should|as\slong\sas|unless|once)\b",
    r"\b(?:until|before)\s(?:i|we|you)\b|\bwithout\s(?:your|the|a|an|this|that|first)\b",
    r"\bcan't\ssee\swhy\snot\b|\bno\s(?:problem|worries|trouble|need|charge|cost)\b|\bdon't\shave\sto\b",
    r"\bwhether\b|\bwon't\s(?:take|be\slong|happen\sagain|be\scharged|cost|have\sto|need|let|lose|hurt|leave)\b",
)
_NOT_FOUND = _any(
    rf"\b(?:i|we)(?:'m|'re|\sam|\sare)?\s(?:still\s|just\s)?{_CANNOT}\s(?:find|locate|see|read|match|recogni[sz]e|show|reach)\b",
    r"\bno\s(?:order|booking|account|record|reservation|match|result|entry)\b.*\b(?:found|under|with|for|matches)\b",
    r"\bdo(?:es)?(?:n't|\snot)\s(?:show|match|come\sup|appear)\b|\bcame\sup\sempty\b",
)
_STALL = _any(
    r"\b(?:i'?ll|i\swill|i'm|i\sam|we'?ll|we're|let\sme|let\sus|allow\sme|give\sme|i'm\sgoing)\s(?:\w+\s){0,4}?(?:look(?:ing)?|check(?:ing)?"
    r"|see(?:ing)?|investigat\w+|review(?:ing)?|pull(?:ing)?\sup|work(?:ing)?\son|moment|minute|second|sec)\b",
    r"\bi\s(?:have|need)\sto\s(?:ask|check|look|find\sout|see)\b",
    r"\b(?:one|just\sa|a)\s(?:moment|minute|second|sec)\b|\b(?:hold\son|hang\son|bear\swith\s(?:me|us)|please\s(?:hold|wait|stand\sby))\b",
    r"\b(?:thank\syou|thanks|appreciate)\b.*\b(?:waiting|patience|holding|bearing)\b|\b(?:be\s)?(?:right\sback|back\sto\syou|in\stouch)\b",
    r"\b(?:will|is\sgoing\sto|is)\s(?:be\s)?(?:look(?:ed|ing)?\sinto|escalat\w+|process\w*\syour\srequest)",
    r"^(?:i\s(?:see|understand)|noted|got\sit|understood|okay|ok|alright|sure|certainly|of\scourse|right|yes|no\sproblem)\W*$",
)
_FORMULA = _any(
    r"\b(?:thank\syou|thanks)\b|\b(?:happy|glad|here|pleased)\sto\s(?:help|assist)\b|\b(?:you're|you\sare)\s(?:very\s|most\s)?welcome\b",
    r"\bi\s(?:can|will|could|'ll|would\sbe)\s(?:\w+\s){0,3}?(?:help|assist)\b|\bhave\sa\s(?:\w+\s)?(?:day|evening|weekend|night|one)\b",
    r"^(?:hello|hi|hey|good\s(?:morning|afternoon|evening)|welcome|goodbye|bye)\b|\bin\sorder\sto\s(?:help|assist)\b",
    r"^(?:sure|certainly|of\scourse|absolutely|gladly|great|perfect|excellent|sounds\sgood|no\sproblem|thanks)\b\W*(?:\w+\W*)?$",
    r"\b(?:inconvenience|confusion|delay)\b.*\b(?:caused|may\shave)\b|\banything\selse\b|\bgreetings\b|\bat\syour\sservice\b",
)
_DONE = _any(
    r"\b(?:i|we)(?:'ve|\shave|'d|\shad)?\s(?:now\s|just\s|already\s|also\s|successfully\s|both\s|gone\sahead\sand\s|put\b)*(?:\w+ed|put|sent|made"
    r"|set|found|took|taken|done|paid|given|got|written|left|cut|reset|built|moved)\b",
    r"\b(?:has|have|was|were)\s(?:now\s|just\s|already\s|been\s|also\s|successfully\s)*(?:been\s|now\s|successfully\s)+\w+(?:ed|en|nt|id|de)\b",
    r"^(?:all\s)?(?:done|sorted|found\sit|fixed|booked|confirmed|approved|noted)\b|\b(?:is|are|you're|you\sare|it's)\s(?:now|all\sset|noted|filed|booked"
    r"|confirmed|open\sin\sfront|on\s(?:its|their|the)\sway)\b",
    r"\byou(?:'re|\sare)\s(?:[\w']+\s){1,5}now\b",
)
_FOUND = _any(r"\bi\s(?:can\s)?(?:see|have)\s(?:your|the|both|that|it)\b")
_ONCE_MORE = _any(
    r"\b(?:tell|give|send|share|say|repeat|confirm|provide|name|upload|spell|read|state|enter)\b.*\b(?:again|once\smore|one\smore\stime|a\ssecond\stime)\b",
    r"\bremind\s(?:me|us)\b|\bwhat\s(?:was|is)\b.*\bagain\W*$|\brepeat\s(?:your|the|that|it)\b",
)
_UNDONE = _any(
    r"\b(?:haven't|hasn't|have\snot|has\snot|not\syet|wasn't|weren't|never)\b",
    r"\bi\s(?:can\s)?see\s(?:that\s)?(?:you|how|why|what)\b",
    r"\bi\s(?:understood|needed|wanted|hoped|asked|mentioned|noticed|wondered|stated|explained|checked|looked)\b",
    r"^(?:if|when|once|after)\b|\b(?:what|as|which|than)\s(?:i|we)\b",
)
_PROMISE = _any(
    r"\b(?:i'?ll|i\swill|i'm\sgoing\sto|we'?ll|we\swill|let\sme|allow\sme|i\scan|we\scan|i'm\sable\sto)\b",
    r"\bon\sit\b",
)

_GIVES = _any(
    r"\b(?:i|we)\s(?:can|could|can\salso|can\sstill)\s(?!not\b|help|assist|look|check|see|find|try|understand|imagine|hear|tell|trace|investigat"
    r"|only|see|feel|sense|appreciate|confirm\sthat\syou)\w+",
    r"\b(?:i'll|i\swill|we'll|we\swill|let\sme|i'm|we're|i\sam|we\sare)\s(?:also\s|now\s|just\s|then\s|going\sto\s)*(?:send|sending|ship|credit|refund|waive"
    r"|replac|book|mov|add|email|mail|cancel|transfer|reset|chang|updat|exchang|issu|pay|remov|revers|extend|deliver|process|submit|fil|put)\w*",
    r"\bwhat\s(?:i|we)\scan\sdo\b|\boptions?\s(?:are|is)\b|\balternativ",
)

# --- warm and cold ----------------------------------------------------------------------------------------------------

_FEELING = (
    r"(?:upset\w*|frustrat\w*|angry|anger|annoy\w*|worr(?:y|ied|ying|ies)|stress\w*|scar(?:ed|y)|afraid|frighten\w*|fear\w*|disappoint\w*"
    r"|hurt\w*|sad|painful|pain|hard|tough|heavy|difficult|awful|terrible|horrible|lonely|alone|exhaust\w*|overwhelm\w*|rough|unfair"
    r"|anxious|anxiety|nerv\w+|grief|loss|shock\w*|confus\w*|unpleasant|tiring|maddening|infuriat\w*|relie(?:f|ved)|proud|exciting"
    r"|excited|urgen\w*|important|nightmare|ordeal|letdown|let\sdown|concern\w*|trouble)"
)
_WARM: Final = (
    (
        1.0,
        _any(
            rf"\b(?:that|this|it)(?:\s(?:must|would|can|does|has\sto|really|all))*\s?(?:sounds?|is|was|'s|feels?|feel|felt|seems?|be|have\sbeen|have\sfelt)"
            rf"\s(?:[\w']+\s){{0,4}}?{_FEELING}\b",
            rf"\b(?:i|we)\s(?:can\s|do\s|completely\s|fully\s|totally\s|really\s)*(?:imagine|understand|hear|see|know|get|appreciate|realize|realise)"
            rf"\s(?:[\w']+\s){{0,8}}?{_FEELING}\b",
            r"\b(?:i|we)\s(?:can\s)?(?:only\s)?imagine\b|\bit\s(?:makes?|made)\s(?:perfect\s|complete\s|total\s)?sense\sthat\b|\bno\swonder\b",
            r"\b(?:every|any)(?:\s|)(?:one|body)\swould\b|\bwould\s(?:[\w']+\s)?(?:frighten|upset|annoy|worry|scare|anger|frustrate|hurt|shake)\s"
            r"(?:any|every)|\b(?:every|all\sthe)\s(?:right|reason)\sto\s(?:be|feel)\b",
            r"\b(?:so|very|truly|deeply|terribly|really|sincerely)\ssorry\b|\bsorry\s(?:to\shear(?!\s(?:it|that|this)\W*$)|for\syour|about\syour|that\syou|you)\b|\bcondolences\b",
            r"\b(?:you(?:'re|\sare)|you'll)\s(?:not|never|n't)\s(?:be\s)?(?:alone|on\syour\sown|a\sfailure|a\sburden)|\bi'm\shere\s(?:for|with)\syou\b",
            r"\bmy\sheart\s(?:goes|breaks)\b|\bbeing\s(?:afraid|scared|angry|sad|hurt)\b|\bit(?:'s|\sis)\s(?:okay|ok|alright|normal|natural|understandable)"
            r"\sto\b",
            r"\b(?:you\sare|you're)\s(?:more\sthan|worth|doing\s(?:great|well|so|your\sbest)|brave|strong)\b|\bpoor\s(?:you|thing)\b",
        ),
    ),
    (
        0.8,
        _any(
            r"\b(?:i|we)\s(?:sincerely\s|do\s|really\s|truly\s)?(?:apologi[sz]e|regret)\b(?!.*\b(?:any|the)\sinconvenience)|\bmy\s(?:[\w']+\s)?apologies\b"
            r"(?!.*\binconvenience)",
            r"\bforgive\s(?:me|us)\b|\bi\s(?:was|went|got)\s(?:wrong|too\sfast|careless|rude|unkind)|\b(?:my|our)\s(?:mistake|fault|bad|error)\b",
            r"\bsorry\s(?:about|for)\b(?!.*\binconvenience|\sthat\W*$|\sthis\W*$)",
            r"\b(?:don't|do\snot|no\sneed\sto|never)\s(?:you\s)?(?:worry|panic|feel\s(?:bad|guilty))\b|\b(?:no\sworries|rest\sassured)\b",
            r"\bnot\s(?:your|ours?\syour)\s(?:fault|problem)\b|\byou\s(?:did|have\sdone)\s(?:nothing|the\sright)\b|\bwe'll\s(?:get|sort|figure|fix|find)\s"
            r"(?:[\w']+\s){0,3}?(?:through|out|together|sorted|back|this)\b",
            r"\btake\s(?:all\sthe\s|your\s)time\b|\bno\srush\b|\b(?:so|really|very|truly)\s(?:happy|glad|pleased|relieved|proud|excited)\b"
            r"|\bi(?:'m|\sam)\s(?:happy|glad|relieved|proud|delighted)\s(?:for|it|that|you|to\shear|about)\b",
            r"\b(?:congratulations|well\sdone|fantastic\snews|wonderful\snews|great\snews\sfor|hooray|hurrah|how\s(?:lovely|wonderful|exciting))\b"
            r"|\bwhat\sa\s(?:relief|shame|pity|joy|lovely|wonderful|horrible|terrible|day|morning|scare)",
            r"\b(?:i|we)\s(?:really\s|truly\s|do\s)?appreciate\s(?:you|how|that\syou|your\s(?:honesty|trust|kindness|understanding|openness))\b"
            r"|\bthank(?:s|\syou)\s(?:so\smuch\s|for\s)(?:trusting|being\sso|opening|telling|sharing\s(?:that|this|how)|sticking|staying)\b",
            rf"\b(?:you\s(?:seem|sound|feel|must\sbe|must\sfeel)|your)\s(?:[\w']+\s){{0,2}}?{_FEELING}\b(?<!trouble)",
            r"\b(?:you're|you\sare)\s(?:absolutely\s|completely\s|quite\s)?right\b(?=.*\b(?:i|we|us|our)\b)|\byou\sdeserve\b|\bgenius\sof\syou\b",
            r"\byou\sstayed\b|\bi\shope\s(?:you|he|she|they|it|your)\b|\bhow\smuch\s(?:you|she|he|they)\s(?:mean|care)\b",
        ),
    ),
    (
        0.4,
        _any(
            r"\b(?:apologi[sz]e|apologies|sorry)\b.*\binconvenience\b|\bi\s(?:completely\s|fully\s|totally\s)?understand\s(?:your|how|why|that\syou)\b",
            r"\b(?:oh\sno|oh\sdear|ouch)\b|\bi\shear\syou\b|\bi\ssee\show\b",
            r"\bsorry\sabout\s(?:that|this)\b|^(?:and\s|oh,?\s)?(?:i'm\s|i\sam\s|we're\s|we\sare\s)?(?:very\s|so\s)?sorry(?:\sto\shear\s(?:it|that|this))?\W*$",
        ),
    ),
)  # fmt: skip
_COLD: Final = (
    (
        1.0,
        _any(
            r"\b(?:that(?:'s|\sis)|it(?:'s|\sis)|this\sis)\s(?:on\syou|your\s(?:own\s)?(?:problem|fault|mistake|business|doing))\b|\bnot\s(?:my|our)\s"
            r"(?:problem|department|fault|business|concern|job)\b|\bwasn't\s(?:us|our\sfault)\b",
            r"\b(?:stop|quit)\s(?:complaining|whining|shouting|yelling|crying|being|moaning|wasting|bothering)\b|\bget\sover\sit\b|\bdeal\swith\sit\b"
            r"|\b(?:grow|man|toughen)\sup\b|\bsuck\sit\sup\b",
            r"\bcalm\sdown\b|\b(?:over-?react\w*|hysteric\w*|dramatic|being\sridiculous|being\sunreasonable|pathetic)\b|\bchill\sout\b",
            r"\btake\sit\sor\sleave\sit\b|\blike\sit\sor\snot\b|\bi\s(?:don't|do\snot|couldn't)\scare\b|\bwho\scares\b|\bnobody\s(?:cares|forced)\b|\bso\swhat\b",
            r"\bwhat\s(?:did|do)\syou\sexpect\b|\bdo\syou\shave\sany\sidea\b|\byou\speople\b|\bpeople\slike\syou\b|\bcan\syou\s(?:even\s)?read\b",
            r"\b(?:are\syou|you're)\s(?:deaf|stupid|blind|dense)\b|\bgood\sluck\swith\sthat\b|\bspare\sme\b|\b(?:waste|wasting)\s(?:of\s)?my\stime\b"
            r"|\bbe\s(?:grateful|glad|thankful)\s(?:that|you)\b|\bcry(?:ing)?\sabout\sit\b|\bwatch\syour\s(?:tone|language)\b",
        ),
    ),
    (
        0.8,
        _any(
            r"\byou\s(?:really\s|clearly\s|obviously\s)?(?:should|could|ought\sto|might)(?:\s(?:really|simply|just))?(?:'ve|\shave)\s(?!received|gotten|got|been"
            r"|seen|an?\b|the\b|had)\w+",
            r"\bif\syou(?:'d|\shad)\s(?:only\s|actually\s|bothered|just\s|simply\s)*(?:read|listened|checked|paid|bothered|asked|looked|thought|been)\b",
            r"\byou\s(?:failed|neglected|forgot|refused|didn't\s(?:bother|even|read|listen|check))\b|\bnext\stime,?\s(?:read|listen|check|think|don't|try\sto)\b"
            r"|\b(?:read|listen|check|think)\b.*\bnext\stime\b",
            r"\b(?:i|we)(?:'ve|\shave)?\salready\s(?:told|explained|said|answered)\b|\bhow\smany\stimes\b|\bi\swon't\srepeat\b|\bare\syou\slistening\b",
            r"^whatever\b(?!\s\w)|\bi\s(?:don't|do\snot)\shave\s(?:the\s)?time\b|\bi'm\sbusy\b|\bsome\sof\sus\b|\bobviously\b|\bas\sanyone\b|\bany(?:one|body)\swith\b",
            r"\byou(?:'re|\sare)\snot\sthe\s(?:only|first)\b|\b(?:others|other\speople|everyone|everybody|lots\sof\speople|plenty\sof\speople)\s"
            r"(?:have|has|find|manage|deal|cope)\b|\blook\son\sthe\sbright\sside\b|\bit\scould\sbe\sworse\b|\bat\sleast\syou\b|\bcheer\sup\b",
            r"\b(?:it's|that's|it\sis)\s(?:just|only)\sa\b|\bnot\s(?:that\s)?(?:a\sbig\sdeal|the\send\sof\sthe\sworld)\b|\bno\sbig\sdeal\b|\bmove\son\b",
            r"\bno\sneed\sto\s(?:shout|yell|get|be|make)\b|\bgetting\s(?:worked\sup|angry|upset|emotional)\b|\b(?:people|customers|owners|you)\s(?:really\s)?"
            r"ought\sto\b|\b(?:how\snice\sfor\syou|oh\sgreat|lucky\syou|how\sconvenient|congratulations\son\s(?:losing|missing|breaking))\b",
        ),
    ),
)  # fmt: skip

# Cold words about the feeling itself: it is hurt, but it is not ignored.
_DISMISSES = _any(
    r"\bcalm\sdown\b|\b(?:over-?react\w*|hysteric\w*|dramatic|worked\sup|emotional|crying|complaining|shouting|yelling|whining)\b",
    r"\bbright\sside\b|\bcheer\sup\b|\bcould\sbe\sworse\b|\bget\sover\b|\bno\sneed\sto\s(?:shout|yell|get|be)\b|\bfeel\b",
)
_BRUSHES_OFF = _any(
    r"\bnot\s(?:my|our)\s(?:problem|department|business|concern|job)\b|\bthat(?:'s|\sis)\syour\s(?:own\s)?problem\b|\btake\sit\sup\swith\b"
)


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
    **{
        word: word
        for word in "account policy member employee student patient invoice serial flight card meter contract".split()  # noqa: SIM905
    },
}
_FIRM: dict[str, tuple[re.Pattern[str], re.Pattern[str]]] = {
    f"{name} number": (
        _any(
            rf"\b{noun}\w*\s?(?:reference\s)?(?:number|id|code|no\b|#|reference|name\b|reading)",
            rf"(?<!phone\s)\b(?:number|id|code|digits|reading)\w*\s(?:on|of|for|to|from)\s(?:your|the|this|that)\s(?:\w+\s)?{noun}\b",
        ),
        re.compile(
            rf"\b(?i:{noun})\w*(?:\s(?i:number|id|code|no|reference|ending|ends|is|in|it's|with|name))*\s?[.:#,]*\s*(?:(?i:is|in)\s)?{_CODE}"
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
_WISH = _any(
    r"\bwould\syou\s(?:like|prefer|rather)\b|\b(?:do|did)\syou\s(?:want|wish|need|prefer)\b|\bsuits?\b|\bwould\b"
)
_REQUESTS = _any(r"\b(?:could|can|would|will)\syou\b(?!\s(?:like|prefer|rather)\b)|\bplease\b")
_VAGUE = frozenset("happen start begin occur notice day dat time month year amount reason long involv last".split())  # noqa: SIM905
_TRIED = _any(
    r"\b(?:tried|already|twice|did\s(?:that|this|it|talk|call|try)|again|i\sdid|i've|i\shave|several\stimes|once)\b"
)
_BECAUSE = _any(
    r"\b(?:because|due\sto|the\sreason|cause|change\sof\s(?:plan|mind)|changed\smy\smind|since\si|as\si\s(?:have|am|need))\b"
)
_AMOUNT = re.compile(
    r"[$€£]\s?\d+|\b\d+(?:\.\d\d)?\s?(?:dollars|euros|pounds|usd|eur|less|more|bucks)\b", re.IGNORECASE
)


def slots_asked(text: str) -> frozenset[str]:
    """What a question asks for: firm slots (an order number), else the kind of question word (when, why)."""
    firm = frozenset(name for name, (asked, _) in _FIRM.items() if asked.search(text))
    return firm or frozenset(list(name for name, asked in _OPEN.items() if asked.search(text))[:1])


def form(text: str) -> tuple[bool, bool]:
    """Whether a question is about what the customer wishes, and whether it requests something to be done."""
    return bool(_WISH.search(text)), bool(_REQUESTS.search(text))


def is_firm(slot: str) -> bool:
    """Whether there is one answer, and whoever asks for it twice asks the same."""
    return slot in _FIRM


def told(question: Clause, customer: Sequence[str]) -> str | None:
    """The words in which a customer's turns answer a question before it was asked; None when they do not."""
    parts = [(part, stems(part)) for turn in customer for part in sentences(turn)]
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


_REQUEST = _any(
    r"\b(?:want|need|like|would|please|can\s(?:i|you|we)|could\s(?:i|you|we)|my|problem|issue|cancel|change|return|refund)\b"
)
_EMPTY_ACTS = frozenset(
    stem(word) for word in "try check please suggest recommend remember so whether well well".split()
)  # noqa: SIM905
_MONEY = frozenset(stem(word) for word in "pay paid charge missing owe bill refund payment less lack short".split())  # noqa: SIM905
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

_DISTRESS: Final = (
    (
        1.0,
        _any(
            r"\b(?:furious|livid|enraged|outraged?|outrageous|seething|terrified|petrified|panick?\w*|desperate|desperat\w+|hopeless|helpless|devastated"
            r"|heartbroken|broke\smy\sheart|crying|in\stears|can't\sstop\scrying|suicid\w+|hysterical|worthless|a\sfailure|a\swreck|nightmare|unacceptable"
            r"|disgust\w*|appall\w*|ridiculous|unbelievable|i\shate|begging|at\smy\swits|breaking\spoint|can't\stake|can't\scope|can't\sgo\son"
            r"|driving\sme\s(?:crazy|mad|nuts|insane))\b",
            r"\bgiv(?:e|ing)\sup\b|\b(?:sick|tired)\s(?:and\stired\s)?of\b|\bfed\sup\b|\bhad\senough\b|\blos(?:e|ing)\s(?:my\s)?(?:mind|patience|hope|it)\b",
            r"\b(?:wtf|damn|bullshit|goddamn|what\sthe\s(?:hell|heck)|for\s(?:god|heaven|christ)'s?\ssake|screw\syou|bloody)\b",
        ),
    ),
    (
        0.7,
        _any(
            r"\b(?:angry|upset|frustrat\w+|annoy(?:ed|ing)|irritat\w+|scared|afraid|frightened|worried|worrying|anxious|nervous|stress(?:ed|ful|ing)"
            r"|disappoint\w+|discourag\w+|miserable|exhausted|overwhelmed|ashamed|guilty|invisible|lonely|hurt\b|shocked|horrible|terrible|awful|unfair"
            r"|joke|pathetic|feel\suseless|insane|crazy|shame|mess|dread\w*|sleepless)\b",
            r"\b(?:not\sfair|can't\s(?:sleep|eat|believe|face|afford|bear|pay)|i'?m\sdone|are\syou\s(?:kidding|serious|joking)|waste\sof\s(?:my\s)?time)\b",
            r"\b(?:already|just)\s(?:told|said|gave|explained)\b.*(?:!|twice|times)|\b(?:third|fourth|fifth|tenth|hundredth)\stime\b|\bhow\smany\stimes\b"
            r"|\baren't\slistening\b|\bnot\slistening\b|\bno\s(?:one|body)\s(?:listens|cares|helps)\b",
            r"\b(?:lost\smy\s(?:job|mother|father|mom|mum|dad|son|daughter|husband|wife|baby|home)|passed\saway|\bdied\b|funeral|in\s(?:the\s)?hospital|evicted"
            r"|stranded|no\smoney\sfor|overdrawn|emergency)\b",
        ),
    ),
    (0.4, _any(r"\bcan\shardly\b|\b(?:still\snothing|come\son(?=[!.?,])|seriously)(?!\w)|!!+|\?!|!\?|\bhuh\?")),
)  # fmt: skip
_CALM = re.compile(
    r"(?:\b(?:not|n't|never|no\slonger|isn't|wasn't|without|nothing|don't|no|hardly|less)\b)(?:\s\w+){0,3}\s*$",
    re.IGNORECASE,
)
_OVER = _any(r"\bwhat\sa\srelief\b", r"\b(?:relieved|all\sgood\snow|fine\snow|no\sworries|thank\sgod|i\scould\scry)\b")
_GLAD = _any(
    r"\b(?:great|wonderful|perfect|awesome|amazing|love(?:ly)?|thanks?|thank\syou|excellent|yay|hooray|fantastic)\b"
)
_NO_DISTRESS = _any(
    r"\b(?:sorry\sto\sbother|afraid\s(?:i|that|so|not)|crazy\s(?:good|about|fast|cheap)|not\supset|stress\stest|useless\sinformation"
    r"|should\si\sworry|guilty\spleasure)\b"
)


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
