"""Tools of the customer: what requests may declare, calls read back, and replies that cannot be a wrong call."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

import jsonschema
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from templates import NATIVE, TOOL_TEMPLATES, tool_tokenizer
from tiny import tiny_network, tiny_tokenizer
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from traitbasis import grammar
from traitbasis.chat import ToolCall, render_prompt, tokenize
from traitbasis.engines.base import Guide, Request, Sampling, generate
from traitbasis.engines.transformers import TransformersEngine
from traitbasis.errors import RequestError, ToolCallError
from traitbasis.model import LanguageModel, prepare_model
from traitbasis.toolcalls import HERMES
from traitbasis.tools import (
    ParsedReply,
    Tools,
    name_calls,
    read_tools,
    tool_format,
    tools_from_functions,
    wire_call,
)

every_template = pytest.mark.parametrize("name", TOOL_TEMPLATES)
every_native = pytest.mark.parametrize("name", NATIVE)


def tool(name: str, parameters: Any = None, **more: Any) -> dict[str, Any]:
    function = {"name": name, "description": f"Does {name}."} | more
    return {"type": "function", "function": function | ({} if parameters is None else {"parameters": parameters})}


TOGGLE = tool("toggle_data", {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]})
MODE = tool(
    "set_mode",
    {
        "type": "object",
        "properties": {"mode": {"$ref": "#/$defs/Mode"}, "retries": {"type": "integer"}},
        "required": ["mode"],
        "$defs": {"Mode": {"enum": ["4g_only", "5g"], "type": "string"}},
    },
)
TEST = tool("run_speed_test")
TOOLS = [TOGGLE, MODE, TEST]


def tools_of(choice: Any = None) -> Tools:
    tools = read_tools(TOOLS, choice)
    assert tools is not None
    return tools


# --- what a request declares ------------------------------------------------------------------------------------------


def test_declared_tools_have_nothing_missing_and_nothing_more() -> None:
    sent = [{**TOGGLE, "strict": True}, tool("bare", description=None, strict=False), {"function": {"name": "x.y-z_1"}}]
    tools = read_tools(sent)
    assert tools is not None and not tools.must_call
    nothing = {"type": "object", "properties": {}}
    assert [dict(declared) for declared in tools.declared] == [
        TOGGLE,
        tool("bare", nothing, description=""),
        tool("x.y-z_1", nothing, description=""),
    ]
    assert tools.schemas["bare"] == {**nothing, "additionalProperties": False}
    assert tools.schemas["toggle_data"] == {**TOGGLE["function"]["parameters"], "additionalProperties": False}


@pytest.mark.parametrize(
    "parameters",
    [
        {"additionalProperties": {"type": "string"}},
        {"type": "object", "properties": {}, "additionalProperties": True},
        {"properties": {"a": {}}, "anyOf": [{"required": ["a"]}]},
        {"patternProperties": {"^x": {}}},
    ],
)
def test_a_schema_that_says_what_else_may_stand_there_is_left_alone(parameters: dict[str, Any]) -> None:
    tools = read_tools([tool("f", parameters)])
    assert tools and tools.schemas["f"] == {"type": "object", "properties": {}, **parameters}


@pytest.mark.parametrize("tools", [None, [], ()])
@pytest.mark.parametrize("choice", [None, "auto", "none", {"type": "auto"}, {"type": "none"}])
def test_an_empty_list_is_no_tools(tools: Any, choice: Any) -> None:
    """tools: [] is what langwatch scenario sends with every request."""
    assert read_tools(tools, choice) is None


@pytest.mark.parametrize("choice", ["none", {"type": "none"}])
def test_no_tool_may_be_called_when_the_choice_is_none(choice: Any) -> None:
    assert read_tools(TOOLS, choice) is None


@pytest.mark.parametrize(
    ("choice", "must_call", "names"),
    [
        (None, False, ["toggle_data", "set_mode", "run_speed_test"]),
        ("auto", False, ["toggle_data", "set_mode", "run_speed_test"]),
        ({"type": "auto"}, False, ["toggle_data", "set_mode", "run_speed_test"]),
        ("required", True, ["toggle_data", "set_mode", "run_speed_test"]),
        ({"type": "any"}, True, ["toggle_data", "set_mode", "run_speed_test"]),
        ({"type": "function", "function": {"name": "set_mode"}}, True, ["set_mode"]),
        ({"type": "function", "name": "set_mode"}, True, ["set_mode"]),
    ],
)
def test_the_choice_decides_what_may_be_called(choice: Any, must_call: bool, names: list[str]) -> None:
    tools = tools_of(choice)
    assert (tools.must_call, list(tools.schemas)) == (must_call, names)
    assert len(tools.declared) == 3, "the prompt tells of all of them"


DEEP: dict[str, Any] = {}
for _ in range(70):
    DEEP = {"type": "object", "properties": {"a": DEEP}}


@pytest.mark.parametrize(
    ("tools", "choice", "message"),
    [
        ("toggle_data", None, "tools must be a list"),
        ({"a": TOGGLE}, None, "tools must be a list"),
        (["toggle_data"], None, r"tools\[0\] must be"),
        ([TOGGLE, {"type": "function"}], None, r"tools\[1\] must be"),
        ([{"type": "function", "function": None}], None, r"tools\[0\] must be"),
        ([{"type": "web_search", "function": {"name": "x"}}], None, r"tools\[0\]\.type is 'web_search'"),
        ([{"type": None, "function": {"name": "x"}}], None, r"tools\[0\]\.type is None"),
        ([tool("")], None, r"tools\[0\]\.function\.name is ''"),
        ([tool("two words")], None, r"tools\[0\]\.function\.name is 'two words'"),
        ([tool("x" * 65)], None, r"tools\[0\]\.function\.name"),
        ([tool("x\n")], None, r"tools\[0\]\.function\.name"),
        ([{"type": "function", "function": {"description": "x"}}], None, r"tools\[0\]\.function\.name is None"),
        ([tool("x", description=7)], None, r"tools\[0\]\.function\.description"),
        ([tool("x", description="\ud83d")], None, r"tools\[0\]\.function has half of a surrogate pair"),
        ([tool("x", [1])], None, r"tools\[0\]\.function\.parameters must be a JSON schema"),
        ([tool("x", {"type": "string"})], None, r"tools\[0\]\.function\.parameters\.type is 'string'"),
        ([tool("x", {"properties": ["a"]})], None, r"tools\[0\]\.function\.parameters\.properties"),
        ([tool("x", {"required": "a"})], None, r"tools\[0\]\.function\.parameters\.required"),
        ([tool("x", DEEP)], None, r"tools\[0\]\.function\.parameters is nested"),
        ([TOGGLE, TEST, TOGGLE], None, r"tools\[2\]\.function\.name is 'toggle_data', as another tool's"),
        ([tool(f"f{i}") for i in range(129)], None, "129 entries; at most 128"),
        (TOOLS, "sometimes", "tool_choice is 'sometimes'; known"),
        (TOOLS, 7, "tool_choice is 7"),
        (TOOLS, True, "tool_choice is True"),
        (TOOLS, {}, "tool_choice is {}"),
        (TOOLS, {"type": "allowed_tools"}, "tool_choice is"),
        (TOOLS, {"type": ["auto"]}, "tool_choice is"),
        (TOOLS, {"type": "function"}, r"tool_choice\.function\.name"),
        (TOOLS, {"type": "function", "function": "set_mode"}, r"tool_choice\.function\.name"),
        (TOOLS, {"type": "function", "function": {"name": "reboot"}}, "tool_choice names the tool 'reboot'; tools has"),
        ([], "required", "tool_choice is 'required', but tools is empty"),
        (None, {"type": "function", "function": {"name": "x"}}, "tool_choice is .*, but tools is empty"),
        (None, "sometimes", "tool_choice is 'sometimes'"),
    ],
)
def test_a_malformed_declaration_is_a_request_error_naming_the_field(tools: Any, choice: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        read_tools(tools, choice)


def test_128_tools_are_taken() -> None:
    tools = read_tools([tool(f"f{i}") for i in range(128)])
    assert tools and len(tools.schemas) == 128


@pytest.mark.parametrize(
    ("function_call", "choice"),
    [(None, None), ("auto", "auto"), ("none", "none"), ({"name": "set_mode"}, "named")],
)
def test_the_fields_that_openai_had_before_say_the_same(function_call: Any, choice: Any) -> None:
    choice = {"type": "function", "function": {"name": "set_mode"}} if choice == "named" else choice
    assert tools_from_functions([entry["function"] for entry in TOOLS], function_call) == (TOOLS, choice)
    assert tools_from_functions(None) == (None, None)
    with pytest.raises(RequestError, match="tools must be a list"):
        read_tools(*tools_from_functions("x"))


# --- calls read from a reply ------------------------------------------------------------------------------------------

FAMILIES = {
    "hermes": "hermes",
    "hermes spelled": "hermes",
    "llama": "llama",
    "llama tag": "llama",
    "mistral": "mistral",
    "mistral args": "mistral args",
    "chatml": "hermes",
    "gemma": "hermes",
    "xml": "hermes",
    "silent": "hermes",
}


@every_template
def test_the_template_tells_the_family(name: str) -> None:
    assert tool_format(tool_tokenizer(name)).syntax.family == FAMILIES[name]


def test_bare_json_behind_a_tag_we_do_not_know_is_not_llamas() -> None:
    tokenizer = tool_tokenizer("llama")
    assert tool_format(tokenizer).syntax.between == '", "parameters": '
    tokenizer.chat_template = tokenizer.chat_template.replace('{"name": "{{', 'Action: {"name": "{{')
    assert tool_format(tokenizer).syntax is HERMES


@every_template
def test_what_is_part_of_a_call_is_shown_and_no_other_special_token(name: str) -> None:
    tokenizer = tool_tokenizer(name)
    shown = {tokenizer.convert_ids_to_tokens(i) for i in tool_format(tokenizer).shown_ids(tokenizer)}
    expected = {"llama tag": {"<|python_tag|>"}, "mistral": {"[TOOL_CALLS]"}}
    expected["mistral args"] = {"[TOOL_CALLS]", "[ARGS]"}
    assert shown == expected.get(name, set())


ON = ToolCall("", "toggle_data", {"on": True})
OFF = ToolCall("", "toggle_data", {"on": False})
WRITTEN: dict[str, list[tuple[str, ParsedReply]]] = {
    "hermes": [
        ('<tool_call>\n{"name": "toggle_data", "arguments": {"on": true}}\n</tool_call>', ParsedReply("", (ON,))),
        ('\n\n<tool_call>{"arguments":{"on":true},"name":"toggle_data"}</tool_call>\n', ParsedReply("", (ON,))),
        ('<tool_call>\n{"name": "toggle_data", "arguments": {"on": true}}', ParsedReply("", (ON,))),
        ('<tool_call>{"name": "toggle_data", "arguments": "{\\"on\\": true}"}</tool_call>', ParsedReply("", (ON,))),
        ('Sure.\n<tool_call>{"name": "f"}</tool_call> ok', ParsedReply("Sure.\n ok", (ToolCall("", "f", {}),))),
        ('<tool_call>{"name": "f", "parameters": null}</tool_call>', ParsedReply("", (ToolCall("", "f", {}),))),
        (
            '<tool_call>{"name": "toggle_data", "arguments": {"on": true}}</tool_call>\n'
            '<tool_call>{"name": "toggle_data", "arguments": {"on": false}}</tool_call>',
            ParsedReply("", (ON, OFF)),
        ),
        (
            '<tool_call>{"name": "f", "arguments": {"a": "</tool_call><tool_call>"}}</tool_call>',
            ParsedReply("", (ToolCall("", "f", {"a": "</tool_call><tool_call>"}),)),
        ),
        ('No call: {"name": "f"}', ParsedReply('No call: {"name": "f"}')),
        ("  Hello. ", ParsedReply("Hello.")),
        ("", ParsedReply("")),
    ],
    "llama": [
        ('{"name": "toggle_data", "parameters": {"on": true}}', ParsedReply("", (ON,))),
        ('\n<|python_tag|>{"name": "toggle_data", "parameters": {"on": true}}', ParsedReply("", (ON,))),
        (' {"type": "function", "name": "toggle_data", "arguments": {"on": true}}', ParsedReply("", (ON,))),
        (
            '{"name": "toggle_data", "parameters": {"on": true}}; {"name": "toggle_data", "parameters": {"on": false}}',
            ParsedReply("", (ON, OFF)),
        ),
        ('I wrote {"name": "f", "parameters": {}}.', ParsedReply('I wrote {"name": "f", "parameters": {}}.')),
    ],
    "mistral": [
        ('[TOOL_CALLS] [{"name": "toggle_data", "arguments": {"on": true}}]', ParsedReply("", (ON,))),
        ('[TOOL_CALLS][{"name": "toggle_data", "arguments": {"on": true}, "id": "a"}]', ParsedReply("", (ON,))),
        (
            '[TOOL_CALLS] [{"name": "toggle_data", "arguments": {"on": true}}, '
            '{"name": "toggle_data", "arguments": {"on": false}}]',
            ParsedReply("", (ON, OFF)),
        ),
        ('[TOOL_CALLS] {"name": "toggle_data", "arguments": {"on": true}}', ParsedReply("", (ON,))),
    ],
    "mistral args": [
        ('[TOOL_CALLS]toggle_data[ARGS]{"on": true}', ParsedReply("", (ON,))),
        ('[TOOL_CALLS]toggle_data[CALL_ID]x1[ARGS]{"on": true}', ParsedReply("", (ON,))),
        (
            '[TOOL_CALLS]toggle_data[ARGS]{"on": true}[TOOL_CALLS]toggle_data[ARGS]{"on":false}',
            ParsedReply("", (ON, OFF)),
        ),
        ('[TOOL_CALLS][{"name": "toggle_data", "arguments": {"on": true}}]', ParsedReply("", (ON,))),
    ],
}


@pytest.mark.parametrize(("name", "number"), [(name, i) for name, texts in WRITTEN.items() for i in range(len(texts))])
def test_calls_are_read_as_they_are_written(name: str, number: int) -> None:
    text, expected = WRITTEN[name][number]
    assert tool_format(tool_tokenizer(name)).parse(text) == expected


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("hermes", "<tool_call>", "no JSON"),
        ("hermes", "<tool_call>\n{'name': 'f'}</tool_call>", "no JSON"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}', "no JSON"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>', "no JSON"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1e999}}</tool_call>', "no JSON"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "\\ud83d"}}</tool_call>', "no JSON"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": ' + "9" * 5000 + "}}</tool_call>", "no JSON"),
        ("hermes", "<tool_call>" + '{"a":' * 100_000, "no JSON"),
        ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>', "arguments of f are no JSON object"),
        ("hermes", '<tool_call>{"name": "f", "arguments": "on"}</tool_call>', "arguments of f are no JSON: 'on'"),
        ("hermes", '<tool_call>{"name": "f", "arguments": "[1]"}</tool_call>', "arguments of f are no JSON object"),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>', "names no tool"),
        ("hermes", '<tool_call>{"name": 7}</tool_call>', "names no tool"),
        ("hermes", '<tool_call>"f"</tool_call>', "names no tool"),
        ("llama", '{"name": "f", "parameters": {', "no JSON"),
        ("llama", "{curly}", "no JSON"),
        ("llama", "<|python_tag|>print(1)", "no JSON"),
        ("mistral", "[TOOL_CALLS]", "no JSON"),
        ("mistral", "[TOOL_CALLS][1]", "names no tool"),
        ("mistral args", "[TOOL_CALLS]toggle_data[ARGS]", "no JSON"),
        ("mistral args", "[TOOL_CALLS]toggle_data[ARGS][1]", "arguments of toggle_data are no JSON object"),
    ],
)
def test_a_call_that_cannot_be_read_is_a_tool_call_error(name: str, text: str, message: str) -> None:
    with pytest.raises(ToolCallError, match=message):
        tool_format(tool_tokenizer(name)).parse(text)


@pytest.mark.parametrize(
    ("call", "choice", "message"),
    [
        ('{"name": "reboot", "arguments": {}}', None, "unknown tool 'reboot'; known: toggle_data, set_mode"),
        ('{"name": "toggle_data", "arguments": {}}', None, "toggle_data is called without on"),
        ('{"name": "toggle_data", "arguments": {"on": true, "x": 1}}', None, "toggle_data has no parameter x"),
        (
            '{"name": "toggle_data", "arguments": {"on": true}}',
            "set_mode",
            "unknown tool 'toggle_data'; known: set_mode",
        ),
        (None, "required", "the reply is no tool call; it has to call toggle_data or"),
    ],
)
def test_calls_are_checked_against_the_tools(call: str | None, choice: Any, message: str) -> None:
    form = tool_format(tool_tokenizer("hermes"))
    choice = {"type": "function", "function": {"name": choice}} if choice == "set_mode" else choice
    text = f"<tool_call>{call}</tool_call>" if call else "Hello."
    with pytest.raises(ToolCallError, match=message):
        form.parse(text, tools_of(choice))
    form.parse(text)
    assert form.parse('<tool_call>{"name": "run_speed_test"}</tool_call>', tools_of()).calls
    assert form.parse("Hello.", tools_of()) == ParsedReply("Hello.")


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**60), 2**60)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]))
    | st.sampled_from(["</tool_call>", "<tool_call>", "[TOOL_CALLS]", "[ARGS]{}", '"}', "\\", "\\u00e9", "{", ";{"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner)
    ),
    max_leaves=8,
)
calls_to_make = st.builds(
    ToolCall,
    st.just(""),
    st.from_regex(r"[A-Za-z0-9_.-]{1,64}", fullmatch=True),
    st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), json_values, max_size=4),
)


@every_native
@settings(max_examples=30, deadline=None)
@given(call=calls_to_make, space=st.sampled_from(["", "\n", "  \n"]))
def test_a_call_as_the_template_writes_it_is_read_back(name: str, call: ToolCall, space: str) -> None:
    """The reply is cut out of what the template itself renders; an id, where it writes one, is not the model's."""
    tokenizer = tool_tokenizer(name)
    function = {"name": call.name, "arguments": call.arguments}
    talk: list[dict[str, Any]] = [{"role": "user", "content": "Go."}]
    answer = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "x" * 9, "type": "function", "function": function}],
    }
    before = tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
    text = tokenizer.apply_chat_template([*talk, answer], tokenize=False)
    assert text.startswith(before)
    written = re.sub(r"(<\|im_end\|>\n|<\|eot_id\|>|</s>)$", "", text[len(before) :])
    written = written.replace(f', "id": "{"x" * 9}"', "").replace(f"[CALL_ID]{'x' * 9}", "")
    form = tool_format(tokenizer)
    assert form.parse(space + written + space) == ParsedReply("", (call,))
    assert form.syntax.write(call.name, call.arguments) == written


