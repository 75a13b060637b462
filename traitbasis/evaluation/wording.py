"""What a customer's turn looks like on its surface: courtesy, irritation, orders, openers, variety of words.

Rules on the text alone, English only, so that they can be read and argued with. They count words, not intentions: irony
is polite here, and a customer who writes "I am so sorry that your service is useless" is both.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from math import nan

from traitbasis.pairs import words

WINDOW = 50  # words; Covington and McFall's default is of this order, and it fits in a dialogue of ten short turns

_POLITE = re.compile(
    r"\b(?:please|kindly|thank(?:s| you|ful)|grateful|appreciate(?:d)?|cheers|sorry|apologi[sz]e|apologies|pardon"
    r"|excuse me|(?:would|could) you|would it be (?:possible|okay|ok|alright)|may i|if (?:you don't mind|that's okay"
    r"|that is okay|possible)|i was wondering|no (?:worries|problem|rush|hurry)|take your time|you're welcome"
    r"|much obliged|have a (?:nice|good|great|lovely))\b"
)
_FRUSTRATED = re.compile(
    r"\b(?:ridiculous|unacceptable|unbelievable|useless|pathetic|outrageous|nonsense|absurd|frustrat\w+|annoy\w+"
    r"|irritat\w+|infuriat\w+|disappoint\w+|angry|furious|upset|fed up|had enough|(?:sick|tired) of|(?:terrible|awful"
    r"|horrible) (?:service|experience)|worst|wast(?:e|ed|ing) (?:of |my |any more )?time|come on|seriously|for the"
    r" (?:second|third|fourth|last|umpteenth) time|how (?:many times|much longer)|(?:i|i've|i have) already (?:told"
    r"|said|given|gave|explained|sent|answered)|still (?:waiting|nothing|not|no)|hurry(?! with me| at all| about)"
    r"|what's taking|takes? (?:so long|forever)|taking (?:so long|forever|ages)|ugh+|argh+|damn|wtf|bloody hell"
    r"|for (?:god|heaven|goodness)'?s'? sake|(?:this|it) is a joke|not good enough|get on with it)\b|!{2,}|\?!|!\?"
)

_COURTESY = re.compile(  # what may stand before an order and leaves it one
    r"^(?:(?:hi|hello|hey|good (?:morning|afternoon|evening)|ok|okay|yes|yeah|no|sure|right|alright|fine|great|well|so"
    r"|then|now|just|please|kindly|(?:look|listen)(?=[,.:!])|and|but|also|first|again|sorry|thanks|thank you|there"
    r"|in that case|never mind)\b[\s,.!:;…-]*)+"
)
_MINE = (
    r"(?:my|the|this|that|it|me|them|these|those|both|all|an?|one|everything|us|our|your|him|her|any|some|up|out|down"
    r"|off|back|again|now|whatever|what|which|if|whether|to the|for|into|in|with)\b"
)
_VERBS = (  # verbs that no noun is spelled like, or that seldom open a sentence as one
    r"add|apologi[sz]e|apply|arrange|ask|assist|be|bring|cancel|clarify|compensate|confirm|connect|consider|continue"
    r"|correct|deliver|describe|do(?! (?:i|you|we|they)\b)|don't|double-check|ensure|escalate|expedite|explain|fetch"
    r"|figure|find|finish|fix|follow|forget|forward|get|give|go|hold|hurry|include|inform|investigate|keep|leave"
    r"|let me know|locate|look (?:again|at|into|it|up)|make|never|notify|pay|prepare|proceed|prove|provide|put|quit"
    r"|read|rebook|reconfirm|reinstate|reissue|remove|replace|resend|reset|resolve|respond|say|see(?! you\b)|send|set"
    r"|show|skip|sort|speak|stop|submit|take|tell|try|turn|unlock|upgrade|use|verify|wait(?![,.!?…])|walk me|write"
)
_NOUNS = (  # an order only where its object follows: "return the lamp", but "return label", "order number"
    r"answer|book|call|change|charge|check|credit|email|exchange|extend|help|issue|list|match|move|offer|open|order|pick"
    r"|place|post|process|refund|reply|reschedule|return|review|schedule|ship|start|swap|switch|transfer|update|waive"
)
_IMPERATIVE = re.compile(rf"(?:(?:{_VERBS})\b|(?:{_NOUNS}) {_MINE})")


def polite_markers(text: str) -> int:
    """How often a turn says please, thank you, sorry, would you and the like."""
    return len(_POLITE.findall(_plain(text)))


def frustration_markers(text: str) -> int:
    """How often a turn uses words or marks (``!!``, ``?!``) of irritation."""
    return len(_FRUSTRATED.findall(_plain(text)))


def is_question(text: str) -> bool:
    """Whether a turn asks something: it has a question mark."""
    return "?" in text


def opens_with_an_order(text: str) -> bool:
    """Whether a turn begins with an imperative ("Cancel my order", "Please just send it"), greetings and courtesy
    aside. A polite question ("Could you cancel …?") is none. How often it is right: ``tests/test_eval_long.py``."""
    opening = _COURTESY.sub("", _plain(text).strip())
    return bool(_IMPERATIVE.match(opening))


def opener(text: str, length: int = 3) -> str:
    """The first words of a turn, without case and marks."""
    return " ".join(words(text.casefold())[:length])


def mattr(tokens: Sequence[str], window: int = WINDOW) -> float:
    """Moving-average type-token ratio: the mean share of different words in every run of `window` words.

        MATTR = 1 / (N - w + 1) Σ_i |{t_i, …, t_{i+w-1}}| / w

    Unlike the plain ratio it does not fall with the length of the text. nan for fewer than `window` words. Source:
    Covington and McFall (2010), Cutting the Gordian Knot: The Moving-Average Type-Token Ratio, JQL 17(2).
    """
    if len(tokens) < window:
        return nan
    inside = Counter(tokens[:window])
    total = len(inside)
    for left, entering in zip(tokens, tokens[window:], strict=False):
        inside[entering] += 1
        inside[left] -= 1
        if not inside[left]:
            del inside[left]
        total += len(inside)
    return total / window / (len(tokens) - window + 1)


def _plain(text: str) -> str:
    return " ".join(text.replace("’", "'").lower().split())
