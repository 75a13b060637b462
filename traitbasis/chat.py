"""Conversations as prompts: who is speaking, and where exactly in the token sequence.

Two views of the same roles meet here. A harness asks *us* to play its user, so on the wire the simulated customer is
``assistant`` and the agent under test is ``user``. Inside the package nobody is called either: a turn's speaker is
``system``, ``agent`` or ``customer``. When a prompt is rendered, the customer's turns can stand under the template's
user header (``as_="user"``) or under its assistant header (``as_="assistant"``); small chat models play a customer
far better under the user header (docs/design.md, "Who is speaking").
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase

from traitbasis.errors import ChatTemplateError, RequestError

Speaker = Literal["system", "agent", "customer"]
As = Literal["user", "assistant"]
Span = Literal["response", "conversation"]

_WIRE_SPEAKERS: dict[str, Speaker] = {
    "system": "system",
    "developer": "system",
    "user": "agent",
    "tool": "agent",
    "function": "agent",
    "assistant": "customer",
}
_MARK = "\u2021traitbasis-reply\u2021"  # stands for the reply while a template is rendered, then is cut away
_THOUGHT_END = "</think>"
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
# Llama 3.x templates print today's date otherwise, and the same request would change overnight (contract 9).
_TEMPLATE_ARGUMENTS = {"date_string": "26 Jul 2024", "enable_thinking": False}


@dataclass(frozen=True)
class Turn:
    """One message of a conversation."""

    speaker: Speaker
    text: str


@dataclass(frozen=True)
class TokenizedReply:
    """A conversation with a reply, tokenised as one string.

    ids: token ids of the whole text.
    positions: indices into `ids` of the tokens that count (content only: no template token, never token 0).
    """

    ids: tuple[int, ...]
    positions: tuple[int, ...]


def check_choice(name: str, value: Any, choices: Any) -> None:
    """Raises RequestError when `value` is none of a Literal's; a misspelt one must not become the default."""
    if value not in get_args(choices):
        raise RequestError(f"{name} is {value!r}; known: {', '.join(get_args(choices))}")


def read_messages(messages: Iterable[Mapping[str, Any]]) -> list[Turn]:
    """Turn a harness's chat-completions messages into speaker turns.

    Unknown keys are ignored. System texts are joined and put first, consecutive turns of one speaker are joined,
    messages without text are dropped. Content is a string, null, missing, or a list of text parts.
    Raises RequestError naming the message for an unknown role or another kind of content.
    """
    if not isinstance(messages, Iterable) or isinstance(messages, str | bytes | Mapping):
        raise RequestError(f"messages must be a list of messages, not {type(messages).__name__}")
    system: list[str] = []
    turns: list[Turn] = []
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise RequestError(f"messages[{number}] must be an object with a role and content, not {message!r}")
        role = message.get("role")
        if not isinstance(role, str) or role not in _WIRE_SPEAKERS:
            raise RequestError(f"messages[{number}].role is {role!r}; known roles: {', '.join(_WIRE_SPEAKERS)}")
        text = _content_text(message.get("content"), number)
        if _LONE_SURROGATE.search(text):  # JSON can carry one; no tokenizer takes it
            raise RequestError(f"messages[{number}].content has half of a surrogate pair, which is no character")
        if not text.strip():
            continue
        speaker = _WIRE_SPEAKERS[role]
        if speaker == "system":
            system.append(text)
        elif turns and turns[-1].speaker == speaker:
            turns[-1] = Turn(speaker, f"{turns[-1].text}\n\n{text}")
        else:
            turns.append(Turn(speaker, text))
    return [Turn("system", "\n\n".join(system)), *turns] if system else turns


