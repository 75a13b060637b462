"""Tools of the customer: what a request declares, calls read from a reply, and a guide that lets no other call arise.

tau2's telecom domain gives its simulated user tools. The user then answers with text or with one call, never both.
How a call is written is the model's own affair (``toolcalls.py``); that a call names a declared tool, with arguments
that satisfy its schema, is a grammar's (``grammar.py``).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from traitbasis.chat import ToolCall, call_syntax, check_characters
from traitbasis.engines.base import Guide
from traitbasis.errors import RequestError, ToolCallError
from traitbasis.grammar import tagged_grammar
from traitbasis.toolcalls import HERMES, MAX_DEPTH, CallSyntax, Family, deeper_than

MAX_TOOLS = 128
_MODES = {"none": "none", "auto": "auto", "required": "required", "any": "required"}
_NO_PARAMETERS = {"type": "object", "properties": {}}
# Keywords beside which "properties" does not say all an object may hold.
_OPEN_SCHEMA = ("additionalProperties", "patternProperties", "$ref", "allOf", "anyOf", "oneOf", "if", "not")
_PYTHON_TAG = "<|python_tag|>"
# Space, newline, tab and carriage return as byte-level and sentencepiece vocabularies write them.
_WRITTEN_SPACE = str.maketrans("\u0120\u010a\u0109\u010d\u2581", " \n\t\r ")


@dataclass(frozen=True, eq=False)
class Tools:
    """Tools of one request.

    declared: all of them in OpenAI's form, with nothing missing and nothing more; what templates are given.
    schemas: of the arguments, by name, for the tools that may be called. must_call: the reply has to be a call.
    """

    declared: tuple[Mapping[str, Any], ...]
    schemas: Mapping[str, Mapping[str, Any]]
    must_call: bool = False


def read_tools(tools: Any, tool_choice: Any = None) -> Tools | None:
    """Read a request's ``tools`` and ``tool_choice``. None: there are none, or none may be called.

    An object of arguments whose schema does not say otherwise holds the declared properties and no more.
    Raises RequestError naming the field.
    """
    mode, named = _read_choice(tool_choice)
    if not isinstance(tools, list | tuple | None):
        raise RequestError(f"tools must be a list of tools, not {tools!r}")
    if not tools:
        if mode == "required":
            raise RequestError(f"tool_choice is {tool_choice!r}, but tools is empty; send the tool, or no tool_choice")
        return None
    if len(tools) > MAX_TOOLS:
        raise RequestError(f"tools has {len(tools)} entries; at most {MAX_TOOLS} are taken")
    declared = tuple(_read_tool(tool, f"tools[{number}]") for number, tool in enumerate(tools))
    schemas: dict[str, Mapping[str, Any]] = {}
    for number, tool in enumerate(declared):
        name = tool["function"]["name"]
        if name in schemas:
            raise RequestError(f"tools[{number}].function.name is {name!r}, as another tool's; names must differ")
        schemas[name] = _closed(tool["function"]["parameters"])
    if named is not None and named not in schemas:
        raise RequestError(f"tool_choice names the tool {named!r}; tools has {', '.join(schemas)}")
    if mode == "none":
        return None
    return Tools(declared, schemas if named is None else {named: schemas[named]}, must_call=mode == "required")


def tools_from_functions(functions: Any, function_call: Any = None) -> tuple[Any, Any]:
    """``tools`` and ``tool_choice`` from the fields OpenAI had before: ``functions`` and ``function_call``."""
    if isinstance(functions, list):
        functions = [{"type": "function", "function": function} for function in functions]
    if isinstance(function_call, Mapping):
        function_call = {"type": "function", "function": function_call}
    return functions, function_call


def name_calls(calls: Sequence[ToolCall], seed: int) -> tuple[ToolCall, ...]:
    """The calls of one reply with ids that follow from the seed it was drawn with (contract 9)."""
    digests = [hashlib.sha256(f"{seed}/{number}".encode()).hexdigest() for number in range(len(calls))]
    return tuple(replace(call, id=f"call_{digest[:24]}") for call, digest in zip(calls, digests, strict=True))


def wire_call(call: ToolCall) -> dict[str, Any]:
    """A call as an entry of OpenAI's ``tool_calls``; arguments are a JSON text."""
    function = {"name": call.name, "arguments": json.dumps(call.arguments)}
    return {"id": call.id, "type": "function", "function": function}