@every_template
@settings(max_examples=20, deadline=None)
@given(calls=st.lists(calls_to_make, min_size=1, max_size=3))
def test_what_is_written_is_read_back(name: str, calls: list[ToolCall]) -> None:
    form = tool_format(tool_tokenizer(name))
    separator = ";" if form.syntax.family == "llama" else "\n"
    if name == "llama tag":
        calls = calls[:1]
    text = separator.join(form.syntax.write(call.name, call.arguments) for call in calls)
    assert form.parse(text) == ParsedReply("", tuple(calls))


@every_template
@settings(max_examples=30, deadline=None)
@given(
    text=st.text()
    | st.lists(st.sampled_from(["<tool_call>", '{"name": "f"', "}", "[TOOL_CALLS]", "[", "x"])).map("".join)
)
def test_whatever_a_model_writes_is_a_reply_or_a_tool_call_error(name: str, text: str) -> None:
    try:
        reply = tool_format(tool_tokenizer(name)).parse(text)
    except ToolCallError:
        return
    assert reply.calls or reply.text == text.strip()


def test_ids_follow_from_the_seed() -> None:
    """Contract 9."""
    named = name_calls([ON, OFF], seed=7)
    assert named == name_calls([ON, OFF], seed=7) != name_calls([ON, OFF], seed=8)
    assert all(re.fullmatch("call_[0-9a-f]{24}", call.id) for call in named)
    assert len({call.id for call in named}) == 2 and [call.name for call in named] == ["toggle_data"] * 2


