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
from typing import Literal

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

    def prepare(self) -> None:
        """Works out all that depends on the conversation alone, so that the guards need not in the engine's thread."""
        for name, value in vars(Conversation).items():
            if isinstance(value, cached_property):
                getattr(self, name)

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
    def token_pattern(self) -> re.Pattern[str] | None:
        """Any stop token in a text; one made of letters and digits as a word of its own. None without tokens."""
        if not self.legal_tokens:
            return None
        longest_first = sorted(self.legal_tokens, key=len, reverse=True)
        return re.compile(
            "|".join(
                rf"(?<!\w){re.escape(token)}(?!\w)" if _is_word(token) else re.escape(token) for token in longest_first
            )
        )

    @cached_property
    def awaited(self) -> Literal["no", "perhaps", "yes"]:
        """Whether the agent's last turn waits for a yes or no to go on."""
        return _awaited(self.question)

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
    """The stop tokens a harness's instruction names, in order: capitals between doubled marks, as ``###STOP###``.

    ``<END>``, ``[DONE]``, ``***DONE***``, ``__DONE__`` and ``##Exit##`` may be markup or placeholders as well: they
    count where their sentence says to generate, send or end with them, and their name means an end.
    """
    found = [(match.start(), match.group()) for match in _STOP_TOKEN.finditer(system_text)]
    tags = set(re.findall(r"</([A-Z][A-Z_-]{1,30}>)", system_text))
    for match in _TOLD_TOKEN.finditer(system_text):
        before = _SENTENCE_END.split(system_text[max(0, match.start() - 160) : match.start()])[-1]
        after = _SENTENCE_END.split(system_text[match.end() : match.end() + 160])[0]
        quoted = before[-1:] in _QUOTES and before[-1:] == after[:1]
        if (
            _TO_SEND.search(before)
            and match.group()[1:] not in tags
            and (not _NOT_TO.search(before) or _YET.search(before + after))
            and (_END_NAME.search(match.group()) or (quoted and _TO_END.search(before + after)))
        ):
            found.append((match.start(), match.group()))
    return tuple(dict.fromkeys(token for _, token in sorted(found)))


# --- text alone -------------------------------------------------------------------------------------------------------

_THOUGHT = re.compile(
    r"</?(?:think(?:ing)?|thoughts?|reasoning|reflection|scratchpad)\b|\bthink>|◁/?think▷", re.IGNORECASE
)
_SPECIAL_TOKEN = re.compile(
    r"<[|｜]|[|｜]>|<</?sys|\bim_(?:start|end)\b|\ufffd|▁"
    r"|</?(?:s|bos|eos|pad|unk|sep|cls|mask|sys|inst|start_of_turn|end_of_turn|im_start|im_end|tools?|tool_calls?"
    r"|tool_response|function|unused\d+|extra_id_\d+|0x[0-9a-f]{2})(?:[= ][^<>]{0,60})?/?>"
    r"|\[/?(?:inst|system_prompt|tool_calls|tool_results|available_tools|gmask)\]|\[/sys\]"
    r"|(?-i:\[(?:CLS|SEP|MASK|PAD|UNK)\])",
    re.IGNORECASE,
)
_BLANK = frozenset("\u115f\u1160\u2800\u3164\uffa0")  # Hangul fillers and the empty Braille cell: letters, symbols


def _is_visible(text: str, _: Conversation) -> bool:
    """Whether anything would be seen: not white space, control, format, filler or unassigned characters alone, nor
    marks that stand on no letter."""
    return any(unicodedata.category(character)[0] not in "ZCM" and character not in _BLANK for character in text)


def _is_said_aloud(text: str, _: Conversation) -> bool:
    return not _THOUGHT.search(text)


def _is_free_of_special_tokens(text: str, _: Conversation) -> bool:
    return not _SPECIAL_TOKEN.search(text)


# --- prose that a customer would not write ----------------------------------------------------------------------------