@dataclass(frozen=True)
class ParsedReply:
    """A reply taken apart. text: what is outside of calls. Calls have no ids yet (see ``name_calls``)."""

    text: str
    calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True)
class ToolFormat:
    """How a model writes its calls; from ``tool_format``."""

    syntax: CallSyntax

    def parse(self, text: str, tools: Tools | None = None) -> ParsedReply:
        """Take a reply apart. text: with the special tokens that ``shown_ids`` names kept, and no others.

        tools: also check that they have these tools, that a call is there when one must be, and no argument is missing
        or unknown. More than the format itself is understood: several calls, a lost end tag, arguments that are a JSON
        text. Raises ToolCallError for a call that cannot be read.
        """
        said: list[str] = []
        calls: list[ToolCall] = []
        at = 0
        while found := _OPENERS[self.syntax.family].search(text, at):
            said.append(text[at : found.start()])
            more, at = _read_calls(text, found.end())
            calls += more
        said.append(text[at:])
        if tools:
            _check_calls(calls, tools)
        return ParsedReply("".join(said).strip(), tuple(calls))

    def guide(self, tokenizer: PreTrainedTokenizerBase, tools: Tools) -> Callable[[], Guide]:
        """Makes guides for replies under `tools`: free text or one call, or a call alone where one must be.

        Compiles a grammar, which takes its time with many tools, in the calling thread, once for the same tools.
        Raises RequestError for a schema that cannot be compiled.
        """
        begin, between, end = self.syntax.before, self.syntax.between, self.syntax.after
        grammar = tagged_grammar(
            tokenizer, [(begin + name + between, schema, end) for name, schema in tools.schemas.items()]
        )
        opener = _opener(tokenizer, self.syntax)
        return lambda: _ToolGuide(tokenizer, opener, grammar.guide(), tools.must_call)

    def shown_ids(self, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
        """Special tokens that are part of a call's text."""
        text = self.syntax.write("", {})
        special = {i: str(token) for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        return frozenset(i for i, token in special.items() if token in text)


def tool_format(tokenizer: PreTrainedTokenizerBase) -> ToolFormat:
    """The format that the model's chat template writes calls in; Hermes' where it knows none of ours."""
    return ToolFormat(call_syntax(tokenizer) or HERMES)


# --- what a request says ----------------------------------------------------------------------------------------------


def _read_choice(choice: Any) -> tuple[str, str | None]:
    """none, auto or required, and the tool that was named."""
    if choice is None:
        return "auto", None
    kind = choice.get("type") if isinstance(choice, Mapping) else choice
    if isinstance(kind, str) and kind in _MODES:
        return _MODES[kind], None
    if isinstance(choice, Mapping) and kind == "function":
        function = choice.get("function", choice)
        name = function.get("name") if isinstance(function, Mapping) else None
        if isinstance(name, str):
            return "required", name
        raise RequestError(f"tool_choice.function.name must be a tool's name, not {name!r}")
    raise RequestError(
        f'tool_choice is {choice!r}; known: "none", "auto", "required", '
        '{"type": "function", "function": {"name": "a_tool"}}'
    )


def _read_tool(tool: Any, where: str) -> dict[str, Any]:
    if not isinstance(tool, Mapping) or not isinstance(tool.get("function"), Mapping):
        raise RequestError(f'{where} must be {{"type": "function", "function": {{"name": …}}}}, not {tool!r:.200}')
    if tool.get("type", "function") != "function":
        raise RequestError(f"{where}.type is {tool['type']!r}; only functions can be called")
    function = tool["function"]
    name, description, parameters = (function.get(key) for key in ("name", "description", "parameters"))
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", name):
        raise RequestError(f"{where}.function.name is {name!r:.200}; it must be 1 to 64 of the characters a-zA-Z0-9_.-")
    if not isinstance(description, str | None):
        raise RequestError(f"{where}.function.description must be a string, not {description!r:.200}")
    if not isinstance(parameters, Mapping | None):
        raise RequestError(f"{where}.function.parameters must be a JSON schema, not {parameters!r:.200}")
    parameters = {**_NO_PARAMETERS, **(parameters or {})}
    if parameters["type"] != "object":
        raise RequestError(f"{where}.function.parameters.type is {parameters['type']!r}; arguments are an object")
    if not isinstance(parameters["properties"], Mapping):
        raise RequestError(f"{where}.function.parameters.properties must be an object of JSON schemas")
    required = parameters.get("required", [])
    if not isinstance(required, list) or any(not isinstance(item, str) for item in required):
        raise RequestError(f"{where}.function.parameters.required must be a list of names, not {required!r:.200}")
    if deeper_than(MAX_DEPTH, parameters):
        raise RequestError(f"{where}.function.parameters is nested more than {MAX_DEPTH} levels deep")
    check_characters(f"{where}.function", json.dumps([description, parameters], ensure_ascii=False))
    function = {"name": name, "description": description or "", "parameters": parameters}
    return {"type": "function", "function": function}


def _closed(parameters: Mapping[str, Any]) -> Mapping[str, Any]:
    if any(keyword in parameters for keyword in _OPEN_SCHEMA):
        return parameters
    return {**parameters, "additionalProperties": False}


# --- what a reply says ------------------------------------------------------------------------------------------------

_OPENERS: dict[Family, re.Pattern[str]] = {
    "hermes": re.compile("<tool_call>"),
    "llama": re.compile(r"<\|python_tag\|>|^\s*(?={)"),
    "mistral": re.compile(r"\[TOOL_CALLS\]"),
    "mistral args": re.compile(r"\[TOOL_CALLS\]"),
}
_NAME_BEFORE = re.compile(r"\s*([A-Za-z0-9_.-]+)\s*(?:\[CALL_ID\][^\[]*)?\[ARGS\]")
_CLOSER = re.compile(r"\s*</tool_call>")
_ANOTHER = re.compile(r"\s*[;,]\s*(?={)")


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


_JSON = json.JSONDecoder(parse_constant=_no_constant)


def _read_calls(text: str, at: int) -> tuple[list[ToolCall], int]:
    """Calls that are written from `at` on, and where they end."""
    calls: list[ToolCall] = []
    if named := _NAME_BEFORE.match(text, at):
        value, end = _read_json(text, named.end())
        return [_as_call({"name": named[1], "arguments": value})], end
    while True:
        value, at = _read_json(text, at)
        calls += [_as_call(entry) for entry in (value if isinstance(value, list) else [value])]
        if not (another := _ANOTHER.match(text, at)):
            break
        at = another.end()
    closer = _CLOSER.match(text, at)
    return calls, closer.end() if closer else at


def _read_json(text: str, at: int) -> tuple[Any, int]:
    begin = at + len(text[at:]) - len(text[at:].lstrip())
    try:
        return _JSON.raw_decode(text, begin)
    except (ValueError, RecursionError) as error:
        raise ToolCallError(f"a tool call is no JSON ({error}): {text[at:][:200]!r}") from error


def _as_call(entry: Any) -> ToolCall:
    name = entry.get("name") if isinstance(entry, Mapping) else None
    if not isinstance(name, str) or not name:
        raise ToolCallError(f"a tool call names no tool: {entry!r:.200}")
    arguments = entry.get("arguments", entry.get("parameters"))
    if isinstance(arguments, str):
        try:
            arguments = _JSON.decode(arguments)
        except (ValueError, RecursionError) as error:
            raise ToolCallError(f"arguments of {name} are no JSON: {arguments!r:.200}") from error
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, Mapping):
        raise ToolCallError(f"arguments of {name} are no JSON object: {arguments!r:.200}")
    try:  # what has half of a surrogate pair, or a number beyond floats, cannot be sent, or not come back
        json.dumps(arguments, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError) as error:
        raise ToolCallError(f"arguments of {name} are no JSON ({error}): {arguments!r:.200}") from error
    return ToolCall("", name, arguments)


def _check_calls(calls: Sequence[ToolCall], tools: Tools) -> None:
    if tools.must_call and not calls:
        raise ToolCallError(f"the reply is no tool call; it has to call {' or '.join(tools.schemas)}")
    for call in calls:
        if call.name not in tools.schemas:
            raise ToolCallError(f"unknown tool {call.name!r:.80}; known: {', '.join(tools.schemas)}")
        schema = tools.schemas[call.name]
        if missing := [name for name in schema.get("required", ()) if name not in call.arguments]:
            raise ToolCallError(f"{call.name} is called without {', '.join(map(str, missing))}")
        unknown = [name for name in call.arguments if name not in schema["properties"]]
        if unknown and schema.get("additionalProperties") is False and "patternProperties" not in schema:
            raise ToolCallError(f"{call.name} has no parameter {', '.join(unknown)}")


# --- what a reply may be ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Opener:
    """How the first tokens of a reply tell whether it is a call.

    tag: the token that opens a call, where the tokenizer has one that is read nowhere else; other openers are found in
    the text. text_allowed: tokens that may follow once a reply is text; None: any. opening: for every beginning of the
    opener that may have been written, tokens that go on to a whole one, some of them in a way the grammar refuses.
    """

    text: str
    tag: int | None
    text_allowed: Tensor | None
    opening: Mapping[str, Tensor]


class _ToolGuide:
    """Free text, or one call that the grammar accepts; which of them, the reply's first tokens decide."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, opener: _Opener, call: Guide, must_call: bool) -> None:
        self._tokenizer = tokenizer
        self._opener = opener
        self._call = call
        self._calling = must_call
        self._open = not must_call  # whether it can still become either
        self._begun: list[int] = []

    @property
    def silent(self) -> bool:
        return self._calling

    @property
    def done(self) -> bool:
        return self._calling and self._call.done

    def allowed(self) -> Tensor | None:
        if self._calling:
            return self._call.allowed()
        if not self._open:
            return self._opener.text_allowed
        opening = self._opener.opening.get(self._text())
        accepted = None if opening is None else self._call.allowed()
        if opening is None or accepted is None:
            return None
        anything = ~opening
        anything[: len(accepted)] |= accepted[: len(anything)]
        return anything

    def take(self, token: int) -> None:
        if self._calling:
            self._call.take(token)
        elif self._open:
            self._begin(token)

    def wrap_up(self) -> bool:
        return self._calling and self._call.wrap_up()

    def _begin(self, token: int) -> None:
        """Take one of the first tokens: white space, (part of) the opener, or a text's beginning."""
        accepted = self._call.allowed()
        if accepted is None or (token < len(accepted) and bool(accepted[token])):
            self._call.take(token)
            self._begun.append(token)
            self._calling = token == self._opener.tag or self._text().startswith(self._opener.text)
        elif self._begun or self._decode([token]).strip():
            self._open = False

    def _text(self) -> str:
        return self._decode(self._begun)

    def _decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False))