def render_prompt(tokenizer: PreTrainedTokenizerBase, turns: Sequence[Turn], as_: As) -> str:
    """Text of the conversation up to the point where the customer's next message begins.

    When there is no system turn an empty one is rendered, so that no template can put "You are a helpful assistant"
    there. Templates without a system role get its text as (part of) the first turn. Special tokens written out in a
    turn's text are broken up with a space, since they would be read as the template's own.
    Raises ChatTemplateError when the template is missing or refuses the conversation.
    """
    check_choice("as_", as_, As)
    if not getattr(tokenizer, "chat_template", None):
        raise ChatTemplateError(
            f"{tokenizer.name_or_path or 'this tokenizer'} has no chat template; use an instruction-tuned model"
        )
    roles = {"system": "system", "agent": "assistant", "customer": "user"}
    if as_ == "assistant":
        roles |= {"agent": "user", "customer": "assistant"}
    messages = [{"role": roles[turn.speaker], "content": _plain(tokenizer, turn.text)} for turn in turns]
    if not turns or turns[0].speaker != "system":
        messages.insert(0, {"role": "system", "content": ""})
    if as_ == "user":
        messages.append({"role": "user", "content": _MARK})

    failure: Exception | None = None
    for candidate in (messages, _alternating(messages)):
        try:
            text = _apply_template(tokenizer, candidate, add_generation_prompt=as_ == "assistant")
        except (TemplateError, TypeError, ValueError) as error:
            failure = failure or error
            continue
        # Some templates drop a turn they do not expect without a word. Thoughts, where they drop those, are no loss.
        missing = [m["content"] for m in candidate if m["content"].rpartition(_THOUGHT_END)[2].strip() not in text]
        if not missing:
            return text[: text.rindex(_MARK)] if as_ == "user" else text
        failure = failure or ValueError(f"it leaves out {missing[0][:60]!r}")
    raise ChatTemplateError(f"the chat template of {tokenizer.name_or_path} refuses this conversation: {failure}")


def tokenize(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of a rendered text. The template has written the special tokens, so none are added."""
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def tokenize_reply(
    tokenizer: PreTrainedTokenizerBase, turns: Sequence[Turn], reply: str, as_: As, span: Span = "response"
) -> TokenizedReply:
    """Tokenise a conversation with `reply` as the customer's next message, and find the tokens that count.

    ``span="response"``: the reply's tokens (after ``</think>`` where there is one). ``span="conversation"``: the
    content tokens of every turn and of the reply, as in the paper's formula (section 3). Template tokens and token 0,
    whose residual norm is a hundred times the others', never count. The span is found by character offsets in one
    rendered string and checked by decoding it back.
    Raises ChatTemplateError when the span is empty or does not decode to the text.
    """
    check_choice("span", span, Span)
    prompt = render_prompt(tokenizer, turns, as_)
    reply = _plain(tokenizer, reply).strip()
    text = prompt + reply
    begin = len(prompt) + (reply.rfind(_THOUGHT_END) + len(_THOUGHT_END) if _THOUGHT_END in reply else 0)
    begin += len(text[begin:]) - len(text[begin:].lstrip())
    spans = [(begin, len(text))]
    if span == "conversation":
        spans = [*_content_spans(tokenizer, prompt, turns, as_), *spans]

    encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids, offsets = list(encoding["input_ids"]), list(encoding["offset_mapping"])
    positions: list[int] = []
    for start, end in spans:
        # A token counts when at least one of its characters does; offsets of some tokenizers include a leading space.
        found = [i for i, (left, right) in enumerate(offsets) if i and max(left, start) < min(right, end)]
        decoded = tokenizer.decode([ids[i] for i in found], clean_up_tokenization_spaces=False)
        if not found or _letters(text[start:end]) != _letters(decoded):
            raise ChatTemplateError(
                f"the tokens of {text[start:end][:60]!r} cannot be found in the rendered conversation "
                f"(they decode to {decoded[:60]!r})"
            )
        positions.extend(found)
    return TokenizedReply(tuple(ids), tuple(positions))


def stop_token_ids(
    tokenizer: PreTrainedTokenizerBase, as_: As, model_eos: int | Sequence[int] | None
) -> frozenset[int]:
    """Tokens that end the customer's turn: the model's own end tokens, and the one that closes the turn's header."""
    eos = [model_eos] if isinstance(model_eos, int) else list(model_eos or ())
    if tokenizer.eos_token_id is not None:
        eos.append(int(tokenizer.eos_token_id))
    # The conversation that every template accepts, with the customer's turn under the header it will be written under.
    messages = [{"role": role, "content": role} for role in ("user", "assistant", "user")]
    messages[2 if as_ == "user" else 1]["content"] = _MARK
    try:
        text = _apply_template(tokenizer, messages)
    except (TemplateError, TypeError, ValueError):
        try:  # some insist on a system turn
            text = _apply_template(tokenizer, [{"role": "system", "content": "system"}, *messages])
        except (TemplateError, TypeError, ValueError) as error:
            raise ChatTemplateError(
                f"the chat template of {tokenizer.name_or_path} refuses a dialogue: {error}"
            ) from error
    for token in tokenize(tokenizer, text[text.rindex(_MARK) + len(_MARK) :]):
        if tokenizer.convert_ids_to_tokens(token) in _special_tokens(tokenizer):
            eos.append(token)
            break
        if tokenizer.decode([token]).strip():  # white space may come before it, as in Mistral's " [/INST]"
            break
    return frozenset(eos)


def template_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """SHA-256 of the chat template; artifacts made under another template are refused (contract 7)."""
    return hashlib.sha256(str(tokenizer.chat_template).encode()).hexdigest()


def _content_text(content: Any, number: int) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(part, Mapping) for part in content):
        other = next((part for part in content if part.get("type", "text") not in ("text", "input_text")), None)
        if any(not isinstance(part.get("text", ""), str | None) for part in content):
            raise RequestError(f"messages[{number}].content has a part whose text is no string")
        if other is None:
            return "".join(part.get("text") or "" for part in content)
        raise RequestError(f"messages[{number}].content has a part of type {other.get('type')!r}; only text is read")
    raise RequestError(f"messages[{number}].content must be a string, null, or a list of text parts")