def test_a_call_goes_out_as_openai_has_it() -> None:
    call = ToolCall("call_1", "f", {"a": 'ü "quoted"', "b": [1.5, None]})
    sent = json.loads(json.dumps(wire_call(call)))
    assert {**sent, "function": None} == {"id": "call_1", "type": "function", "function": None}
    assert sent["function"]["name"] == "f" and json.loads(sent["function"]["arguments"]) == call.arguments


# --- what a reply may be ----------------------------------------------------------------------------------------------


def guide_of(name: str, choice: Any = None) -> tuple[PreTrainedTokenizerBase, Guide]:
    tokenizer = tool_tokenizer(name)
    return tokenizer, tool_format(tokenizer).guide(tokenizer, tools_of(choice))()


def allows(guide: Guide, token: int) -> bool:
    allowed = guide.allowed()
    return allowed is None or (token < len(allowed) and bool(allowed[token]))


def push(guide: Guide, tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    """Take a text's tokens, each of which must be allowed."""
    for token in tokenize(tokenizer, text):
        assert allows(guide, token), (text, tokenizer.decode([token]))
        guide.take(token)


@every_template
@pytest.mark.parametrize("space", ["", "\n", " \n"])
def test_a_reply_may_be_a_call_and_ends_with_it(name: str, space: str) -> None:
    tokenizer, guide = guide_of(name)
    syntax = tool_format(tokenizer).syntax
    written = syntax.write("toggle_data", {"on": True})
    push(guide, tokenizer, space)
    assert not guide.silent and not guide.done
    push(guide, tokenizer, syntax.opener)
    assert guide.silent, "contract 10"
    assert not allows(guide, tokenizer.eos_token_id), "a call is finished first"
    for token in tokenize(tokenizer, written)[len(tokenize(tokenizer, syntax.opener)) :]:
        assert not guide.done and allows(guide, token)
        guide.take(token)
    assert guide.done and guide.silent


@every_template
def test_a_reply_may_be_text_and_is_then_no_call(name: str) -> None:
    tokenizer, guide = guide_of(name)
    syntax = tool_format(tokenizer).syntax
    assert allows(guide, tokenizer.eos_token_id)
    push(guide, tokenizer, " Hello")
    tag = tokenizer.get_added_vocab().get(syntax.opener)
    assert (tag is None) == (name in ("hermes spelled", "llama", "chatml", "gemma", "silent"))
    assert tag is None or not allows(guide, tag)
    push(guide, tokenizer, ' {"name": "toggle_data"} there, <b>[x]\n')
    assert allows(guide, tokenizer.eos_token_id)
    assert not guide.silent and not guide.done and not guide.wrap_up()


@pytest.mark.parametrize(
    ("name", "begun", "refused", "taken"),
    [
        ("hermes spelled", "<tool_call", [], ">"),
        ("hermes spelled", "<tool_call>\n", ["[", "x", "\n"], '{"name": "set'),
        ("llama", "", ["<|python_tag|>"], "{"),
        ("llama", "{", ["'", "}", " "], '"name": "run'),
        ("llama", '{"name": "', ["x", "n"], "toggle_data"),
        ("hermes", "<tool_call>", ["{", " ", "</tool_call>"], '\n{"name": "set_mode", "arguments": {"mode":'),
        ("mistral args", "[TOOL_CALLS]", ["[ARGS]", "x", "[TOOL_CALLS]"], "toggle_data[ARGS]"),
    ],
)
def test_a_call_that_has_begun_is_held_to_the_tools(name: str, begun: str, refused: list[str], taken: str) -> None:
    tokenizer, guide = guide_of(name)
    push(guide, tokenizer, begun)
    for text in refused:
        assert not allows(guide, tokenize(tokenizer, text)[0]), text
    push(guide, tokenizer, taken)
    assert guide.silent


def test_a_beginning_that_turns_out_to_be_text_is_text() -> None:
    tokenizer, guide = guide_of("hermes spelled")
    push(guide, tokenizer, "<tool")
    assert not guide.silent
    push(guide, tokenizer, "s and so on> <tool_call>")
    assert not guide.silent and not guide.done and allows(guide, tokenizer.eos_token_id)


def test_tokens_that_open_a_call_the_wrong_way_are_refused() -> None:
    """Real vocabularies have tokens that hold an opener and more, or white space and an opener."""
    pieces = ["\u0120{", "{\u010a", '{"', '{"name', "{}", '\u010a{"', "\u0120Hello", "a{"]
    known = json.loads(tiny_tokenizer().backend_tokenizer.to_str())
    size = len(known["model"]["vocab"])
    known["model"]["vocab"] |= {piece: size + i for i, piece in enumerate(pieces)}
    larger = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(known)), eos_token="<|im_end|>")
    larger.chat_template, specials, _ = TOOL_TEMPLATES["llama"]
    larger.add_tokens(specials, special_tokens=True)
    larger.bos_token = "<s>"
    guide = tool_format(larger).guide(larger, tools_of())()
    allowed = guide.allowed()
    assert allowed is not None
    verdicts = {piece: bool(allowed[size + i]) for i, piece in enumerate(pieces)}
    good = {'{"', '{"name', "\u0120Hello", "a{"}
    assert verdicts == {piece: piece in good for piece in pieces}
    guide.take(size + pieces.index('{"name'))
    assert guide.silent
    guide = tool_format(larger).guide(larger, tools_of())()
    guide.take(size + pieces.index("a{"))
    assert not guide.silent and guide.allowed() is None


