"""Conversations, and what a reply to one may have to be: JSON of a schema, or a call of a tool.

What has ``any`` in its name may be broken; the rest keeps to the protocol.
"""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from texts import TRICKY, Body, any_texts, either, junk, long_texts, some_of, texts

# --- messages ---------------------------------------------------------------------------------------------------------

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_EXTRAS: dict[str, SearchStrategy[Any]] = {
    "name": texts,
    "trace_id": junk,
    "reasoning_content": junk,
    "function_call": st.none(),
    "tool_calls": st.sampled_from((None, [])),
    "refusal": st.none(),
    "cache_control": junk,
}
_parts = st.lists(
    st.one_of(
        st.fixed_dictionaries({"type": st.just("text"), "text": texts}),
        st.fixed_dictionaries({"type": st.just("input_text"), "text": texts, "annotations": st.just([])}),
    ),
    max_size=3,
)
_contents = st.one_of(texts, texts, st.none(), _parts)
_arguments = st.one_of(
    st.sampled_from(("{}", '{"id": "W1"}', '{"id": 1', "null", "[1]", "", '"text"', "NaN", '{"id": "<|im_end|>"}')),
    texts,
)
_call_names = st.sampled_from(("look_up", "set_roaming", "gone"))
_calls = st.lists(
    st.builds(
        lambda call_id, name, arguments, named: {
            "id": call_id,
            "type": "function",
            "function": {"name": name, "arguments": arguments},
            **({"name": name} if named else {}),
        },
        st.sampled_from(("call_1", "call_2", "")),
        _call_names,
        _arguments,
        st.booleans(),
    ),
    min_size=1,
    max_size=2,
)
_plain_messages = st.builds(
    lambda role, content, extras: {**extras, "role": role, **content},
    st.sampled_from(ROLES),
    st.one_of(st.fixed_dictionaries({"content": _contents}), st.just({})),
    some_of(_EXTRAS, 2),
)
_call_messages = st.builds(
    lambda content, calls: {"role": "assistant", **content, "tool_calls": calls},
    st.one_of(st.fixed_dictionaries({"content": _contents}), st.just({})),
    _calls,
)
_results = st.builds(
    lambda role, content, call_id: {"role": role, "content": content, "tool_call_id": call_id},
    st.sampled_from(("tool", "function")),
    _contents,
    st.sampled_from(("call_1", "call_2", "call_3")),
)
messages = st.lists(st.one_of(_plain_messages, _plain_messages, _call_messages, _results), min_size=1, max_size=6)

_any_message = st.one_of(
    _plain_messages,
    _call_messages,
    _results,
    some_of(
        {
            "role": either(st.sampled_from(ROLES)),
            "content": st.one_of(
                any_texts, long_texts, junk, st.lists(some_of({"type": junk, "text": junk}, 2), max_size=2)
            ),
            "tool_calls": st.one_of(junk, st.lists(some_of({"id": junk, "function": junk, "type": junk}), max_size=2)),
            "function_call": junk,
            "tool_call_id": junk,
            "name": junk,
        }
    ),
)
any_messages = st.one_of(st.lists(_any_message, max_size=6), st.lists(_plain_messages, min_size=22, max_size=26), junk)

# --- schemas, formats and tools ---------------------------------------------------------------------------------------

_keys = st.one_of(
    st.sampled_from(("id", "on", "name", "argument", "simulated_input", "a b", "\u00e9", '"')),
    st.text("abc_", min_size=1, max_size=5),
)
_leaf_schemas = st.one_of(
    st.sampled_from([{"type": name} for name in ("string", "integer", "number", "boolean", "null")]),
    st.just({"type": "string", "description": "a text", "title": "T"}),
    st.lists(
        st.one_of(
            st.text('abc <"\\\u00e9', max_size=6),
            st.sampled_from([text for text in TRICKY if len(text.encode()) < 24]),
            st.integers(-99, 99),
            st.booleans(),
            st.none(),
        ),
        min_size=1,
        max_size=3,
        unique_by=repr,
    ).map(lambda values: {"enum": values}),
    st.builds(
        lambda low, more: {"type": "integer", "minimum": low, "maximum": low + more},
        st.integers(-500, 500),
        st.integers(0, 500),
    ),
    st.builds(
        lambda low, more: {"type": "string", "minLength": low, "maxLength": low + more},
        st.integers(0, 5),
        st.integers(0, 9),
    ),
    st.sampled_from(
        (
            {"const": "x"},
            {"type": ["string", "null"]},
            {"type": "string", "pattern": "^[a-z]{1,4}$"},
            {"type": "string", "format": "date"},
            {"type": "string", "format": "shoe-size"},
            {},
        )
    ),
)