_FILLERS = (
    r"(?:(?:okay|ok|alright|all right|hmm+|so|well|now|first|right|wait)\b[,.:!… ]{0,4}){0,3}"
    r"(?:let's see[,.:!… ]{1,3})?"
)
_TO_ANSWER = (
    r"(?:ask|answer|reply|respond|give|provide|tell|act|stay|confirm|express|generate|simulate|mention|explain|follow"
    r"|write|be\b(?! (?:able|\w+ed\b)))"
)
_ROLE = r"(?:user|customer)(?!'s|\w| (?:service|support|care))"
# "Okay, the user wants ...": a model that talks to itself about its part
_REASONING = re.compile(
    r"\A[ \t*_#>]{0,6}(?:thoughts?|thinking|reasoning)[*_]{0,3}:"
    r"|^[ \t*_#>]{0,6}(?:thinking process|chain of thought|(?:inner|internal) (?:monologue|thoughts?))[*_]{0,3}:"
    rf"|\A\s{{0,9}}{_FILLERS}(?:"
    r"(?:i|we) (?:need to|should|must|have to) (?:"
    r"(?:respond|reply|answer|act|speak|write|behave|role-?play|continue|produce|generate|output)(?: \w+){0,4}?"
    rf" (?:as|like) (?:an?|the|this) (?:\w+ ){{0,3}}?(?:{_ROLE}|persona\b)"
    r"|(?:respond|reply|answer|speak|stay|continue|act) in character\b"
    rf"|(?:simulate|role-?play|act|play) (?:the {_ROLE}|as (?:the|an?) (?:\w+ )?{_ROLE})"
    r"|(?:generate|produce|output) (?:only |just )?(?:one|a single|a short|the next) (?:\w+ )?(?:line|message|sentence"
    r"|reply|turn|utterance))"
    rf"|as the {_ROLE},? (?:i|we) (?:should|need to|will) (?:\w+ly |just |now )?{_TO_ANSWER}"
    r"|let me (?:think about (?:how|what) (?:to|i should) (?:reply|respond|answer|say|write)"
    r"|(?:craft|draft|compose) (?:an?|the|my|this) (?:\w+ ){0,2}?(?:response|reply|message|answer|line)\b"
    r"|role-?play))",
    re.IGNORECASE | re.MULTILINE,
)
# The opening sentence speaks of the user, and is no question ...
_THIRD_PERSON = re.compile(
    rf"\A\s{{0,9}}(?P<fillers>{_FILLERS})the (?:"
    r"(?P<said>(?:user|customer)(?:'s (?:message|request)| (?:(?:has |is |just ){0,2}(?:asked|asking|said|says|wants)))"
    r"\b)"
    r"|(?:user|customer) (?:is|was|has|needs|just|might|seems)\b"
    r"|(?:agent|assistant) (?:is asking|just asked|has asked|asked|asks|wants))(?P<rest>[^.!?\n]{0,300}[.!?\n]?)",
    re.IGNORECASE,
)
# ... and what to answer comes next.
_PLAN = re.compile(
    rf"\b(?:i|we)(?:'ll| (?:should|need to|must|have to|will|am going to)) (?:\w+ly |just |now |also )?{_TO_ANSWER}"
    r"|\b(?:my|the) (?:response|reply|answer) (?:should|must|needs|will)|\bin character\b"
    rf"|\bas the {_ROLE}|\blet me (?:reply|respond|answer|write|craft)",
    re.IGNORECASE,
)

