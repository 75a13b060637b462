"""Conversations as prompts: who is speaking, and where exactly in the token sequence.

Two views of the same roles meet here. A harness asks *us* to play its user, so on the wire the simulated customer is
``assistant`` and the agent under test is ``user``. Inside the package nobody is called either: a turn's speaker is
``system``, ``agent`` or ``customer``. When a prompt is rendered, the customer's turns can stand under the template's
user header (``as_="user"``) or under its assistant header (``as_="assistant"``); small chat models play a customer
far better under the user header (docs/design.md, "Who is speaking").

A customer may have tools of its own (tau2's telecom domain). Its calls belong to its turns, their results are turns of
the speaker ``tool``. Templates know calls under the assistant header only, so with tools that header is used.
"""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any, Literal, get_args

from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase

from traitbasis.errors import ChatTemplateError, RequestError
from traitbasis.toolcalls import HERMES, MAX_DEPTH, CallSyntax, deeper_than, find_syntax
from traitbasis.toolcalls import ToolCall as ToolCall

Speaker = Literal["system", "agent", "customer", "tool"]
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
# Llama 3.x takes the first turn after the system's for the one that carries the tools, whoever speaks it.
_TOOL_TEMPLATE_ARGUMENTS = {"tools_in_user_message": False}
# How a template writes a call, by template; found by rendering.
_SYNTAXES: dict[str, CallSyntax | None] = {}


@dataclass(frozen=True)
class Turn:
    """One message of a conversation. calls: of a customer's turn. call_id: of a tool's turn, the call it answers."""

    speaker: Speaker
    text: str
    calls: tuple[ToolCall, ...] = ()
    call_id: str = ""


@dataclass(frozen=True)
class TokenizedReply:
    """A conversation with a reply, tokenised as one string.

    ids: token ids of the whole text.
    positions: indices into `ids` of the tokens that count (content only: no template token, never token 0).
    characters: for each position, begin and end of its characters, counted from the reply's beginning.
    """

    ids: tuple[int, ...]
    positions: tuple[int, ...]
    characters: tuple[tuple[int, int], ...] = ()


def check_choice(name: str, value: Any, choices: Any) -> None:
    """Raises RequestError when `value` is none of a Literal's; a misspelt one must not become the default."""
    if value not in get_args(choices):
        raise RequestError(f"{name} is {value!r}; known: {', '.join(get_args(choices))}")


def check_characters(name: str, *texts: str) -> None:
    """Raises RequestError for half of a surrogate pair, which JSON can carry and no tokenizer takes."""
    if any(_LONE_SURROGATE.search(text) for text in texts):
        raise RequestError(f"{name} has half of a surrogate pair, which is no character")


def read_messages(messages: Iterable[Mapping[str, Any]], *, tools: bool = False) -> list[Turn]:
    """Turn a harness's chat-completions messages into speaker turns.

    Unknown keys are ignored. System texts are joined and put first, consecutive turns of one speaker are joined,
    messages without text are dropped. Content is a string, null, missing, or a list of text parts.
    tools: read the customer's tool calls and their results, too; neither is joined with anything. Results of other
    calls are the agent's text, as all results are without `tools`. Arguments that are no JSON object are kept, as text.
    Raises RequestError naming the message for an unknown role, another kind of content, or a call without a name.
    """
    if not isinstance(messages, Iterable) or isinstance(messages, str | bytes | Mapping):
        raise RequestError(f"messages must be a list of messages, not {type(messages).__name__}")
    system: list[str] = []
    turns: list[Turn] = []
    unanswered: list[ToolCall] = []
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise RequestError(f"messages[{number}] must be an object with a role and content, not {message!r}")
        role = message.get("role")
        if not isinstance(role, str) or role not in _WIRE_SPEAKERS:
            raise RequestError(f"messages[{number}].role is {role!r}; known roles: {', '.join(_WIRE_SPEAKERS)}")
        text = _content_text(message.get("content"), number)
        check_characters(f"messages[{number}].content", text)
        speaker = _WIRE_SPEAKERS[role]
        if tools and speaker == "customer" and (calls := _read_calls(message, number)):
            turns.append(Turn(speaker, text if text.strip() else "", calls))
            unanswered.extend(calls)
        elif tools and role in ("tool", "function") and (answered := _answered(message, unanswered)):
            turns.append(Turn("tool", text, call_id=answered.id))
            unanswered.remove(answered)
        elif text.strip() and speaker == "system":
            system.append(text)
        elif text.strip():
            _add_turn(turns, Turn(speaker, text))
    return [Turn("system", "\n\n".join(system)), *turns] if system else turns


