"""Does a rewritten message still ask for what the original asks for? Rules on the two texts, after the entities.

Rules cannot tell whether two messages mean the same. They tell where they surely do not: nothing is asked for any more,
the speaker does or has done it, it is not to be done, something else is to be bought, sold, booked, cancelled, deleted
or copied, hardly a word of the original comes back, or two names have changed places. What passes is to be read by
somebody before a benchmark is published.
"""

from __future__ import annotations

import re

from traitbasis.guards import GUARDS, Guard, failed_guard
from traitbasis.metrics.entities import entities, in_order, invented, kept

# Least share of the original's content words that come back, themselves or as a word of the same group.
MEANING = 0.25
_LONGER, _MORE_WORDS = 3, 25  # a rewritten message has at most so many times, or so many more words
_TEXT_GUARDS = ("empty", "thought", "special_token", "reasoning", "transcript", "role_flip", "punctuation", "broken")
_OWN_WORDS: tuple[Guard, ...] = tuple(guard for guard in GUARDS if guard.name in _TEXT_GUARDS)


def fault(original: str, rewritten: str, *, meaning: float = MEANING) -> str | None:
    """Why `rewritten` cannot stand for `original`, or None when no rule objects.

    In this order: a guard's name (no usable user turn), ``echo`` (it repeats the instruction), ``unchanged``,
    ``lost`` and ``invented`` (entities), ``order`` (of entities of one kind), ``too_long``, ``asks_nothing``,
    ``does_it_itself``, ``negated``, ``other_action``, ``off_topic`` (less than `meaning` of the content words).
    """
    guards = [guard for guard in _OWN_WORDS if failed_guard(original, [guard]) is None]
    if guard := failed_guard(rewritten, guards):
        return guard.name
    return next((name for name, objects in _RULES.items() if objects(original, rewritten)), None) or (
        "off_topic" if returned(original, rewritten) < meaning else None
    )


def returned(original: str, rewritten: str) -> float:
    """Share of the original's content words, without its entities, that come back; 1 when it has none."""
    wanted = {_root(word) for word in _content(_without_entities(original))}
    said = {_root(word) for word in _content(rewritten)}
    return sum(any(_alike(word, other) for other in said) for word in wanted) / len(wanted) if wanted else 1.0


def actions(text: str) -> list[str]:
    """The verbs of a text that an agent acts on, as they stand in it."""
    return [word for word in _words(_without_entities(text)) if _groups(_root(word))]


def same_actions(word: str) -> list[str]:
    """The verbs that ask for the same, the word itself among them."""
    numbers = _groups(_root(word))
    return list(dict.fromkeys([word.casefold(), *(verb for n in sorted(numbers) for verb in _GROUPS[n].split())]))


# --- words ------------------------------------------------------------------------------------------------------------

_GROUPS = (
    "cancel annul revoke rescind withdraw retract abort",
    "buy purchase acquire procure",
    "sell",
    "book reserve",
    "delete erase remove discard eliminate",
    "copy duplicate replicate",
    "rename",
    "retweet",
    "unlock",
    # Up to here what must not be asked for instead of something else.
    "move relocate transfer shift put",
    "create make generate initiate produce craft",
    "tweet post publish share",
    "send dispatch forward relay message text notify inform tell",
    "show display list give tell provide present output reveal print read view see get fetch retrieve pull share",
    "find locate search look identify detect spot",
    "compare contrast juxtapose diff",
    "sort order organize arrange",
    "check verify confirm ensure validate inspect examine review assess look",
    "write append add jot record put include",
    "fill refuel top",
    "start ignite activate launch begin turn",
    "lock secure engage",
    "convert translate exchange",
    "calculate compute determine estimate work",
    "open",
    "close resolve fix",
    "update modify change edit adjust set",
    "log authenticate sign",
    "count tally",
    "set establish implement cap limit",
    "plan schedule",
    "go navigate change cd",
)
_HARMFUL = 9
_FUNCTION_WORDS = frozenset(
    """a about after again all also am an and any are as at be been before being but by can could did do does doing for
    from get go going had has have having he her here hers him his how i if in into is it its just kindly let like ll
    made make may maybe me might more most much must my need no not now of off okay on once one only or other our out
    over own please really right s shall she should so some something such sure t than thank thanks that the their them
    then there these they thing things this those to too up us ve very want was we well were what when where which
    while who why will wish with without would yes you your appreciate able d don m re""".split()  # noqa: SIM905
)


def _words(text: str) -> list[str]:
    return re.findall(r"[^\W\d_]+", text.replace("’", "'"))


def _content(text: str) -> list[str]:
    return [word for word in _words(text.casefold()) if len(word) > 1 and word not in _FUNCTION_WORDS]


def _root(word: str) -> str:
    """Without an ending: ``cancelled``, ``cancels``, ``cancelling`` and ``cancellation`` are one."""
    word = word.casefold()
    for ending, least in (("lation", 6), ("ation", 4), ("ing", 3), ("ed", 3), ("es", 3), ("s", 3), ("e", 3), ("y", 3)):
        if word.endswith(ending) and len(word) - len(ending) >= least:
            word = word.removesuffix(ending)
            break
    if len(word) > 3 and word[-1] == word[-2] and word[-1] not in "sl":
        word = word[:-1]  # shipped
    return word[:-1] if word.endswith(("e", "i", "ll")) and len(word) > 3 else word


