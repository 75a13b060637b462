"""What is sent: bodies that keep to the protocol, by what the contract (1.5) and docs/users.md say, and bodies that may
break it anywhere. The first must be answered with 200, so that a server cannot pass by refusing everything."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

from conversations import (
    any_choices,
    any_formats,
    any_messages,
    any_tools,
    formats,
    messages,
    with_functions,
    with_tools,
    without_tools,
)
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from served import TRAITS
from texts import TRICKY, any_texts, junk, long_texts, merged, some_of, texts

# --- traits, users and sampling ---------------------------------------------------------------------------------------

_levels = st.one_of(
    st.sampled_from(("off", "low", "medium", "high", "0.5", "-1")), st.integers(-2, 2), st.floats(-2, 2), st.none()
)
trait_maps = st.dictionaries(st.sampled_from(TRAITS), _levels, max_size=2)
_written = ("impatience", "impatience-high", "impatience-0.5+skeptical--1", "skepticism-low", "off", "none")
specs = st.one_of(st.sampled_from(_written), st.floats(-2, 2).map(lambda x: f"skeptical-{x:.3f}"))
_traits = st.one_of(specs, trait_maps, st.none())
_any_traits = st.one_of(
    junk, _traits, st.dictionaries(st.sampled_from(("impatience", "Skeptical ", "greed")), junk, max_size=2)
)
_CHANNELS = ("traits", "trait_dict", "trait")
_in_body = some_of(
    {
        **dict.fromkeys(_CHANNELS, _traits),
        "extra_body": st.one_of(st.none(), some_of(dict.fromkeys(_CHANNELS, _traits), 2)),
    },
    2,
)
_any_in_body = some_of(
    {
        **dict.fromkeys(_CHANNELS, _any_traits),
        "extra_body": st.one_of(junk, some_of(dict.fromkeys(_CHANNELS, _any_traits), 2)),
    },
    2,
)
USERS = ("steered-user", "anna", "strict", "live")
models = st.builds(
    lambda name, spec, trial: f"{name}{spec}{trial}",
    st.sampled_from(USERS),
    st.one_of(st.just(""), specs.map(lambda spec: f"@{spec}")),
    st.one_of(st.just(""), st.integers(0, 9).map(lambda trial: f"={trial}")),
)
_header_texts = st.text(st.characters(min_codepoint=32, max_codepoint=255, exclude_characters="\x7f"), max_size=20).map(
    str.strip
)
headers = some_of(
    {
        "X-Traits": specs,
        "X-Trial": st.sampled_from(("1", "two")),
        "Authorization": st.just("Bearer x"),
        "API-Key": st.just("x"),
        "X-Request-ID": st.just("abc"),
    },
    2,
)
any_headers = some_of(
    {
        **dict.fromkeys(
            ("X-Traits", "X-Trial", "X-Request-ID", "Authorization", "API-Key", "Accept", "x-irid"),
            st.one_of(_header_texts.map(lambda text: text.encode("latin-1")), specs),
        ),
        "Content-Type": st.sampled_from(
            ("application/json", "text/plain", "application/json; charset=utf-16", "multipart/form-data", "x")
        ),
    },
    2,
)


def paths(tail: str) -> SearchStrategy[str]:
    """Where an endpoint is found, traits or a user in the path included."""
    spec = st.one_of(specs, st.sampled_from(USERS), st.just("anna@off"), st.just("steered-user@impatience-low=3"))
    return st.one_of(st.just(f"/v1{tail}"), st.just(f"/v1{tail}"), spec.map(lambda spec: f"/u/{quote(spec)}/v1{tail}"))


def any_paths(tail: str) -> SearchStrategy[str]:
    """The same, with anything in the path."""
    written = st.one_of(texts.filter(lambda text: text not in (".", "..")), st.just("\ufffd")).map(
        lambda text: quote(text, safe="/") or "%20"
    )
    return st.one_of(
        st.just(f"/v1{tail}"),
        paths(tail),
        written.map(lambda spec: f"/u/{spec}/v1{tail}"),
        st.just(f"/u/%ff%fe/v1{tail}"),
    )


path_tails = st.one_of(
    st.sampled_from(("", "/", "//", "?", "/..", "/%2e%2e/", "/%2F", "/%00", "?x=%ff", "/v1/models", "%0d%0aX:1")),
    texts.map(lambda text: quote(f"/{text}", safe="/")),
)
_token_ids = st.integers(0, 259)
_stops = st.one_of(
    st.none(),
    st.text(min_size=1, max_size=4),
    st.lists(st.sampled_from(("a", "\n", "###", "Z ", "\u00e9")), max_size=4),
)
_SAMPLING: dict[str, SearchStrategy[Any]] = {
    "temperature": st.one_of(st.sampled_from((0, 1e-7, 100)), st.floats(0, 2)),
    "top_p": st.one_of(st.just(1e-9), st.floats(0.01, 1)),
    "top_k": st.sampled_from((0, 1, 40, 10**9)),
    "min_p": st.floats(0, 1),
    "repetition_penalty": st.floats(0.5, 2),
    "presence_penalty": st.floats(-2, 2),
    "frequency_penalty": st.floats(-2, 2),
    "logit_bias": st.one_of(
        st.none(), st.dictionaries(_token_ids.map(str), st.sampled_from((-100, 0, 5.5, 100)), max_size=3)
    ),
    "max_tokens": st.sampled_from((1, 2, 8, 16, 4096)),
    "stop": _stops,
    "seed": st.one_of(st.integers(0, 9), st.integers(-(2**70), 2**70)),
    "n": st.sampled_from((1, 2, 3)),
    "trial": st.one_of(st.integers(0, 9), st.text(max_size=4)),
    "positions": st.sampled_from(("generated", "all")),
    "user": texts,
    "metadata": junk,
    "service_tier": st.just("auto"),
}
_CHAT: dict[str, SearchStrategy[Any]] = {
    **_SAMPLING,
    "max_completion_tokens": st.sampled_from((1, 12)),
    "logprobs": st.booleans(),
    "top_logprobs": st.integers(0, 20),
    "parallel_tool_calls": st.booleans(),
    "reasoning_effort": st.just("low"),
    "store": st.booleans(),
}
_streamed = st.sampled_from(
    ({}, {}, {"stream": False}, {"stream": True}, {"stream": True, "stream_options": {"include_usage": True}})
)
_any_streamed = st.one_of(
    _streamed, some_of({"stream": junk, "stream_options": st.one_of(junk, st.just({"include_usage": 1}))}, 2)
)


# Of the right type, and of any value: what is of another type does not get far.
_any_whole = st.one_of(st.integers(-2, 40), st.integers(), st.sampled_from((2**31, 2**63, -(2**63), 10**30, -1)))
_any_number = st.one_of(_any_whole, st.floats(), st.sampled_from((1e308, -1e308, 1e-320, -0.0, 99.9)))
_EXTREMES: dict[str, SearchStrategy[Any]] = {
    **dict.fromkeys(("top_k", "max_tokens", "max_completion_tokens", "seed", "n", "top_logprobs"), _any_whole),
    **dict.fromkeys(("temperature", "top_p", "min_p", "repetition_penalty"), _any_number),
    **dict.fromkeys(("presence_penalty", "frequency_penalty"), _any_number),
    "logit_bias": st.dictionaries(st.one_of(_any_whole.map(str), any_texts), _any_number, max_size=4),
    "stop": st.one_of(any_texts, long_texts, st.lists(any_texts, max_size=20)),
    "trial": st.one_of(_any_whole, any_texts, long_texts),
    "model": st.one_of(
        any_texts, st.builds("{}{}{}".format, models, any_texts, st.sampled_from(("", "=", "@", "=1=2", "@off")))
    ),
    "stream_options": some_of({"include_usage": st.one_of(st.booleans(), st.none()), "include_obfuscation": junk}, 2),
    "user": any_texts,
}


# --- bodies -----------------------------------------------------------------------------------------------------------

_head = st.fixed_dictionaries({"model": models, "messages": messages})
chats = st.one_of(
    merged(some_of(_CHAT, 4), _in_body, _streamed, without_tools, _head),
    merged(
        some_of(_CHAT, 4),
        _in_body,
        _streamed,
        st.fixed_dictionaries({"response_format": formats}),
        without_tools,
        _head,
    ),
    merged(some_of(_CHAT, 4), _in_body, _streamed, st.one_of(with_tools, with_tools, with_functions), _head),
)
any_chats = st.one_of(
    merged(chats, some_of(_EXTREMES, 2)),
    merged(chats, st.fixed_dictionaries({"messages": any_messages})),
    merged(chats, _any_in_body, _any_streamed),
    merged(
        some_of(_CHAT, 2),
        some_of(
            {"tools": any_tools, "tool_choice": any_choices, "functions": any_tools, "function_call": any_choices},
            2,
        ),
        _head,
    ),
    merged(some_of(_CHAT, 2), _streamed, st.fixed_dictionaries({"response_format": any_formats}), _head),
    merged(chats, some_of(dict.fromkeys((*_CHAT, "model", "messages", "tools", "stream"), junk), 1)),
    junk,
)

_prompts = st.one_of(
    st.text(min_size=1, max_size=30),
    st.sampled_from([text for text in TRICKY if text]),
    st.lists(_token_ids, min_size=1, max_size=20),
    st.lists(st.text(min_size=1, max_size=9), min_size=1, max_size=3),
    st.lists(st.lists(_token_ids, min_size=1, max_size=4), min_size=1, max_size=2),
)
_COMPLETION = {**_SAMPLING, "best_of": st.none(), "suffix": st.sampled_from((None, ""))}
_echoes = st.sampled_from(
    ({}, {"logprobs": 2}, {"echo": True}, {"echo": True, "logprobs": 0}, {"echo": True, "logprobs": 5, "max_tokens": 0})
)
completions = st.one_of(
    merged(some_of(_COMPLETION, 4), _in_body, _streamed, st.fixed_dictionaries({"model": models, "prompt": _prompts})),
    merged(some_of(_COMPLETION, 4), _in_body, _echoes, st.fixed_dictionaries({"model": models, "prompt": _prompts})),
)
_any_prompts = st.one_of(
    any_texts,
    long_texts,
    st.lists(any_texts, max_size=3),
    st.lists(st.one_of(_token_ids, _any_whole), max_size=4),
    st.lists(st.lists(st.one_of(_token_ids, _any_whole), max_size=3), max_size=3),
    st.sampled_from((["a"] * 64, ["a"] * 65, ["a", 1], [[1], "a"], [1.0, 2], [True], [[]])),
    junk,
)
any_completions = st.one_of(
    merged(completions, some_of(_EXTREMES, 2)),
    merged(completions, st.fixed_dictionaries({"prompt": _any_prompts})),
    merged(completions, _any_in_body, _any_streamed),
    merged(
        completions,
        some_of({"logprobs": _any_whole, "best_of": _any_whole, "suffix": any_texts, "echo": st.booleans()}, 2),
    ),
    merged(completions, some_of(dict.fromkeys((*_COMPLETION, "model", "echo"), junk), 1)),
    junk,
)

_characteristics = st.dictionaries(
    st.sampled_from(("age", "occupation", "language", "intent", "task")),
    st.one_of(texts, st.integers(1, 99), st.none()),
    max_size=4,
)
_STEERED: dict[str, SearchStrategy[Any]] = {
    "user_characteristics": st.one_of(st.none(), _characteristics),
    "temperature": st.floats(0, 2),
    "max_tokens": st.sampled_from((1, 8, 256)),
    "seed": st.one_of(st.just(-1), st.integers(0, 99)),
    "system_prompt": st.integers(0, 3),
    "trial": st.integers(0, 3),
}
steered = merged(some_of(_STEERED), st.fixed_dictionaries({"messages": messages}, optional={"trait_dict": trait_maps}))
batches = st.lists(st.one_of(steered, merged(steered, st.just({"messages": []}))), max_size=3)
any_steered = st.one_of(
    merged(steered, st.fixed_dictionaries({"messages": any_messages})),
    merged(steered, _any_in_body),
    merged(steered, some_of({name: values for name, values in _EXTREMES.items() if name in _STEERED}, 2)),
    merged(
        steered,
        some_of(
            {
                "user_characteristics": st.one_of(junk, st.dictionaries(any_texts, junk, max_size=3)),
                "system_prompt": junk,
            },
            2,
        ),
    ),
    merged(steered, some_of(dict.fromkeys((*_STEERED, "messages", "trait_dict"), junk), 1)),
    junk,
)
any_batches = st.one_of(st.lists(any_steered, max_size=3), junk)

_chatted = st.fixed_dictionaries(
    {},
    optional={
        "instructions": st.one_of(texts, st.none()),
        "history": st.one_of(messages, st.just([]), st.none()),
        "version": junk,
    },
)
promptfoo = merged(_chatted, _in_body, st.fixed_dictionaries({"task": st.just("tau")}))
any_promptfoo = st.one_of(
    merged(
        promptfoo,
        _any_in_body,
        some_of({"instructions": st.one_of(any_texts, long_texts), "history": any_messages, "trial": junk}, 2),
    ),
    merged(promptfoo, some_of({"instructions": junk, "history": junk}, 1)),
    junk,
)

# --- bytes ------------------------------------------------------------------------------------------------------------

_BYTES = (
    *(b"", b"{", b"null", b"[]", b'"', b"\xff\xfe{}", b"\xef\xbb\xbf{}", b"{}x", b"NaN", b"1" * 5000, b" " * 120_000),
    *(b"[" * 90_000, b'{"a":' * 15_000),
)
_VALUES = (b"9" * 5000, b"1e400", b"-Infinity", b'"\xff"', b'"\\ud800"', b"1.0", b'{"a": 1, "a": 2}')
_FIELDS = ("tools", "response_format", "traits", "stop", "seed", "metadata", "messages", "logit_bias", "model")
_levels_deep = st.one_of(st.sampled_from((70, 300, 3000)), st.integers(400, 1000))
_brackets = st.sampled_from(((b"[", b"]"), (b'{"a":', b"1}"), (b'{"type":"object","properties":{"a":', b"}}")))
_deep = st.builds(lambda levels, pair: pair[0] * levels + pair[1] * levels, _levels_deep, _brackets)
raw = st.one_of(
    st.binary(max_size=40),
    st.sampled_from(_BYTES),
    st.builds(
        b'{"model": "steered-user", "messages": [{"role": "user", "content": "Hi"}], "%b": %b}'.__mod__,
        st.tuples(st.sampled_from([field.encode() for field in _FIELDS]), st.one_of(_deep, st.sampled_from(_VALUES))),
    ),
)