def render_prompt(
    tokenizer: PreTrainedTokenizerBase, turns: Sequence[Turn], as_: As, tools: Sequence[Mapping[str, Any]] = ()
) -> str:
    """Text of the conversation up to the point where the customer's next message begins.

    When there is no system turn an empty one is rendered, so that no template can put "You are a helpful assistant"
    there. Templates without a system role get its text as (part of) the first turn. Special tokens written out in a
    turn's text are broken up with a space, since they would be read as the template's own.
    tools: what the customer may call, in OpenAI's form. A template that speaks of tools is given them, the
    conversation's calls and their results, under the header that ``reply_header`` names; otherwise all of these are
    written out as text.
    Raises ChatTemplateError when the template is missing or refuses the conversation.
    """
    check_choice("as_", as_, As)
    if not getattr(tokenizer, "chat_template", None):
        raise ChatTemplateError(
            f"{tokenizer.name_or_path or 'this tokenizer'} has no chat template; use an instruction-tuned model"
        )
    turns = [_plain_turn(tokenizer, turn) for turn in turns]
    if not tools and not any(turn.calls or turn.speaker == "tool" for turn in turns):
        return _render(tokenizer, _messages(turns, as_), as_)
    syntax = call_syntax(tokenizer)
    plain = _special_pattern(tokenizer)
    tools = [_plain_json(plain, tool) for tool in tools]
    if tools and syntax:
        as_ = "assistant"
        try:
            return _render(tokenizer, _messages(_single_calls(turns), as_), as_, tools)
        except ChatTemplateError:
            pass  # it speaks of tools, but not in such a conversation: one that begins with the customer, say
    return _render(tokenizer, _messages(_written_out(turns, tools, syntax or HERMES), as_), as_)


def reply_header(tokenizer: PreTrainedTokenizerBase, as_: As, tools: Sequence[Mapping[str, Any]] = ()) -> As:
    """The header under which ``render_prompt`` with the same arguments lets the customer's next message begin."""
    return "assistant" if tools and call_syntax(tokenizer) else as_


def call_syntax(tokenizer: PreTrainedTokenizerBase) -> CallSyntax | None:
    """How the model's own template writes a tool call; None when it ignores or refuses tools, calls or results, or
    writes calls in a way we do not know. Found by rendering a conversation, once for each template."""
    key = str(tokenizer.chat_template)
    if key not in _SYNTAXES:
        _SYNTAXES[key] = _probe_syntax(tokenizer)
    return _SYNTAXES[key]


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
    characters = tuple((offsets[i][0] - len(prompt), offsets[i][1] - len(prompt)) for i in positions)
    return TokenizedReply(tuple(ids), tuple(positions), characters)


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


def _read_calls(message: Mapping[str, Any], number: int) -> tuple[ToolCall, ...]:
    """The calls of one message, also in the older form with a single ``function_call``."""
    entries = message.get("tool_calls") or []
    if not isinstance(entries, list):
        raise RequestError(f"messages[{number}].tool_calls must be a list of calls, not {entries!r}")
    if not entries and message.get("function_call"):
        entries = [{"function": message["function_call"]}]
    calls = []
    for position, entry in enumerate(entries):
        where = f"messages[{number}].tool_calls[{position}]"
        function = entry.get("function") if isinstance(entry, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
            raise RequestError(f"{where} must be an object with a function that has a name, not {entry!r}")
        if not isinstance(entry.get("id"), str | None):
            raise RequestError(f"{where}.id is {entry['id']!r}; it must be a string")
        call = ToolCall(entry.get("id") or "", function["name"], _read_arguments(function.get("arguments")))
        check_characters(where, json.dumps([call.name, call.arguments], ensure_ascii=False))
        calls.append(call)
    return tuple(calls)


def _read_arguments(arguments: Any) -> Mapping[str, Any]:
    """Arguments of an earlier call. A model may have written anything: what cannot be read is kept as it is."""
    value = arguments or {}
    if isinstance(arguments, str) and arguments:
        try:
            value = json.loads(arguments)
        except (ValueError, RecursionError):
            value = arguments
    if deeper_than(MAX_DEPTH, value):
        value = "…"
    return value if isinstance(value, Mapping) else {"arguments": value}


def _answered(message: Mapping[str, Any], unanswered: Sequence[ToolCall]) -> ToolCall | None:
    """The call that a result belongs to: by id, or by name where the result has no id."""
    call_id, name = message.get("tool_call_id"), message.get("name")
    if call_id:
        return next((call for call in unanswered if call.id == call_id), None)
    return next((call for call in unanswered if name in (None, call.name)), None)


def _add_turn(turns: list[Turn], turn: Turn) -> None:
    """Append a turn of text, joined with the one before when that is text of the same speaker."""
    if turns and turns[-1].speaker == turn.speaker and not turns[-1].calls:
        turns[-1] = Turn(turn.speaker, f"{turns[-1].text}\n\n{turn.text}")
    else:
        turns.append(turn)


def _messages(turns: Sequence[Turn], as_: As) -> list[dict[str, Any]]:
    """Turns as a template's messages; a turn has a text or one call."""
    roles = {"system": "system", "agent": "assistant", "customer": "user", "tool": "tool"}
    if as_ == "assistant":
        roles |= {"agent": "user", "customer": "assistant"}
    messages: list[dict[str, Any]] = []
    names: dict[str, str] = {}
    for turn in turns:
        message: dict[str, Any] = {"role": roles[turn.speaker], "content": turn.text}
        if turn.calls:  # otherwise not even an empty list: templates ask whether the key is there
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in turn.calls
            ]
            names |= {call.id: call.name for call in turn.calls}
        if turn.speaker == "tool":
            message |= {"tool_call_id": turn.call_id, "name": names.get(turn.call_id, "")}
        messages.append(message)
    return messages


