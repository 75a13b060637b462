"""Replies by a schema: JSON that always parses, tool calls, and text by a pattern. On llguidance, a parser that says
which tokens may come next (Earley over derivatives of regular expressions; github.com/guidance-ai/llguidance).

A Grammar is compiled once, in the thread that asks for it; its guides, one a generation, are cheap copies. What is our
own here: no special token ever stands inside JSON, no number goes on for ever or overflows, and a reply that has used
up its tokens is brought to its end.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from tokenizers import Tokenizer
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from traitbasis.engines.base import Guide
from traitbasis.errors import EngineError, RequestError

_KEPT_GRAMMARS = 32
_LONGEST_NUMBER = 20  # characters; a model that repeats a digit would do so for ever
_END = "<|traitbasis: the reply may end here|>"
# One space where people put one, and no other white space: a model can go on with that for ever, too.
_COMPACT = {"item_separator": ", ?", "key_separator": ": ?", "whitespace_flexible": False}
# Without forcing, fixed text is spelled by any tokens that give it; forced, it may become a special token.
_HEAD = '%llguidance {"no_forcing": true}\n'
# Room for thousands of optional properties; and verbose errors would quote the reply.
_LIMITS = LLParserLimits(max_items_in_row=20_000, step_max_items=200_000, verbose_errors=False)
_UNKNOWN_FORMAT = "Unknown format: "


def json_grammar(tokenizer: PreTrainedTokenizerBase, schema: Mapping[str, Any] | None) -> Grammar:
    """JSON that satisfies a schema, compact, properties in the schema's order; None is any JSON object.

    A ``format`` that is not known asserts nothing, as JSON Schema has it. Compiled grammars are kept.
    Raises RequestError for a schema that is invalid or cannot be enforced, naming the reason.
    """
    schema = {"type": "object"} if schema is None else schema
    while True:
        try:
            return _vocabulary(tokenizer).grammar(f"{_HEAD}start: {_json(schema)}")
        except RequestError as error:
            _, unknown, name = str(error).partition(_UNKNOWN_FORMAT)
            if not unknown or (less := _without_format(schema, name)) == schema:
                raise
            schema = less


def tagged_grammar(
    tokenizer: PreTrainedTokenizerBase, alternatives: Sequence[tuple[str, Mapping[str, Any], str]]
) -> Grammar:
    """One of several (text before, JSON schema, text after), such as ``("<tool_call>\\n", {...}, "\\n</tool_call>")``.

    Where the texts hold an added token of the tokenizer, special or not, that token stands there
    (``Grammar.shown_ids``). What of a schema cannot be enforced is ignored: the JSON parses all the same.
    Raises RequestError for a schema that is invalid, naming the reason.
    """
    vocabulary = _vocabulary(tokenizer)
    rules = [
        f"{vocabulary.literal(before)} {_json(schema, lenient=True)} {vocabulary.literal(after)}"
        for before, schema, after in alternatives
    ]
    starts = tuple(sorted({before.encode() for before, _, _ in alternatives}, key=len, reverse=True))
    texts = [text for before, _, after in alternatives for text in (before, after)]
    shown = vocabulary.special & {vocabulary.added.get(part, -1) for text in texts for part in vocabulary.parts(text)}
    return vocabulary.grammar(f"{_HEAD}start: {' | '.join(rules)}", starts, shown)


def text_grammar(tokenizer: PreTrainedTokenizerBase, pattern: str) -> Grammar:
    """Plain text that matches a regular expression, in the syntax of Rust's ``regex``, from beginning to end.

    It ends where the pattern lets it and the model wants it. Raises RequestError for a pattern that is invalid.
    """
    escaped = re.sub(r"(?<!\\)((?:\\\\)*)/", r"\1\/", pattern).replace("\n", r"\n")
    return Grammar(_vocabulary(tokenizer), f"{_HEAD}start: /{escaped}/", (), frozenset(), text=True)


class Grammar:
    """What a reply may be, compiled for one tokenizer. May be used from several threads.

    shown_ids: special tokens that are part of such a reply's text, for ``Request.shown_ids``.
    """

    def __init__(
        self,
        vocabulary: _Vocabulary,
        source: str,
        starts: Sequence[bytes],
        shown_ids: frozenset[int],
        text: bool = False,
    ) -> None:
        """source: llguidance's form of Lark. starts: the texts that may stand before the JSON, longest first. text:
        it is no JSON, whose numbers and ends are seen to."""
        self.vocabulary = vocabulary
        self.starts = starts
        self.text = text
        self.shown_ids = shown_ids
        self._source = source
        self.renew()
        first = self.matcher()
        first.compute_bitmask()
        if first.is_error():  # nothing can come first, as with {"$ref": "#"}
            raise RequestError("the JSON schema cannot be used: nothing satisfies it")

    def guide(self, stop_ids: Collection[int] = (), *, silent: bool = True) -> Guide:
        """A guide for one generation. It ends by itself; where more could follow but need not (a bare number), the
        tokenizer's end token and `stop_ids` may end it, too. silent: unsteered, as what a grammar asks for should be
        (contract 10), unless it is a user's turn in JSON."""
        return _GrammarGuide(self, stop_ids, silent)

    def matcher(self) -> LLMatcher:
        """A parser at its beginning. Copies share what their lexer has learned, which makes them fast."""
        return self._compiled.deep_copy()

    def renew(self) -> None:
        """Forget what the shared lexer has learned: it is bounded, and full it fails for everybody."""
        compiled = LLMatcher(self.vocabulary.tokens, self._source, log_level=0, limits=_LIMITS)
        if compiled.is_error():
            what = "pattern" if self.text else "JSON schema"
            raise RequestError(f"the {what} cannot be used: {_reason(compiled)}")
        self._compiled = compiled