def _apply_template(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]], add_generation_prompt: bool = False
) -> str:
    return str(
        tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=add_generation_prompt, **_TEMPLATE_ARGUMENTS
        )
    )


def _alternating(messages: list[dict[str, str]]) -> list[dict[str, str]]:
    """The same conversation for a template without a system role that insists on user, assistant, user, …."""
    system, *rest = messages
    turns: list[dict[str, str]] = []
    if system["content"] or not rest or rest[0]["role"] != "user":
        turns.append({"role": "user", "content": system["content"] or "Hello."})
    for message in rest:
        if turns and turns[-1]["role"] == message["role"]:
            turns[-1] = {"role": message["role"], "content": f"{turns[-1]['content']}\n\n{message['content']}"}
        else:
            turns.append(message)
    return turns


def _content_spans(
    tokenizer: PreTrainedTokenizerBase, prompt: str, turns: Sequence[Turn], as_: As
) -> list[tuple[int, int]]:
    """Where each turn's text stands in `prompt`. The same conversation of numbered marks shows what the template
    writes around them: searching for the texts would find "user" in a header, or miss a template's own order."""
    marks = [Turn(turn.speaker, f"\u2021turn-{i}\u2021") for i, turn in enumerate(turns)]
    between = re.split("\u2021turn-([0-9]+)\u2021", render_prompt(tokenizer, marks, as_))
    spans: list[tuple[int, int]] = []
    at = len(between[0])
    for number, after in zip(between[1::2], between[2::2], strict=True):
        content = _plain(tokenizer, turns[int(number)].text)
        shown = next((text for text in (content, content.strip()) if prompt.startswith(text + after, at)), None)
        if shown is None:
            raise ChatTemplateError(f"the text {content[:60]!r} cannot be found in the rendered conversation")
        begin = at + len(shown) - len(shown.lstrip())
        if shown.strip():
            spans.append((begin, begin + len(shown.strip())))
        at += len(shown) + len(after)
    return spans


def _special_tokens(tokenizer: PreTrainedTokenizerBase) -> set[str]:
    added = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
    return added | set(tokenizer.all_special_tokens)


def _plain(tokenizer: PreTrainedTokenizerBase, text: str) -> str:
    """`text` with a space in every special token that is written out in it, so that it is read as text."""
    special = sorted(_special_tokens(tokenizer), key=len, reverse=True)
    pattern = re.compile("|".join(map(re.escape, special)))
    while special and pattern.search(text):  # again for tokens that overlap; a space joins nothing
        text = pattern.sub(lambda match: f"{match[0][0]} {match[0][1:]}" if len(match[0]) > 1 else "", text)
    return text


def _letters(text: str) -> str:
    """Text without white space, compatibility forms folded: what survives any tokeniser's normalisation."""
    return "".join(unicodedata.normalize("NFKC", text).split())