def _single_calls(turns: Sequence[Turn]) -> list[Turn]:
    """The same conversation with text and calls in turns of their own, and each result right behind its call.

    That is how we speak, and all that some templates take. Calls get ids of nine letters and digits, which Mistral's
    insist on.
    """
    single: list[Turn] = []
    renamed: dict[str, str] = {}
    waiting = list(turns)
    while waiting:
        turn = waiting.pop(0)
        if turn.speaker == "tool":
            single.append(replace(turn, call_id=renamed.get(turn.call_id, "")))
        elif not turn.calls:
            single.append(turn)
        else:
            if turn.text:
                single.append(Turn(turn.speaker, turn.text))
            for call in turn.calls:
                renamed[call.id] = f"call{len(single):05d}"
                single.append(Turn(turn.speaker, "", (replace(call, id=renamed[call.id]),)))
                results = list(takewhile(lambda later: later.speaker == "tool", waiting))
                answer = next((result for result in results if result.call_id == call.id), None)
                if answer:
                    waiting.remove(answer)
                    single.append(replace(answer, call_id=renamed[call.id]))
    return single


def _written_out(turns: Sequence[Turn], tools: Sequence[Mapping[str, Any]], syntax: CallSyntax) -> list[Turn]:
    """The same conversation in texts alone, for a template that knows no tools."""
    written: list[Turn] = []
    if tools:
        system, turns = (turns[0].text, turns[1:]) if turns and turns[0].speaker == "system" else ("", turns)
        written.append(Turn("system", f"{system}\n\n{_tools_text(tools, syntax)}".strip()))
    for turn in turns:
        if turn.speaker == "tool":
            _add_turn(written, Turn("agent", f"<tool_response>\n{turn.text}\n</tool_response>"))
        else:
            calls = [syntax.write(call.name, call.arguments) for call in turn.calls]
            _add_turn(written, Turn(turn.speaker, "\n".join([turn.text, *calls] if turn.text else calls)))
    return written


def _tools_text(tools: Sequence[Mapping[str, Any]], syntax: CallSyntax) -> str:
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    example = f"{syntax.before}TOOL{syntax.between}{{ARGUMENTS}}{syntax.after}"
    return (
        "You have tools of your own. Each line describes one, with a JSON schema of its parameters:\n"
        f"<tools>\n{lines}\n</tools>\n"
        "A message of yours is either text or one tool call, never both. To call a tool, write only this, with the "
        f"tool's name and a JSON object of its arguments:\n{example}\n"
        "Its result comes back between <tool_response> and </tool_response>."
    )


def _probe_syntax(tokenizer: PreTrainedTokenizerBase) -> CallSyntax | None:
    call = ToolCall("probe", "probe_line", {"depth": "fathoms"})
    parameters = {"type": "object", "properties": {"depth": {"type": "string", "description": "a unit"}}}
    description = "Heaves the lead line."
    function = {"name": call.name, "description": description, "parameters": parameters}
    tools = [{"type": "function", "function": function}]
    asked = [Turn("system", "You sail."), Turn("agent", "How deep is it?")]
    turns = [*asked, Turn("customer", "", (call,)), Turn("tool", "By the deep seven.", call_id=call.id)]
    try:
        text = _render(tokenizer, _messages(_single_calls(turns), "assistant"), "assistant", tools)
        reply_at = _render(tokenizer, _messages(asked, "assistant"), "assistant", tools)
    except ChatTemplateError:
        return None
    return find_syntax(text, call, reply_at) if description in text else None