class _GrammarGuide:
    """See ``Guide``."""

    def __init__(self, grammar: Grammar, stop_ids: Collection[int], silent: bool) -> None:
        self.silent = silent
        self.done = False
        self._grammar = grammar
        self._vocabulary = grammar.vocabulary
        self._matcher = grammar.matcher()
        self._stop_ids = self._vocabulary.eos | {token for token in stop_ids if token < self._vocabulary.end}
        self._tokens: list[int] = []
        self._text = bytearray()
        self._wrapping = False

    def allowed(self) -> Tensor:
        bits = self._bits()
        if self._matcher.is_error():
            self._recover(self._tokens)
            bits = self._bits()
            if self._matcher.is_error():
                raise EngineError(f"the grammar of this request cannot go on: {_reason(self._matcher)}")
        end = self._vocabulary.end
        allowed = torch.from_numpy(bits[:end].view(bool))
        if bits[end]:
            allowed[list(self._stop_ids)] = True
        for wish in self._wishes():
            if (found := allowed & wish).any():
                return found
        return allowed

    def take(self, token: int) -> None:
        self._tokens.append(token)
        if token in self._stop_ids:
            self.done = True
            return
        if not self._matcher.consume_token(token):
            self._recover(self._tokens)
            if self._matcher.is_error():
                raise EngineError(f"token {token} is not what the grammar allows: {_reason(self._matcher)}")
        self._text += self._vocabulary.text(token)
        self.done = self._matcher.is_stopped() or (self._wrapping and self._matcher.is_accepting())

    def wrap_up(self) -> bool:
        self._wrapping = not self._matcher.is_accepting()
        return self._wrapping

    def _bits(self) -> Any:
        """One byte a token, 1 where it is allowed; the last one stands for the end."""
        return np.unpackbits(np.frombuffer(self._matcher.compute_bitmask(), np.uint8), bitorder="little")

    def _recover(self, tokens: Sequence[int]) -> None:
        """Replies of other requests may have filled the lexer: what one says must not depend on that (contract 9)."""
        self._grammar.renew()
        self._matcher = self._grammar.matcher()
        self._matcher.consume_tokens(list(tokens))

    def _wishes(self) -> Sequence[Tensor]:
        """Which tokens are preferred, best first; where none of them is allowed, any that is."""
        kinds = self._vocabulary
        if self._grammar.text:
            return ()
        if self._wrapping:
            if self._in_string():
                return (kinds.closing_string,)
            return kinds.closing, kinds.comma, ~kinds.opening
        if self._text[-1:].isdigit() and not self._in_string():
            long = re.fullmatch(rb"[-0-9.]+", self._text[-_LONGEST_NUMBER:]) and len(self._text) >= _LONGEST_NUMBER
            return (~(kinds.number if long else kinds.exponent),)
        return ()

    def _in_string(self) -> bool:
        begin = next((len(start) for start in self._grammar.starts if self._text.startswith(start)), 0)
        outside = _OUTSIDE_STRINGS.match(self._text, begin)
        return outside is None or outside.end() < len(self._text)


