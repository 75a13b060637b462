"""Is this a usable user turn? Guards reject a text; they never edit it (contract 8).

The simulator discards a rejected turn and generates another, a bounded number of times. When tries run out it sends the
best candidate, marked with the guard's name; texts that fail a guard with ``sendable=False`` are no candidates. The one
exception to "never edit": a stop token that must not be there would end the harness's episode, so what goes out as the
last resort is the text without it.

Guards judge the text, the instruction (the system turn) and what was said so far, nothing else. They run in the
engine's thread: each takes time linear in the text, and what depends on the conversation alone is worked out once.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from traitbasis.chat import Speaker, Turn
from traitbasis.errors import RequestError
from traitbasis.metrics.damage import has_runaway_punctuation, is_broken
from traitbasis.metrics.identifiers import flat_text, unknown_identifiers
from traitbasis.metrics.realism import is_role_flip


@dataclass(frozen=True)
class Conversation:
    """What a guard may look at besides the text.

    turns: all that was said before the customer's next message, the system turn included.
    stop_tokens: what may be sent to end the conversation, see ``named_stop_tokens``.
    """

    turns: tuple[Turn, ...] = ()
    stop_tokens: tuple[str, ...] = ()

    def said_by(self, speaker: Speaker) -> list[str]:
        """The texts of one speaker, oldest first."""
        return [turn.text for turn in self.turns if turn.speaker == speaker]

    def spoken(self, text: str) -> str:
        """What of a reply is said to the agent. Where the instruction asks for a thought before it (tau-bench's
        ``react`` users), that is what follows ``User Response:``."""
        return text.rpartition("User Response:")[2] if "User Response:" in self.instruction else text

    @cached_property
    def legal_tokens(self) -> tuple[str, ...]:
        """The stop tokens without blank ones, which a served user's file may hold and every text contains."""
        return tuple(token.strip() for token in self.stop_tokens if token.strip())

    @cached_property
    def instruction(self) -> str:
        return "\n".join(self.said_by("system"))

    @cached_property
    def question(self) -> str:
        """What the agent said last."""
        return next((turn.text for turn in reversed(self.turns) if turn.speaker == "agent"), "")

    @cached_property
    def question_words(self) -> str:
        return _words(self.question)

    @cached_property
    def customer_lines(self) -> frozenset[str]:
        return frozenset(map(_words, self.said_by("customer")))

    @cached_property
    def known(self) -> str:
        return flat_text(turn.text for turn in self.turns)

    @cached_property
    def instruction_words(self) -> str:
        return f" {_words(self.instruction)} "

    @cached_property
    def rule_words(self) -> str:
        """The words of list items that give an order, like "- Just generate one line at a time"."""
        return " | ".join(f" {_words(line)} " for line in self.instruction.splitlines() if _RULE.match(line))


@dataclass(frozen=True)
class Guard:
    """A named check.

    passes: is a text fine in this conversation? sendable: may a text that fails go out when tries ran out?
    last_resort: what goes out then, instead of the text as it is; nothing, perhaps.
    """

    name: str
    passes: Callable[[str, Conversation], bool]
    sendable: bool = True
    last_resort: Callable[[str, Conversation], str] | None = None


def failed_guard(text: str, guards: Sequence[Guard], conversation: Conversation = Conversation()) -> Guard | None:
    """The first guard that rejects `text`, or None when it can be used."""
    spoken = conversation.spoken(text)
    return next((guard for guard in guards if not guard.passes(spoken, conversation)), None)


def choose_guards(switches: Mapping[str, bool]) -> tuple[Guard, ...]:
    """All guards but those switched off: ``{"role_flip": False}``. Raises RequestError for what is no such switch."""
    if not isinstance(switches, Mapping):
        raise RequestError(f"guards must map names to true or false, not {switches!r}; known: {_known_guards()}")
    for name, on in switches.items():
        if name not in {guard.name for guard in GUARDS}:
            raise RequestError(f"unknown guard {name!r}; known: {_known_guards()}")
        if not isinstance(on, bool):
            raise RequestError(f"guard {name} must be true or false, not {on!r}")
    return tuple(guard for guard in GUARDS if switches.get(guard.name, True))