@every_template
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "set_mode"}}])
def test_a_reply_that_must_be_a_call_is_one_from_its_first_token(name: str, choice: Any) -> None:
    tokenizer, guide = guide_of(name, choice)
    syntax = tool_format(tokenizer).syntax
    assert guide.silent and not guide.done
    for text in ("H", " ", "\n", "<|im_end|>", "}"):
        assert not allows(guide, tokenize(tokenizer, text)[0])
    push(guide, tokenizer, syntax.before)
    assert allows(guide, tokenize(tokenizer, "toggle")[0]) == (choice == "required")
    push(guide, tokenizer, f'set_mode{syntax.between}{{"mode": "5g"}}{syntax.after}')
    assert guide.done


def walk(guide: Guide, tokenizer: PreTrainedTokenizerBase, draw: random.Random, patience: int) -> str:
    """Random allowed tokens; after `patience` of them the guide is asked to come to an end."""
    tokens: list[int] = []
    while not guide.done:
        if len(tokens) == patience:
            assert guide.wrap_up()
        assert len(tokens) < patience + 200
        allowed = guide.allowed()
        assert allowed is not None and allowed.any()
        token = draw.choice(torch.nonzero(allowed).flatten().tolist())
        guide.take(token)
        tokens.append(token)
    return str(tokenizer.decode(tokens, skip_special_tokens=False))