_SAYS = (  # how a speaker's line begins, and a value ("User: mia_li_3668") does not
    r"(?:i|i'm|i've|i'd|i'll|you|your|my|we|it|it's|this|that|that's|there|yes|yeah|no|nope|hello|hi|hey|good|thanks"
    r"|thank|please|sure|ok|okay|well|sorry|great|of course|absolutely|certainly|alright|what|where|when|how|why|who"
    r"|which|can|could|would|will|may|is|are|do|does|did|have|let|the|unfortunately|actually|just|but|and|so|if)\b(?![-_@])"
)
_LABEL = re.compile(
    r"^[ \t>*_#\"']{0,8}(?:(?P<never_a_detail>human|ai|simulated user|user response)|user|customer"
    r"|(?P<agent>assistant|agent|bot|support(?: agent)?|representative|rep|operator"
    r"|customer (?:service|support)(?: \w{1,20})?))[ \t]{0,3}[*_]{0,3}:(?!//)[*_ \t]{0,6}(?P<line>.*)",
    re.IGNORECASE | re.MULTILINE,
)
_SPEECH = re.compile(
    rf"\"?(?:{_SAYS}|[a-z']{{2,20}} (?!said|told|was|promised|from|since|at|called|with|in|on|and)[a-z']{{1,20}}\b"
    r"[^\n]{0,400}[.?!]\"?\s*$)",
    re.IGNORECASE,
)
_SYSTEM_LINE = re.compile(
    r"^[ \t>*_#]{0,8}system[ \t]{0,3}[*_]{0,3}:[*_ \t]{0,6}you(?: are|'re)\b", re.I | re.MULTILINE
)
_ROLE_LINE = re.compile(r"\A\s{0,9}(?:assistant|user|system)[ \t]{0,9}\n|^assistant[ \t]{0,9}$", re.MULTILINE)


def _is_no_reasoning(text: str, _: Conversation) -> bool:
    """Whether a turn does not begin with what a model says to itself about its part."""
    text = _straight(text[:1000])
    if _REASONING.search(text):
        return False
    opening = _THIRD_PERSON.match(text)
    if not opening or opening["rest"].endswith("?"):
        return True
    return not (opening["fillers"] and opening["said"]) and not _PLAN.search(text, opening.start("rest"))


def _is_one_speakers(text: str, _: Conversation) -> bool:
    """Whether a turn is no transcript: it neither begins with a speaker's label nor goes on as another speaker."""
    if _ROLE_LINE.search(text) or _SYSTEM_LINE.search(text):
        return False
    sides, speech = set(), False
    for label in _LABEL.finditer(text):
        line = label["line"] or text[label.end() : label.end() + 400].lstrip().partition("\n")[0]
        says = bool(_SPEECH.match(_straight(line[:500])))
        before = text[max(0, label.start() - 80) : label.start()].rstrip()
        if not before and (says or label["never_a_detail"]):
            return False
        if before and not before.endswith(":") and says and label["agent"]:  # after a colon the customer quotes
            return False
        sides.add("agent" if label["agent"] else "customer")
        speech = speech or says
    return not (speech and len(sides) == 2)


# --- stop tokens ------------------------------------------------------------------------------------------------------