def named_stop_tokens(system_text: str) -> tuple[str, ...]:
    """The stop tokens a harness's instruction names, in order: capitals between doubled marks, as ``###STOP###``."""
    return tuple(dict.fromkeys(match.group() for match in _STOP_TOKEN.finditer(system_text)))


# --- text alone -------------------------------------------------------------------------------------------------------

_THOUGHT = re.compile(
    r"</?(?:think(?:ing)?|thoughts?|reasoning|reflection|scratchpad)\b|\bthink>|◁/?think▷"
    r"|^[ \t*_#>]{0,6}(?:thoughts?|thinking(?: process)?|reasoning|chain of thought|inner (?:monologue|thoughts?)"
    r"|internal (?:monologue|thoughts?))[*_]{0,3}:"
    # "Okay, the user wants ...": a model that talks to itself about its part
    r"|\A\s{0,9}(?:(?:okay|ok|alright|all right|hmm+|so|well|now|first|right|wait)\b[,.:!… ]{0,4}){0,3}"
    r"(?:let's see[,.:!… ]{1,3})?(?:"
    r"the (?:user|customer)(?:'s (?:message|request)| (?:is|was|wants|has|sa(?:id|ys)|asked|needs|just|might|seems))\b"
    r"|(?:okay|ok|alright|so)\b.{0,3}the (?:agent|assistant) (?:is asking|just asked|has asked|wants me)"
    r"|(?:i|we) (?:need to|should|must|have to) (?:respond|reply|answer|act|speak|write|behave|generate|produce|output"
    r"|simulate|role-?play|stay|continue) (?:as\b|like\b|in character|with an?\b|one\b|only\b|the (?:user|customer))"
    r"|as the (?:user|customer),? (?:i|we) (?:should|need|must|have to|will)"
    r"|let me (?:think about (?:how|what) (?:to|the|i should)|craft|draft|compose|role-?play))",
    re.IGNORECASE | re.MULTILINE,
)

_SPECIAL_TOKEN = re.compile(
    r"<[|｜]|[|｜]>|<</?sys|\bim_(?:start|end)\b|\ufffd|▁"
    r"|</?(?:s|bos|eos|pad|unk|sep|cls|mask|sys|inst|start_of_turn|end_of_turn|im_start|im_end|tools?|tool_calls?"
    r"|tool_response|function|unused\d+|extra_id_\d+|0x[0-9a-f]{2})(?:[= ][^<>]{0,60})?/?>"
    r"|\[/?(?:inst|sys|system_prompt|tool_calls?|tool_results|available_tools|gmask|cls|sep|mask|pad|unk)\]"
    # a transcript's own headers, at the beginning of a line
    r"|^[ \t>*_#\"']{0,8}(?:assistant|user|system|agent|customer|human|ai|bot|support(?: agent)?|representative|rep"
    r"|operator|customer (?:service|support)(?: \w{1,20})?|simulated user|user response)[ \t]{0,3}[*_]{0,3}:(?!//)",
    re.IGNORECASE | re.MULTILINE,
)
_ROLE_LINE = re.compile(r"^(?:assistant|user|system)[ \t]{0,9}$", re.MULTILINE)


def _is_visible(text: str, _: Conversation) -> bool:
    """Whether anything would be seen: neither white space nor control, format or unassigned characters alone."""
    return any(unicodedata.category(character)[0] not in "ZC" for character in text)


def _is_said_aloud(text: str, _: Conversation) -> bool:
    return not _THOUGHT.search(text)