def check_call(form: Any, text: str, tools: Tools) -> None:
    reply = form.parse(text, tools)
    assert reply.text == "" and len(reply.calls) == 1
    (call,) = reply.calls
    assert call.name in tools.schemas
    jsonschema.validate(call.arguments, tools.schemas[call.name])


@every_template
@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 2**32), patience=st.integers(60, 150))
def test_any_walk_that_the_guide_allows_is_a_good_call(name: str, seed: int, patience: int) -> None:
    tokenizer, guide = guide_of(name, "required")
    check_call(tool_format(tokenizer), walk(guide, tokenizer, random.Random(seed), patience), tools_of("required"))


def test_the_same_tools_are_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []
    renew = grammar.Grammar.renew
    monkeypatch.setattr(grammar.Grammar, "renew", lambda self: (compiled.append(self), renew(self))[1])
    tokenizer = tool_tokenizer("hermes")
    form = tool_format(tokenizer)
    makers = [form.guide(tokenizer, tools_of()) for _ in range(3)]
    first, second = makers[0](), makers[0]()
    assert len(compiled) == 1 and first is not second
    push(first, tokenizer, "<tool_call>")
    assert first.silent and not second.silent
    form.guide(tokenizer, tools_of({"type": "function", "function": {"name": "set_mode"}}))()
    assert len(compiled) == 2