# From a place outside of strings up to the beginning of one that is not closed.
_OUTSIDE_STRINGS = re.compile(rb'(?:[^"]|"(?:[^"\\]|\\.)*+")*+', re.DOTALL)


class _Vocabulary:
    """A tokenizer as llguidance sees it, and kinds of its tokens: bool ``(tokens,)``.

    end: a token beyond the tokenizer's own; where the parser allows it, a reply may end. closing_string: ends a string
    and perhaps what it is in. opening: opens what would have to be closed. number, exponent: go on with a number.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        try:
            known = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
            known.no_padding()
            known.no_truncation()
            known.add_special_tokens([_END])
            self.end = int(known.token_to_id(_END) or 0)
            self.tokens = LLTokenizer(known.to_str(), eos_token=self.end)
        except (AttributeError, ValueError) as error:
            raise RequestError(
                f"{type(tokenizer).__name__} cannot write by a schema: it is no byte-level or byte-fallback tokenizer "
                f"of the tokenizers library ({error})"
            ) from error
        self.eos = frozenset() if tokenizer.eos_token_id is None else frozenset([int(tokenizer.eos_token_id)])
        self.added = {token.content: id_ for id_, token in tokenizer.added_tokens_decoder.items()}
        self.special = frozenset(id_ for id_, token in tokenizer.added_tokens_decoder.items() if token.special)
        texts = [self.text(token) for token in range(self.end)]

        def kind(pattern: bytes) -> Tensor:
            return torch.tensor([re.match(pattern, text) is not None for text in texts])

        self.closing_string = kind(rb'"[\]}]*\Z')
        self.closing = kind(rb"[\]}]+\Z")
        self.comma = kind(rb", ?\Z")
        self.opening = kind(rb'[^"]*[\[{]')
        self.number = kind(rb"[0-9.eE]")
        self.exponent = kind(rb"[eE]")
        # Of this one's life: a cache of the module's would keep the tokenizer's tables for ever.
        self.grammar = lru_cache(_KEPT_GRAMMARS)(self._grammar)

    def text(self, token: int) -> bytes:
        return self.tokens.decode_bytes([token])

    def parts(self, text: str) -> list[str]:
        """Fixed text, taken apart into added tokens and what is between them."""
        contents = sorted(filter(None, self.added), key=len, reverse=True)
        return [part for part in re.split(f"({'|'.join(map(re.escape, contents))})", text) if part]

    def literal(self, text: str) -> str:
        """Fixed text as Lark."""
        parts = self.parts(text)
        return " ".join(f"<[{self.added[part]}]>" if part in self.added else json.dumps(part) for part in parts)

    def _grammar(self, source: str, starts: Sequence[bytes] = (), shown_ids: frozenset[int] = frozenset()) -> Grammar:
        return Grammar(self, source, starts, shown_ids)


_vocabularies: WeakKeyDictionary[PreTrainedTokenizerBase, _Vocabulary] = WeakKeyDictionary()
_lock = Lock()


def _vocabulary(tokenizer: PreTrainedTokenizerBase) -> _Vocabulary:
    with _lock:  # building one takes a second for a large tokenizer
        if tokenizer not in _vocabularies:
            _vocabularies[tokenizer] = _Vocabulary(tokenizer)
        return _vocabularies[tokenizer]


def _json(schema: Mapping[str, Any], lenient: bool = False) -> str:
    """A schema as Lark."""
    if not isinstance(schema, Mapping):
        raise RequestError(f"a JSON schema must be an object, not {schema!r}")
    try:
        return "%json " + json.dumps({**schema, "x-guidance": {**_COMPACT, "lenient": lenient}}, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"the JSON schema cannot be used: {error}") from error


def _without_format(schema: Any, name: str) -> Any:
    """The schema without ``"format": name``."""
    if isinstance(schema, list | tuple):
        return [_without_format(part, name) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    return {
        key: value if key in ("const", "enum", "default", "examples") else _without_format(value, name)
        for key, value in schema.items()
        if (key, value) != ("format", name)
    }


def _reason(matcher: LLMatcher) -> str:
    """The error without where in our source it was found, and without what it quotes of it."""
    where = r'\A(at \d+\(\d+\): )?(failed to (compile JSON schema|parse "%json"): )?'
    lines = re.sub(where, "", str(matcher.get_error())).splitlines()
    return " ".join(line.strip() for line in lines if not re.match(r"\s*(\d+ \||\^+\s*\Z|<)", line))