def _is_free_of_special_tokens(text: str, _: Conversation) -> bool:
    return not (_SPECIAL_TOKEN.search(text) or _ROLE_LINE.search(text))


# --- stop tokens ------------------------------------------------------------------------------------------------------

_MARKS = "#$%@|~"
_STOP_TOKEN = re.compile(
    rf"(?<![{_MARKS}])(([{_MARKS}])\2+)[A-Z][A-Z0-9_-]*\1(?!\2)"
    r"|(?<!\[)\[\[[A-Z][A-Z0-9_-]*\]\](?!\])|(?<!<)<<[A-Z][A-Z0-9_-]*>>(?!>)"
)
# "### STOP ###", "###STOPP", "STOP##": what becomes of a token that a model misspells.
_TOKEN_DEBRIS = re.compile(r"##[ \t]{0,3}[A-Za-z]|[A-Za-z]##|[A-Z]{2}[ \t]{1,3}##|#[A-Z][A-Z_-]+#")
_CUT = re.compile(r"(?<!#)#+[ \t]{0,3}[A-Z][A-Z_-]+(?!\w)(?:[ \t]{0,3}#+)?|(?<![\w-])[A-Z][A-Z_-]+[ \t]{0,3}##+|##+")
_ENDS = re.compile(r"(?<![A-Z])(?:STOP|END|DONE|EXIT|QUIT|FINISH|COMPLETE|TERMINATE)")
_CONFIRM = re.compile(
    r"\b(?:yes|y) ?(?:/|or) ?(?:no|n)\b|(?:reply|respond|answer|type|say|confirm)(?: with)?(?: an?)? \"?yes\b"
    r"|\byou (?:please )?(?:confirm|agree|approve|consent)\b|(?:please|kindly) confirm"
    r"|\bshall (?:i|we)\b|\b(?:should|may) (?:i|we) (?:proceed|go ahead|book|cancel|process|place|submit|make|apply)"
    r"|\b(?:me|us) to (?:proceed|go ahead|continue|cancel|book|process|place|submit|finali[sz]e|complete|make th)"
    r"|(?:ready|okay|ok|happy|like|want|wish) to (?:proceed|go ahead)|\bproceed\?"
    r"|\bwould you like (?:that|this|it)(?: instead| now)?\?"
    r"|\b(?:is|does|do|are|would) (?:that|this|everything|these|it|all of this) (?:\w+ ){0,2}"
    r"(?:correct|right|ok|okay|fine|alright|work|good)(?: \w+){0,3}\?"
)
_CLOSING = re.compile(r"\b(?:anything|something) else\b|\bany(?:thing)? (?:other|further|more)\b|\bother questions\b")


def _keeps_to_stop_tokens(text: str, conversation: Conversation) -> bool:
    """A named token stands alone, and not on the customer's first turn; nothing else looks like a token."""
    tokens = conversation.legal_tokens
    if text.strip() in tokens:
        return any(conversation.said_by("customer"))
    if _TOKEN_DEBRIS.search(text) or _STOP_TOKEN.search(text) or any(token in text for token in tokens):
        return False
    bare = text.strip().strip(_MARKS + "*_'\"`[]<>.! ")
    names = [token.strip(_MARKS + "[]<>") for token in tokens]
    return not any(
        name and (name == bare or token[0] + name in text or name + token[-1] in text)
        for token, name in zip(tokens, names, strict=True)
    )


def _stops_in_time(text: str, conversation: Conversation) -> bool:
    """Whether a conversation is not ended while the agent waits for a yes or no to go on."""
    if text.strip() not in conversation.legal_tokens or not _ENDS.search(text):
        return True
    question = " ".join(_straight(conversation.question).lower().split())
    sentences = re.findall(r"[^.!?]+[.!?]*", question)
    return not any(_CONFIRM.search(sentence) and not _CLOSING.search(sentence) for sentence in sentences)