# --- with a model -----------------------------------------------------------------------------------------------------


# The others write and read as "chatml" does.
every_model = pytest.mark.parametrize("name", [*NATIVE, "chatml"])


@cache
def model(name: str) -> LanguageModel:
    return prepare_model(f"tiny {name}", tiny_network("llama"), tool_tokenizer(name))


@pytest.fixture(scope="module")
def engine_of() -> Iterator[Callable[[str], TransformersEngine]]:
    engines: dict[str, TransformersEngine] = {}

    def get(name: str) -> TransformersEngine:
        if name not in engines:
            engines[name] = TransformersEngine(model(name))
        return engines[name]

    yield get
    for engine in engines.values():
        engine.close()


def request(name: str, tools: Tools, seed: int, additions: Mapping[int, torch.Tensor], **sampling: Any) -> Request:
    tokenizer = model(name).tokenizer
    form = tool_format(tokenizer)
    return Request(
        prompt_ids=tuple(tokenize(tokenizer, render_prompt(tokenizer, [], "assistant", tools.declared))),
        seed=seed,
        sampling=Sampling(**sampling),
        stop_ids=model(name).stop_ids("assistant"),
        additions=additions,
        guide=form.guide(tokenizer, tools),
        shown_ids=form.shown_ids(tokenizer),
    )