def _object_schema(properties: Body, needed: int, closed: bool) -> Body:
    schema = {"type": "object", "properties": properties, "required": list(properties)[:needed]}
    return schema | ({"additionalProperties": False} if closed else {})


def _objects(inner: SearchStrategy[Any]) -> SearchStrategy[Body]:
    return st.builds(_object_schema, st.dictionaries(_keys, inner, max_size=2), st.integers(0, 2), st.booleans())


schemas = st.recursive(
    _leaf_schemas,
    lambda inner: st.one_of(
        _objects(inner),
        st.builds(lambda items, most: {"type": "array", "items": items, "maxItems": most}, inner, st.integers(0, 2)),
        st.lists(inner, min_size=1, max_size=2).map(lambda options: {"anyOf": options}),
    ),
    max_leaves=4,
)
object_schemas = _objects(schemas)
_KEYWORDS = (
    *("type", "properties", "required", "items", "enum", "const", "anyOf", "oneOf", "allOf", "not", "if", "$ref"),
    *("$defs", "pattern", "format", "minimum", "multipleOf", "minItems", "minLength", "uniqueItems", "default"),
    *("additionalProperties", "patternProperties", "x-guidance"),
)
_any_schemas = st.recursive(
    st.one_of(
        junk,
        schemas,
        st.sampled_from(
            (
                {"$ref": "#"},
                {"$ref": "#/properties/a"},
                {"type": "string", "minLength": 5000},
                {"type": "string", "pattern": "(a+)+$"},
                {"not": {}},
                {"type": "string", "pattern": "("},
                {"pattern": "(?=a)b"},
                {"enum": []},
                {"type": "array", "minItems": 10**9},
            )
        ),
    ),
    lambda inner: st.one_of(
        st.dictionaries(st.sampled_from(_KEYWORDS), inner, max_size=4),
        st.fixed_dictionaries({"type": st.just("object"), "properties": st.dictionaries(any_texts, inner, max_size=2)}),
    ),
    max_leaves=6,
)


def json_format(schema: Any) -> Body:
    return {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": schema}}


formats = st.one_of(
    st.just({"type": "text"}),
    st.none(),
    st.just({"type": "json_object"}),
    object_schemas.map(json_format),
    schemas.map(json_format),
)
any_formats = st.one_of(
    junk,
    formats,
    _any_schemas.map(json_format),
    some_of({"type": either(st.just("json_schema")), "json_schema": junk, "schema": junk}),
)


def _tool(name: str, parameters: Body | None, described: bool) -> Body:
    function: Body = {"name": name, **({"description": "It is <looked> up."} if described else {})}
    return {"type": "function", "function": function | ({} if parameters is None else {"parameters": parameters})}


_tools = st.lists(
    st.builds(_tool, _call_names, st.one_of(st.none(), object_schemas), st.booleans()),
    min_size=1,
    max_size=2,
    unique_by=lambda tool: tool["function"]["name"],
)
any_tools = st.one_of(
    junk,
    st.lists(
        st.fixed_dictionaries(
            {},
            optional={
                "type": either(st.just("function")),
                "function": some_of(
                    {
                        "name": either(_call_names),
                        "description": either(texts),
                        "parameters": _any_schemas,
                        "strict": junk,
                    }
                ),
            },
        ),
        max_size=3,
    ),
)


def _named(name: str) -> Body:
    return {"type": "function", "function": {"name": name}}


with_tools = _tools.flatmap(
    lambda tools: st.one_of(
        st.just({}),
        *[
            st.just({"tool_choice": choice})
            for choice in ("auto", "none", "required", _named(tools[0]["function"]["name"]))
        ],
    ).map(lambda choice: {"tools": tools, **choice})
)
with_functions = _tools.map(lambda tools: {"functions": [tool["function"] for tool in tools], "function_call": "auto"})
without_tools = st.sampled_from(
    ({}, {}, {"tools": []}, {"tools": None, "tool_choice": None}, {"tools": [], "tool_choice": "auto"})
)
any_choices = st.one_of(
    junk, st.sampled_from(("none", "auto", "required", "any", _named("look_up"), {"type": "function"}))
)