_MARKS = "#$%@|~"
_TRIM = _MARKS + "[]<>*_"  # around the name in a token
_STOP_TOKEN = re.compile(
    rf"(?<![{_MARKS}])(([{_MARKS}])\2+)[A-Z][A-Z0-9_-]*\1(?!\2)"
    r"|(?<!\[)\[\[[A-Z][A-Z0-9_-]*\]\](?!\])|(?<!<)<<[A-Z][A-Z0-9_-]*>>(?!>)"
)
# What is a stop token only where the instruction says so.
_TOLD_TOKEN = re.compile(
    r"(?<![<\w])<[A-Z][A-Z_-]{1,30}>(?!>)|(?<![\[\w])\[[A-Z][A-Z_-]{1,30}\](?![\](])"
    r"|(?<!\*)\*{3}[A-Z][A-Za-z_-]{1,30}\*{3}(?!\*)|(?<!\w)__[A-Z]+(?:_[A-Z]+)*__(?!\w)"
    rf"|(?<![{_MARKS}])(?P<marks>(?P<mark>[{_MARKS}])(?P=mark)+)[A-Za-z][A-Za-z0-9_-]{{0,30}}(?P=marks)(?!(?P=mark))"
)
_QUOTES = ("'", '"', "`", "*")
_SENTENCE_END = re.compile(r"[.!?](?:\s|$)|\n[ \t]*(?:\n|[-•][ \t]|\d{1,2}[.)])")
_TO_SEND = re.compile(
    r"\b(?:generate|say|output|send|emit|write|type|print|reply|respond|answer|issue|utter|produce|message"
    r"|(?:end|finish|close|conclude)s?\b[^\n]{0,80}\b(?:with|by)|(?:sending|saying|generating|outputting|typing|writing))\b",
    re.IGNORECASE,
)
_NOT_TO = re.compile(r"\b(?:never|not|don't|avoid|without|refrain)\b", re.IGNORECASE)
_YET = re.compile(r"\b(?:before|until|unless|too early)\b", re.IGNORECASE)
_END_NAME = re.compile(
    r"(?<![a-z])(?:stop|end(?:_(?:of_)?(?:conversation|chat|call|dialog(?:ue)?))?|done|exit|quit|finish(?:ed)?"
    r"|completed?|terminated?|(?:good)?bye|closed?|hang[_-]?up|over|transfer|out-of-scope|(?:un)?satisfied|resolved)"
    r"(?:_(?:conversation|chat|call|dialog(?:ue)?))?(?![a-z-]|_[a-z])",
    re.IGNORECASE,
)
_TO_END = re.compile(
    r"\b(?:end|finish|stop|conclude|terminate|close|leave|exit)s? (?:the |this |your )?(?:\w+ )?(?:conversation|chat"
    r"|call|dialog(?:ue)?|session|discussion|interaction)\b",
    re.IGNORECASE,
)
# "### STOP ###", "###STOPP", "STOP##": what becomes of a token that a model misspells.
_TOKEN_DEBRIS = re.compile(r"##[ \t]{0,3}[A-Za-z]|[A-Za-z]##|[A-Z]{2}[ \t]{1,3}##|#[A-Z][A-Z_-]+#")
_CUT = re.compile(r"(?<!#)#+[ \t]{0,3}[A-Z][A-Z_-]+(?!\w)(?:[ \t]{0,3}#+)?|(?<![\w-])[A-Z][A-Z_-]+[ \t]{0,3}##+|##+")
_ENDS = re.compile(r"(?<![A-Z])(?:STOP|END|DONE|EXIT|QUIT|FINISH|COMPLETE|TERMINATE|BYE|GOODBYE)")
_CONFIRM = re.compile(
    r"\b(?:yes|y) ?(?:/|or) ?(?:no|n)\b|(?:reply|respond|answer|type|say|confirm)(?: with)?(?: an?)? \"?yes\b"
    r"|\byou (?:please )?(?:confirm|agree|approve|consent)\b|(?:please|kindly) confirm"
    r"|\bshall (?:i|we)\b|\b(?:should|may) (?:i|we) (?:proceed|go ahead|book|cancel|process|place|submit|make|apply)"
    r"|\b(?:me|us) to (?:proceed|go ahead|continue|cancel|book|process|place|submit|finali[sz]e|complete|make th)"
    r"|(?:ready|okay|ok|happy|like|want|wish) to (?:proceed|go ahead)|\bproceed\?"
    r"|\bwould you like (?:that|this|it)(?: instead| now)?\?"
    r"|\b(?:is|are) (?:that|this|everything|these|it|all of this) (?:\w+ ){0,2}(?:correct|right)(?: \w+){0,3}\?"
)
_OKAY = re.compile(
    r"\b(?:is|does|do|are|would) (?:that|this|everything|these|it|all of this) (?:\w+ ){0,2}"
    r"(?:ok|okay|fine|alright|work|good)(?: \w+){0,3}\?"
)
_CLOSING = re.compile(
    r"\b(?:anything|something) else\b|\bany(?:thing)? (?:other|further|more)\b|\bother questions\b"
    r"|\bclose (?:this|the|your|our) (?:\w+ )?(?:chat|conversation|ticket|case|session)\b"
    r"|\b(?:end|close) (?:this|the|our) (?:chat|conversation|call|session)\b"
    r"|\bconfirm (?:that |if |whether )?(?:you(?:'ve| have)? (?:\w+ )?(?:received?|got|get|see)|receipt)\b"
)
_COMPLETED = re.compile(
    r"^ ?(?:all |it's |it is )?(?:done|transferred|cancel+ed|completed?|processed|finished|refunded)\b"
    r"|(?:\b(?:is|are|was|were|has|have|i|we)|'ve) (?:now |already |just |successfully |been ){0,3}(?:done|cancel+ed"
    r"|processed|refunded|transferred|completed?|booked|updated|issued|placed|changed|submitted|sent|exchanged|returned"
    r"|shipped|credited|closed|filed|set up|moved)\b"
)
_NOT_YET = re.compile(r"\b(?:once|when|after|before|if|will|would|can|not|until)\b")