_GROUP_ROOTS = [frozenset(_root(verb) for verb in group.split()) for group in _GROUPS]


def _groups(root: str) -> set[int]:
    return {number for number, roots in enumerate(_GROUP_ROOTS) if root in roots}


def _alike(root: str, other: str) -> bool:
    return (
        root == other
        or (min(len(root), len(other)) >= 5 and root[:5] == other[:5])
        or bool(_groups(root) & _groups(other))
    )


def _without_entities(text: str) -> str:
    for entity in reversed(entities(text)):
        text = f"{text[: entity.start]} ; {text[entity.end :]}"
    return text


# --- rules: whether they object ---------------------------------------------------------------------------------------

_ECHO = re.compile(
    r"\bin (?:your|my) own words\b|\byou are (?:a|the) customer\b|\bwhat you want to say\b|\bask for exactly the same\b"
    r"|\brephras|\breword|\bparaphras|\bas (?:a|the) customer\b",
    re.IGNORECASE,
)
_VERBS = "|".join(sorted({verb for group in _GROUPS for verb in group.split()}, key=len, reverse=True))
_ASKS = re.compile(
    r"\?|\b(?:please|kindly|let's|make sure|be sure|go ahead|how about|time to)\b"
    r"|\b(?:i|we)(?:'d| would)? (?:really |just |also |still )?(?:need|want|like|love|appreciate|require|wish|must"
    r"|have to)\b|\bi(?:'m| am| was) (?:looking|wondering|curious|interested|keen|eager)\b"
    r"|\b(?:can|could|would|will) you\b|\bhelp\b"
    rf"|(?:^|[.!?,;:\n-]\s*|\b(?:and|then|just|now|so|ok|okay|go|hey|quick|next|first|to|must|should)\s+)(?:{_VERBS})\b",
    re.IGNORECASE,
)
_SELF = re.compile(
    r"\bI(?:'ve| have|'ll| will| am going to|'m going to|'m| am)?(?: (?:just|already|now|gonna|also))* (\w+)",
    re.IGNORECASE,
)
_NOT = re.compile(
    r"\b(?:do not|don't|never|not to|no need to|needn't|without|stop|avoid|instead of)\s+(?:\w+\s+){0,1}?(\w+)",
    re.IGNORECASE,
)
_ANY_NOT = re.compile(r"\b(?:not|never|no|none|without|avoid|nothing)\b|n't\b", re.IGNORECASE)


def _is_unchanged(original: str, rewritten: str) -> bool:
    return [w.casefold() for w in re.findall(r"\w+", original)] == [w.casefold() for w in re.findall(r"\w+", rewritten)]


def _is_too_long(original: str, rewritten: str) -> bool:
    words = len(original.split())
    return len(rewritten.split()) > max(_LONGER * words, words + _MORE_WORDS)


def _does_it_itself(original: str, rewritten: str) -> bool:
    """Whether the customer does, or has done, what it asked for."""
    asked = _asked(original)
    told = {_root(verb) for verb in _SELF.findall(_straight(original))}
    return any(_groups(_root(verb)) & asked and _root(verb) not in told for verb in _SELF.findall(_straight(rewritten)))


def _is_negated(original: str, rewritten: str) -> bool:
    """Whether what was to be done is now not to be done, or the other way round."""
    refused = {_root(verb) for verb in _NOT.findall(_straight(original)) if _groups(_root(verb))}
    if refused and not _ANY_NOT.search(_straight(rewritten)):
        return True
    asked = _asked(original)
    return any(
        _groups(_root(verb)) & asked and _root(verb) not in refused for verb in _NOT.findall(_straight(rewritten))
    )


def _asked(text: str) -> set[int]:
    return {group for word in actions(text) for group in _groups(_root(word))}


def _asks_otherwise(original: str, rewritten: str) -> bool:
    known = {_root(word) for word in _words(original)}
    found = {_root(word) for word in _words(_without_entities(rewritten))}
    return any(
        roots & found and not any(_alike(root, word) for root in roots for word in known)
        for roots in _GROUP_ROOTS[:_HARMFUL]
    )


def _straight(text: str) -> str:
    return text.replace("’", "'")


_RULES = {
    "echo": lambda original, rewritten: bool(_ECHO.search(rewritten) and not _ECHO.search(original)),
    "unchanged": _is_unchanged,
    "lost": lambda original, rewritten: bool(kept(original, rewritten)[1]),
    "invented": lambda original, rewritten: bool(invented(original, rewritten)),
    "order": lambda original, rewritten: not in_order(original, rewritten),
    "too_long": _is_too_long,
    "asks_nothing": lambda original, rewritten: bool(
        _ASKS.search(_straight(original)) and not _ASKS.search(_straight(rewritten))
    ),
    "does_it_itself": _does_it_itself,
    "negated": _is_negated,
    "other_action": _asks_otherwise,
}