def _render(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[dict[str, Any]],
    as_: As,
    tools: Sequence[Mapping[str, Any]] = (),
) -> str:
    """Render the messages, in the way this template takes them, up to the customer's next message."""
    if not messages or messages[0]["role"] != "system":
        messages = [{"role": "system", "content": ""}, *messages]
    if as_ == "user":
        messages = [*messages, {"role": "user", "content": _MARK}]
    failure: Exception | None = None
    for candidate in (messages, _alternating(messages)):
        try:
            text = _apply_template(tokenizer, candidate, add_generation_prompt=as_ == "assistant", tools=tools)
        except (TemplateError, TypeError, ValueError) as error:
            failure = failure or error
            continue
        # Some templates drop a turn they do not expect without a word.
        missing = _left_out(candidate, tools, text)
        if missing is None:
            return text[: text.rindex(_MARK)] if as_ == "user" else text
        failure = failure or ValueError(f"it leaves out {missing[:60]!r}")
    raise ChatTemplateError(f"the chat template of {tokenizer.name_or_path} refuses this conversation: {failure}")


def _left_out(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], text: str) -> str | None:
    """The first text, call or tool that is not in the rendered `text`."""
    for tool in tools:
        if tool["function"]["name"] not in text:
            return str(tool["function"]["name"])
    for message in messages:
        content = message["content"].rpartition(_THOUGHT_END)[2].strip()  # no loss where thoughts are dropped
        quoted = json.dumps(content, ensure_ascii=False)[1:-1]  # as Llama writes a tool's result
        if content not in text and not (message["role"] == "tool" and quoted in text):
            return str(content)
        for call in message.get("tool_calls", ()):
            written = json.dumps(call["function"]["arguments"], ensure_ascii=False)
            if call["function"]["name"] not in text or "".join(written.split()) not in "".join(text.split()):
                return f"{call['function']['name']} {written}"
    return None


def _apply_template(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[dict[str, Any]],
    add_generation_prompt: bool = False,
    tools: Sequence[Mapping[str, Any]] = (),
) -> str:
    arguments: dict[str, Any] = dict(_TEMPLATE_ARGUMENTS)
    if tools:
        arguments |= {"tools": list(tools), **_TOOL_TEMPLATE_ARGUMENTS}
    return str(
        tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=add_generation_prompt, **arguments
        )
    )


def _alternating(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same conversation for a template without a system role that insists on user, assistant, user, …."""
    system, *rest = messages
    turns: list[dict[str, Any]] = []
    if system["content"] or not rest or rest[0]["role"] != "user":
        turns.append({"role": "user", "content": system["content"] or "Hello."})
    for message in rest:
        texts = turns and set(turns[-1]) == set(message) == {"role", "content"}  # no calls, no results
        if texts and turns[-1]["role"] == message["role"]:
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


def _special_pattern(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str] | None:
    """Finds written-out special tokens; None when there are none."""
    special = sorted(_special_tokens(tokenizer), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, special))) if special else None


def _plain(tokenizer: PreTrainedTokenizerBase, text: str) -> str:
    """`text` with a space in every special token that is written out in it, so that it is read as text."""
    return str(_plain_json(_special_pattern(tokenizer), text))


def _plain_turn(tokenizer: PreTrainedTokenizerBase, turn: Turn) -> Turn:
    pattern = _special_pattern(tokenizer)
    calls = tuple(
        replace(call, name=_plain_json(pattern, call.name), arguments=_plain_json(pattern, call.arguments))
        for call in turn.calls
    )
    return replace(turn, text=_plain_json(pattern, turn.text), calls=calls)


def _plain_json(pattern: re.Pattern[str] | None, value: Any) -> Any:
    """A JSON value with every text in it made plain, keys included."""
    if isinstance(value, Mapping):
        return {_plain_json(pattern, key): _plain_json(pattern, item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain_json(pattern, item) for item in value]
    if isinstance(value, str) and pattern:
        while pattern.search(value):  # again for tokens that overlap; a space joins nothing
            value = pattern.sub(lambda match: f"{match[0][0]} {match[0][1:]}" if len(match[0]) > 1 else "", value)
    return value


def _letters(text: str) -> str:
    """Text without white space, compatibility forms folded: what survives any tokeniser's normalisation."""
    return "".join(unicodedata.normalize("NFKC", text).split())