def _keeps_to_stop_tokens(text: str, conversation: Conversation) -> bool:
    """A named token stands alone, and not on the customer's first turn; nothing else looks like a token."""
    tokens = conversation.legal_tokens
    if text.strip() in tokens:
        return any(conversation.said_by("customer"))
    if _TOKEN_DEBRIS.search(text) or _STOP_TOKEN.search(text):
        return False
    if conversation.token_pattern and conversation.token_pattern.search(text):
        return False
    bare = text.strip().strip(_TRIM + "'\"`. !")
    for token in tokens:
        name = token.strip(_TRIM)
        if name and (name == bare or (not _is_word(token) and (token[0] + name in text or name + token[-1] in text))):
            return False
    return True


def _is_word(token: str) -> bool:
    return bool(re.fullmatch(r"\w[\w '-]*\w|\w", token))


def _stops_in_time(text: str, conversation: Conversation) -> bool:
    """Whether a conversation is not ended while the agent waits for a yes or no to go on."""
    ends = text.strip() in conversation.legal_tokens and _ENDS.search(text.upper())
    return not ends or conversation.awaited == "no"


def _awaited(question: str) -> Literal["no", "perhaps", "yes"]:
    sentences = re.findall(r"[^.!?]+[.!?]*", " ".join(_straight(question).lower().split()))
    found: Literal["no", "perhaps", "yes"] = "no"
    reported = False  # by the sentence before: what is done needs no consent
    for place, sentence in enumerate(sentences):
        if _CLOSING.search(sentence):
            found = "no" if found == "no" else "perhaps"
        elif _CONFIRM.search(sentence) or (_OKAY.search(sentence) and not reported):
            found = "yes" if place >= len(sentences) - 3 else "perhaps"
        reported = bool(_COMPLETED.search(sentence)) and not _NOT_YET.search(sentence)
    return found


def _without_stop_tokens(text: str, conversation: Conversation) -> str:
    if conversation.token_pattern:
        for _ in range(2):  # cutting one out can join another
            text = conversation.token_pattern.sub(" ", text)
    text = re.sub(r"[ \t]{2,}", " ", _CUT.sub(" ", _STOP_TOKEN.sub(" ", text))).strip()
    return text if re.search(r"\w", text) and _keeps_to_stop_tokens(text, conversation) else ""


def _leave_or_wait(text: str, conversation: Conversation) -> str:
    """A customer who insists on leaving may, unless the agent does wait: then nothing is said."""
    leaves = text.strip() in conversation.legal_tokens and conversation.awaited == "perhaps"
    return text.strip() if leaves else _without_stop_tokens(text, conversation)


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
    Guard("stop_early", _stops_in_time, last_resort=_leave_or_wait),
    # A model's prose about its part, or a transcript. Ordinary text can look so, hence it may go out.
    Guard("reasoning", _is_no_reasoning),
    Guard("transcript", _is_one_speakers),
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