@every_model
@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_a_random_model_that_must_call_a_tool_calls_one(
    name: str, temperature: float, engine_of: Callable[[str], TransformersEngine]
) -> None:
    tools = tools_of("required")
    asked = [request(name, tools, seed, {}, temperature=temperature, max_tokens=50) for seed in range(2)]
    for one in asked:
        check_call(tool_format(model(name).tokenizer), generate(engine_of(name), one).text, tools)


@every_model
def test_steering_is_silent_in_a_call(name: str, engine_of: Callable[[str], TransformersEngine]) -> None:
    """Contract 10: what must be a call says the same however strong the trait."""
    tools = tools_of("required")
    steered = {1: torch.full((32,), 30.0)}
    calls = [
        generate(engine_of(name), request(name, tools, 1, additions, temperature=0.0, max_tokens=50)).token_ids
        for additions in ({}, steered)
    ]
    assert calls[0] == calls[1]


@every_model
def test_a_random_model_that_may_call_a_tool_says_something_or_calls_one(
    name: str, engine_of: Callable[[str], TransformersEngine]
) -> None:
    tools = tools_of()
    form = tool_format(model(name).tokenizer)
    opener = tokenize(model(name).tokenizer, form.syntax.opener)[0]
    kinds = []
    for seed, bias in ((0, 0.0), (1, 0.0), (2, 100.0)):  # the last one is pushed to open a call, again and again
        asked = request(name, tools, seed, {}, temperature=1.0, max_tokens=40, logit_bias={opener: bias})
        text = generate(engine_of(name), asked).text
        try:
            reply = form.parse(text, tools)
        except ToolCallError:
            assert name in ("hermes spelled", "chatml", "gemma", "silent") or not text
            continue
        kinds.append(bool(reply.calls))
        assert not (reply.calls and reply.text)
    if form.syntax.opener in model(name).tokenizer.get_added_vocab() or name == "llama":
        assert kinds[-1], "pushed to call, it calls"