def _without_stop_tokens(text: str, conversation: Conversation) -> str:
    while any(token in text for token in conversation.legal_tokens):  # cutting one out can join another
        for token in conversation.legal_tokens:
            text = text.replace(token, " ")
    text = re.sub(r"[ \t]{2,}", " ", _CUT.sub(" ", _STOP_TOKEN.sub(" ", text))).strip()
    return text if re.search(r"\w", text) and _keeps_to_stop_tokens(text, conversation) else ""


# --- the conversation -------------------------------------------------------------------------------------------------

_SHORT_ANSWER = re.compile(r"(?:yes|yeah|yep|no|nope|ok|okay|sure|thanks|thank|correct|right|please)\b")
_RUN = 8  # words; fewer occur by chance
_ADDRESSED = re.compile(
    r"\b(?:you|yours?|yourself|instructions?|generate|simulat\w+|hallucinat\w+|user(?! (?:id|name))|role-?play|persona"
    r"|personalit\w+|character|conversation|standalone|scenario|agent)\b"
)
_RULE = re.compile(
    r"[ \t]{0,8}(?:[-*•]|\d{1,2}[.)])[ \t]{0,4}\W{0,3}(?:do|don't|never|always|just|only|try|if|be|make|use|keep|avoid"
    r"|generate|respond|reply|answer|write|stick|stay|speak|send|remember|act|provide|disclose|ensure|when)\b",
    re.IGNORECASE,
)


def _straight(text: str) -> str:
    return text.replace("’", "'").replace("“", '"').replace("”", '"')


def _words(text: str) -> str:
    return " ".join(re.findall(r"\w+(?:'\w+)*", _straight(text).casefold()))


def _is_new(text: str, conversation: Conversation) -> bool:
    """Whether a turn of more than a few words is neither an earlier one nor the agent's last, word for word."""
    line = _words(text)
    words = line.split()
    if len(words) <= 3:
        return True
    if line == conversation.question_words:
        return False
    return line not in conversation.customer_lines or (len(words) <= 6 and bool(_SHORT_ANSWER.match(line)))


def _invents_no_identifier(text: str, conversation: Conversation) -> bool:
    return not conversation.turns or not unknown_identifiers(text, conversation.known)


def _speaks_for_itself(text: str, conversation: Conversation) -> bool:
    """Whether no run of the instruction's own words is said: facts may be, "you want ..." and rules may not."""
    words = _words(text).split()
    for start in range(len(words) - _RUN + 1):
        run = f" {' '.join(words[start : start + _RUN])} "
        if run in (conversation.instruction_words if _ADDRESSED.search(run) else conversation.rule_words):
            return False
    return True


# The worst first: what crashes or ends an episode, what misleads the agent, what is merely poor.
GUARDS: tuple[Guard, ...] = (
    # A harness shows an empty turn to the agent, or loses the episode.
    Guard("empty", _is_visible, sendable=False),
    # A reasoning model's thoughts, closed, unclosed or cut off, are not for the agent.
    Guard("thought", _is_said_aloud, sendable=False),
    Guard("special_token", _is_free_of_special_tokens, sendable=False),
    # Harnesses look for the token anywhere in the text, and drop what stands beside it.
    Guard("stop_token", _keeps_to_stop_tokens, last_resort=_without_stop_tokens),
    Guard("stop_early", _stops_in_time, last_resort=_without_stop_tokens),
    Guard("role_flip", lambda text, _: not is_role_flip(text)),
    # The agent would look it up.
    Guard("unknown_identifier", _invents_no_identifier),
    Guard("instruction_leak", _speaks_for_itself),
    Guard("punctuation", lambda text, _: not has_runaway_punctuation(text)),
    # Small models loop, and steered ones sooner; another draw usually does not.
    Guard("broken", lambda text, _: not is_broken(text)),
    Guard("repeat", _is_new),
)


def _known_guards() -> str:
    return ", ".join(guard.name for guard in GUARDS)
