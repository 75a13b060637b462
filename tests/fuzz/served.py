"""A client that counts what it sends, and a server under it with a tiny random model."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import requests
import torch
from samples import random_basis
from serving import serving
from templates import tool_tokenizer
from tiny import tiny_network
from traitbasis.server import Limits, Settings, create_app
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from traitbasis.engines.base import Sampling
from traitbasis.guards import GUARDS
from traitbasis.model import prepare_model
from traitbasis.simulator import UserSimulator
from traitbasis.users import ServedUser

SECONDS = 30  # an answer that takes longer has hung
BURST = 6  # requests at once
CONTEXT = 4096  # tokens, and a token is a byte here: room for what templates make of two tools
TRAITS = ("impatience", "skeptical")
USERS = (
    ServedUser(name="anna", traits="impatience-high", persona={"age": 34}, sampling={"max_tokens": 5}),
    ServedUser(name="strict", context="refuse", stop_tokens=["###STOP###"]),
    ServedUser(name="live", guards={guard.name: False for guard in GUARDS if guard.sendable}),
)
LIMITS = Limits(body_bytes=100_000, messages=24, output_tokens=24)
# Chat template (and so the format of tool calls) and network: gemma2 does not run in slots but in micro-batches.
WORLDS = {"chatml": "llama", "hermes": "qwen3", "llama tag": "llama", "mistral": "gemma2"}


@dataclass(frozen=True)
class Reply:
    """A whole answer. text: of its body, streams included."""

    status: int
    headers: Mapping[str, str]
    content: bytes
    seconds: float
    response: requests.Response = field(repr=False, compare=False)

    @property
    def text(self) -> str:
        return self.content.decode()

    def json(self) -> Any:
        return json.loads(self.content)


@dataclass
class Tally:
    """What was sent in one run. statuses: by what the requests were meant to be."""

    statuses: dict[str, Counter[int]] = field(default_factory=dict)
    slowest: tuple[float, str] = (0.0, "")
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def count(self, kind: str, reply: Reply, asked: str) -> None:
        with self._lock:
            self.statuses.setdefault(kind, Counter())[reply.status] += 1
            self.slowest = max(self.slowest, (reply.seconds, asked))

    @property
    def requests(self) -> int:
        return sum(counter.total() for counter in self.statuses.values())

    def lines(self) -> list[str]:
        """For people."""
        lines = []
        for kind, counter in self.statuses.items():
            shares = ", ".join(f"{status}: {count}" for status, count in sorted(counter.items()))
            lines.append(
                f"{kind}: {counter.total()} requests, {counter[200] / counter.total():.0%} of them 200 ({shares})"
            )
        seconds, asked = self.slowest
        return [*lines, f"{self.requests} requests; the slowest took {seconds:.2f} s: {asked}"]


@dataclass(frozen=True)
class Asked:
    """A POST of a JSON value, or of bytes as they are."""

    path: str
    body: Any
    headers: Mapping[str, Any]

    @property
    def content(self) -> bytes:
        """With everything that is not ASCII escaped: so half of a surrogate pair can be sent, too."""
        return self.body if isinstance(self.body, bytes) else json.dumps(self.body).encode()


class Wire:
    """A client of one served application."""

    def __init__(self, url: str, simulator: UserSimulator, tally: Tally) -> None:
        self.url = url
        self.simulator = simulator
        self._tally = tally
        self._pool = ThreadPoolExecutor(BURST)
        self._of_thread = threading.local()

    def send(self, kind: str, method: str, url: str, **options: Any) -> Reply:
        """One request; `options` are requests'. Raises requests.Timeout when no more of the answer comes."""
        if not hasattr(self._of_thread, "session"):
            self._of_thread.session = requests.Session()
            self._of_thread.session.trust_env = False
        options = {"timeout": SECONDS, "allow_redirects": False, **options}
        began = time.monotonic()
        response = self._of_thread.session.request(method, url, **options)
        reply = Reply(response.status_code, response.headers, response.content, time.monotonic() - began, response)
        self._tally.count(kind, reply, f"{method} {url.removeprefix(self.url)} ({kind})")
        return reply

    def burst(self, kind: str, asked: Sequence[Asked]) -> list[Reply]:
        """All of them at once; replies in their order."""

        def post(one: Asked) -> Reply:
            headers = {"Content-Type": "application/json", "Connection": "close", **one.headers}
            return self.send(kind, "POST", self.url + one.path, data=one.content, headers=headers)

        return list(self._pool.map(post, asked))


@contextmanager
def world(name: str, tally: Tally) -> Iterator[Wire]:
    """A server with one of ``WORLDS``, all guards on, and a client of it."""
    network, tokenizer = tiny_network(WORLDS[name]), tool_tokenizer(name)
    network.config.max_position_embeddings = CONTEXT
    _shorten(network)
    _make_legible(network, tokenizer)
    lm = prepare_model(f"tiny-{name.replace(' ', '-')}", network, tokenizer)
    with (
        UserSimulator(lm, random_basis(lm, *TRAITS), sampling=Sampling(max_tokens=8)) as simulator,
        serving(create_app(simulator, Settings(limits=LIMITS), USERS)) as url,
    ):
        yield Wire(url, simulator, tally)


def _shorten(network: PreTrainedModel, layers: int = 2) -> None:
    """Leave out the upper layers: what is tested here is what happens around a model."""
    config = network.config
    network.model.layers = network.model.layers[:layers]
    config.num_hidden_layers = layers
    if types := getattr(config, "layer_types", None):
        config.layer_types = types[:layers]


def _make_legible(network: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Let a random network write letters and spaces for the most part: guards reject bytes that are no characters, and
    every turn would end in silence."""
    head = network.get_output_embeddings()
    bias = torch.full((head.weight.shape[0],), -8.0)
    for token, i in tokenizer.get_vocab().items():
        text = tokenizer.convert_tokens_to_string([token])
        bias[i] = 4.0 if text.isascii() and (text.isalpha() or text == " ") else 0.0 if text.isascii() else -8.0
    head.bias = torch.nn.Parameter(bias)