_KNOWN_OPENERS: WeakKeyDictionary[PreTrainedTokenizerBase, dict[tuple[Family, str], _Opener]] = WeakKeyDictionary()


def _opener(tokenizer: PreTrainedTokenizerBase, syntax: CallSyntax) -> _Opener:
    """Looks through the vocabulary, once."""
    known = _KNOWN_OPENERS.setdefault(tokenizer, {})
    key = (syntax.family, syntax.opener)
    if key not in known:
        tag = tokenizer.get_added_vocab().get(syntax.opener)
        text_allowed = None if tag is None else torch.arange(_vocabulary_size(tokenizer)) != tag
        opening = _opening_tokens(tokenizer, syntax) if tag is None else {}
        known[key] = _Opener(syntax.opener, tag, text_allowed, opening)
    return known[key]


def _vocabulary_size(tokenizer: PreTrainedTokenizerBase) -> int:
    return int(max(tokenizer.get_vocab().values())) + 1


def _opening_tokens(tokenizer: PreTrainedTokenizerBase, syntax: CallSyntax) -> dict[str, Tensor]:
    """By every unfinished beginning of the opener: the tokens with which a call has begun, bool ``(vocabulary,)``.

    At the very beginning also those that put white space before (part of) the opener, which no grammar takes, and
    Llama's tag for code.
    """
    opener = syntax.opener
    opening = {opener[:size]: torch.zeros(_vocabulary_size(tokenizer), dtype=torch.bool) for size in range(len(opener))}
    for token, i in tokenizer.get_vocab().items():
        piece = token.translate(_WRITTEN_SPACE)
        bare = piece.lstrip()
        if not bare or (bare[0] not in opener and bare != _PYTHON_TAG):
            continue
        for begun, tokens in opening.items():
            tokens[i] = f"{begun}{piece}".startswith(opener)
        spaced = piece != bare and opener.startswith(bare)
        opening[""][i] = bare.startswith(opener) or spaced or (syntax.family == "llama" and bare == _PYTHON_TAG)
    return opening
