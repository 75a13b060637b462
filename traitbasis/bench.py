"""What the engine costs on this machine: throughput, time to first token, the price of steering.

Absolute times of a shared machine mean little, so everything that is compared is measured in turns in one run, and
reported as a ratio of medians, or as a median of ratios of neighbours with its bootstrap interval.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from itertools import pairwise, zip_longest
from queue import SimpleQueue
from statistics import median
from time import perf_counter, process_time, sleep
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import GenerationConfig

from traitbasis.basis import Basis
from traitbasis.chat import read_messages, render_prompt, tokenize
from traitbasis.cpu import packed_products
from traitbasis.engines.base import Event, Failure, Request, Sampling, as_engine_error, generate
from traitbasis.engines.sampling import draw
from traitbasis.engines.transformers import Row, SlotBatch, TransformersEngine, stack_additions, why_not_continuous
from traitbasis.hooks import steer
from traitbasis.model import LanguageModel, pad_left

T = TypeVar("T")
Additions = Mapping[int, Tensor]

_ITEMS = ("desk lamp", "rain jacket", "coffee grinder", "bicycle pump", "tent", "keyboard", "saucepan", "suitcase")
_AGENT = (
    "Hello, thank you for contacting us. How can I help you today?",
    "I am sorry to hear that. Could you give me the order number and the name on the order, please?",
    "Thank you. I see the order here. It left our warehouse last week and is with the carrier.",
    "I can open a search request with the carrier, which takes up to five working days. Shall I do that?",
    "I understand. A refund is possible once the carrier confirms that the parcel is lost.",
)
_MOST_SERIAL = 8
_MIXES: tuple[dict[int, float], ...] = ({0: 1.0}, {1: 1.5}, {}, {2: 0.5, 3: 0.5}, {0: 0.5, 1: 0.5})  # columns


@dataclass(frozen=True)
class Ratio:
    """A ratio with its 95 % bootstrap interval."""

    value: float
    low: float
    high: float
    samples: int

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def ratio_of(above: Sequence[float], below: Sequence[float], seed: int = 0) -> Ratio:
    """Median of the ratios of samples that were taken next to each other."""
    ratios = [a / b for a, b in zip(above, below, strict=True)]
    rng = random.Random(seed)
    medians = sorted(median(rng.choices(ratios, k=len(ratios))) for _ in range(1000))
    return Ratio(median(ratios), medians[25], medians[974], len(ratios))


def in_turns(runs: Mapping[str, Callable[[], T]], repeats: int, warm: int = 1) -> dict[str, list[T]]:
    """What each run returns, `repeats` times, one after the other in changing order."""
    found: dict[str, list[T]] = {name: [] for name in runs}
    order = list(runs)
    for number in range(-warm, repeats):
        order = order[1:] + order[:1]
        for name in order:
            value = runs[name]()
            if number >= 0:
                found[name].append(value)
    return found


@dataclass
class Workload:
    """Conversations and traits to measure with; the same for the same seed.

    tokens: length of a reply. All replies are exactly so long: stop tokens are ignored.
    """

    lm: LanguageModel
    basis: Basis
    tokens: int = 32
    seed: int = 0

    def messages(self, user: int, turns: int = 2) -> list[dict[str, str]]:
        """A conversation that has come to its `turns`-th user turn; no two users' begin alike."""
        rng = random.Random(f"{self.seed} {user}")
        order, item = f"#W{rng.randrange(1000, 10000)}", rng.choice(_ITEMS)
        messages = [
            {
                "role": "system",
                "content": f"Case {rng.randrange(10**6)}. You are a customer of an online shop. You ordered a {item}, "
                f"order {order}, {rng.randrange(5, 20)} days ago, and it has not arrived. You want your money back, "
                "not a new one, and you want to know how long that will take. You do not give up easily.",
            }
        ]
        for turn in range(turns):
            messages.append({"role": "user", "content": _AGENT[turn % len(_AGENT)]})
            if turn < turns - 1:
                said = f"My {item}, order {order}, is still not here. What are you going to do about it?"
                messages.append({"role": "assistant", "content": said})
        return messages

    def prompt(self, messages: Sequence[Mapping[str, str]]) -> tuple[int, ...]:
        rendered = render_prompt(self.lm.tokenizer, read_messages(messages), self.basis.as_)
        return tuple(tokenize(self.lm.tokenizer, rendered))

    def prompts(self, users: int, turns: int = 2) -> list[tuple[int, ...]]:
        return [self.prompt(self.messages(user, turns)) for user in range(users)]

    def additions(self, user: int) -> Additions:
        """Traits of a user, another mix for each of five in turn; one of them is unsteered."""
        traits = self.basis.traits
        return self.basis.additions({traits[i % len(traits)]: x for i, x in _MIXES[user % len(_MIXES)].items()})

    def request(self, user: int, *, turns: int = 2, steered: bool = True, **sampling: Any) -> Request:
        sampling = {"temperature": 0.7, "max_tokens": self.tokens, **sampling}
        additions = self.additions(user) if steered else {}
        prompt = self.prompt(self.messages(user, turns))
        return Request(prompt, user, Sampling(**sampling), frozenset(), additions)

    def every_layer(self, dose: float = 0.05) -> Additions:
        """An addition of a random direction at every layer, by the layer norms' order of magnitude."""
        generator = torch.Generator().manual_seed(self.seed)
        norm = self.basis.columns[0].layer_norm
        directions = torch.randn(len(self.lm.layers), self.lm.width, generator=generator)
        return {z: dose * norm * d / d.norm() for z, d in enumerate(directions)}

    def composed(self, k: int) -> Additions:
        """The sum of k random columns, spread over four layers, as a basis of k traits would add it."""
        generator = torch.Generator().manual_seed(k)
        sums: dict[int, Tensor] = {}
        middle = len(self.lm.layers) // 2
        for i in range(k):
            direction = torch.randn(self.lm.width, generator=generator)
            z = min(middle + i % 4, len(self.lm.layers) - 1)
            part = 0.05 * self.basis.columns[0].layer_norm / k * direction / direction.norm()
            sums[z] = sums[z] + part if z in sums else part
        return sums


@dataclass(frozen=True)
class Served:
    """A finished request: when its events came, in seconds after it was there to be taken, and its tokens with their
    log-probabilities, where asked for."""

    times: list[float]
    tokens: list[int]
    logprobs: list[float]


def serve_all(engine: TransformersEngine, requests: Sequence[Request]) -> list[Served]:
    """Wait for requests that the engine finds in its queue all at once."""
    events: SimpleQueue[tuple[int, float, Event | Failure]] = SimpleQueue()

    def listener(number: int) -> Callable[[Event | Failure], None]:
        return lambda event: events.put((number, perf_counter(), event))

    held, go = threading.Event(), threading.Event()

    def hold(event: Event | Failure) -> None:
        held.set()
        go.wait()

    engine.submit(replace(requests[0], sampling=Sampling(max_tokens=1), additions={}, prompt_ids=(0,)), hold)
    held.wait()
    try:
        for number, request in enumerate(requests):
            engine.submit(request, listener(number))
        begin = perf_counter()
    finally:
        go.set()
    served = [Served([], [], []) for _ in requests]
    waiting = len(requests)
    while waiting:
        number, at, event = events.get()
        if isinstance(event, Failure):
            raise as_engine_error(event)
        served[number].times.append(at - begin)
        if event.token_id is not None:
            served[number].tokens.append(event.token_id)
        if event.logprob is not None:
            served[number].logprobs.append(event.logprob.logprob)
        waiting -= event.finish is not None
    return served


@contextmanager
def running(lm: LanguageModel, **options: Any) -> Iterator[TransformersEngine]:
    """An engine for the time of a measurement."""
    engine = TransformersEngine(lm, **options)
    try:
        yield engine
    finally:
        engine.close()


# --- measurements ---


def steering_cost(
    lm: LanguageModel,
    prompts: Sequence[Sequence[int]],
    conditions: Mapping[str, Sequence[Additions]],
    steps: int = 60,
    baseline: Sequence[Additions] | None = None,
) -> dict[str, dict[str, Ratio]]:
    """Time of an unsteered decode step over that of a steered one, by condition: 0.97 is 3 % slower.

    prompts: one a row. conditions: additions of each row. baseline: other additions than none to compare with.
    One running batch, conditions changing from step to step, so that neighbours differ in nothing else. Wall time and
    the process's CPU time.
    """
    batch = SlotBatch(lm)
    sampling = Sampling(temperature=0, max_tokens=10**6)
    requests = [Request(tuple(prompt), 0, sampling, frozenset()) for prompt in prompts]
    waiting = iter([Row(request, lambda event: None, lm.tokenizer, None) for request in requests])
    rows: list[Row] = []
    steered: dict[str, Sequence[Additions]] = {"": baseline or [{}] * len(prompts), **conditions}

    def step(additions: Sequence[Additions]) -> tuple[float, float]:
        for row, addition in zip(rows, additions, strict=True):
            row.additions = dict(addition)
        batch.additions = stack_additions(rows, lm)
        begin, begin_cpu = perf_counter(), process_time()
        drawn = draw([row.sampler for row in rows], batch.step(rows).float())
        for row, result in zip(rows, drawn, strict=True):
            row.take(result[0] if result else 0)
        return perf_counter() - begin, process_time() - begin_cpu

    with torch.inference_mode(), packed_products():
        while len(rows) < len(prompts):
            batch.admit(lambda: next(waiting), rows, len(rows) + 1)
        taken = in_turns({name: partial(step, additions) for name, additions in steered.items()}, steps, warm=3)
    wall, cpu = ({name: [pair[i] for pair in pairs] for name, pairs in taken.items()} for i in (0, 1))
    return {name: {"wall": ratio_of(wall[""], wall[name]), "cpu": ratio_of(cpu[""], cpu[name])} for name in conditions}


def throughput(load: Workload, users: Sequence[int], repeats: int = 5) -> dict[str, dict[int, float]]:
    """Generated tokens per second while so many mixed-trait users decode, and the share of the roofline.

    Decoding only: from the first token of the last user to start to the last token of the first to end.
    The roofline is the time to read every weight once, by the bandwidth that a sum reaches in the same run.
    """
    with running(load.lm, max_batch=max(users)) as engine:

        def speed(count: int) -> float:
            served = serve_all(engine, [load.request(user) for user in range(count)])
            begin, end = max(row.times[0] for row in served), min(row.times[-1] for row in served)
            if end <= begin:  # replies too short for all of them ever to have run together
                begin, end = min(row.times[0] for row in served), max(row.times[-1] for row in served)
            return sum(begin < at <= end for row in served for at in row.times) / (end - begin)

        runs = {str(count): partial(speed, count) for count in users}
        found = in_turns({**runs, "bandwidth": partial(bandwidth, load.lm)}, repeats)
    tokens = {count: median(found[str(count)]) for count in users}
    steps = median(found["bandwidth"]) / weight_bytes(load.lm)  # at most so many a second
    return {
        "tokens_per_second": tokens,
        "times_one_user": {count: tokens[count] / tokens[min(users)] for count in users},
        "share_of_roofline": {count: tokens[count] / count / steps for count in users},
    }


def weight_bytes(lm: LanguageModel) -> int:
    """Bytes of weights that a decode step reads: all but an embedding that is only looked up."""
    total = sum(parameter.nbytes for parameter in lm.model.parameters())
    embedding, head = lm.model.get_input_embeddings().weight, lm.model.get_output_embeddings()
    tied = head is not None and head.weight is embedding
    return int(total - (0 if tied else embedding.nbytes))


def bandwidth(lm: LanguageModel, bytes_read: int = 2**28) -> float:
    """Bytes a second that torch reads from the model's device, by a sum."""
    block = torch.ones(bytes_read // 4, device=lm.device)
    block.sum().item()
    begin = perf_counter()
    block.sum().item()
    return bytes_read / (perf_counter() - begin)


def against_generate(load: Workload, users: int, repeats: int = 3, waves: int = 3) -> dict[str, Ratio]:
    """Tokens per second of the engine over those of ``transformers.generate``, same prompts, same number of tokens.

    static: left-padded batches of so many rows, one after the other, unsteered. serial: one request after the other,
    each with its steering hook (to 8 users: more tell nothing new). The engine serves `waves` times as many mixed-trait
    users of uneven lengths, so that rows come and go, without a prefix cache; prefill is part of the time everywhere.
    """
    lengths = [load.tokens + (load.tokens // 2) * (i % 3 - 1) for i in range(waves * users)]
    requests = [load.request(user, temperature=0, max_tokens=n) for user, n in enumerate(lengths)]
    total = sum(lengths)

    def ours() -> float:
        with running(load.lm, max_batch=users, prefix_cache_bytes=0) as engine:
            return total / max(row.times[-1] for row in serve_all(engine, requests))

    def static() -> float:
        begin = perf_counter()
        for first in range(0, len(requests), users):
            rows = [request.prompt_ids for request in requests[first : first + users]]
            _generate(load.lm, rows, load.tokens, {})
        return load.tokens * len(requests) / (perf_counter() - begin)

    def serial() -> float:
        some = requests[:users]
        begin = perf_counter()
        for request in some:
            _generate(load.lm, [request.prompt_ids], request.sampling.max_tokens, request.additions)
        return sum(request.sampling.max_tokens for request in some) / (perf_counter() - begin)

    others = {"static": static, **({"serial": serial} if users <= _MOST_SERIAL else {})}
    found = in_turns({"ours": ours, **others}, repeats)
    return {name: ratio_of(found["ours"], found[name]) for name in others}


def _generate(lm: LanguageModel, rows: Sequence[Sequence[int]], tokens: int, additions: Additions) -> None:
    ids, mask = pad_left(rows, lm.tokenizer.pad_token_id or 0, lm.device)
    config = GenerationConfig(max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, pad_token_id=0)
    with torch.inference_mode(), steer(lm.layers, additions):
        made = lm.model.generate(ids, attention_mask=mask, generation_config=config)
    assert made.shape[1] == ids.shape[1] + tokens


def episodes(load: Workload, users: int = 8, turns: int = 4, repeats: int = 2) -> Ratio:
    """Speed of the engine over that of serial ``generate`` on growing conversations of mixed-trait users.

    All users take their turn together, `turns` times; the engine has its prefix cache. ``generate`` gets the same
    prompts, steering and reply lengths one after the other, and has nothing from the turn before.
    """
    asked: list[Request] = []

    def ours() -> float:
        asked.clear()
        talks = [load.messages(user, turns=1) for user in range(users)]
        taken = 0.0
        with running(load.lm, max_batch=users) as engine:
            for turn in range(1, turns + 1):
                requests = [
                    replace(load.request(user, temperature=0), prompt_ids=load.prompt(talk))
                    for user, talk in enumerate(talks)
                ]
                served = serve_all(engine, requests)
                taken += max(row.times[-1] for row in served)
                asked.extend(requests)
                for talk, row in zip(talks, served, strict=True):
                    _go_on(load, talk, row.tokens, turn)
        return users * turns * load.tokens / taken

    def serial() -> float:
        begin = perf_counter()
        for request in asked:
            _generate(load.lm, [request.prompt_ids], load.tokens, request.additions)
        return len(asked) * load.tokens / (perf_counter() - begin)

    speeds = [(ours(), serial()) for _ in range(repeats)]
    return ratio_of([speed for speed, _ in speeds], [speed for _, speed in speeds])


def _go_on(load: Workload, messages: list[dict[str, str]], tokens: Sequence[int], turn: int) -> None:
    """Append a reply and the agent's next message to a conversation."""
    said = load.lm.tokenizer.decode(tokens, skip_special_tokens=True).strip() or "..."
    messages += [{"role": "assistant", "content": said}, {"role": "user", "content": _AGENT[turn % len(_AGENT)]}]


@dataclass(frozen=True)
class Conversation:
    """A growing conversation, by turn: seconds to the first token, prompt tokens, and the replies' tokens."""

    first_token: list[float]
    prompt_tokens: list[int]
    replies: list[tuple[int, ...]]


def converse(load: Workload, engine: TransformersEngine, user: int, turns: int, **sampling: Any) -> Conversation:
    """One user's conversation through an engine, each turn's prompt holding all replies before it."""
    messages = load.messages(user, turns=1)
    first, prompts, replies = [], [], []
    for turn in range(1, turns + 1):
        request = replace(load.request(user, **sampling), prompt_ids=load.prompt(messages))
        (served,) = serve_all(engine, [request])
        first.append(served.times[0])
        prompts.append(len(request.prompt_ids))
        replies.append(tuple(served.tokens))
        _go_on(load, messages, served.tokens, turn)
    return Conversation(first, prompts, replies)


def growing(load: Workload, turns: int = 10, repeats: int = 3, **sampling: Any) -> dict[str, Any]:
    """Time to first token along conversations, with the prefix cache and without; and are the tokens the same."""
    sampling = {"temperature": 0, **sampling}
    found: dict[str, list[Conversation]] = {"cached": [], "uncached": []}
    for user in range(repeats):
        for name, size in (("cached", 2**30), ("uncached", 0)):
            with running(load.lm, prefix_cache_bytes=size) as engine:
                found[name].append(converse(load, engine, user, turns, **sampling))
    times = {
        name: [median(run.first_token[turn] for run in runs) for turn in range(turns)] for name, runs in found.items()
    }
    return {
        "prompt_tokens": [median(run.prompt_tokens[turn] for run in found["cached"]) for turn in range(turns)],
        "first_token_over_turn_1": {name: [time / found_[0] for time in found_] for name, found_ in times.items()},
        "same_tokens": all(a.replies == b.replies for a, b in zip(found["cached"], found["uncached"], strict=True)),
    }


def newcomer(load: Workload, others: int = 8, repeats: int = 5) -> dict[str, float]:
    """Time to first token of a newcomer while `others` decode, less its own prefill, in decode steps of the others.

    Its prefill is its time to first token on an idle engine less one step alone.
    """
    waits = []
    with running(load.lm, prefix_cache_bytes=0) as engine:
        for repeat in range(-1, repeats):
            request = load.request(1000 + repeat, temperature=0, max_tokens=4)
            (alone,) = serve_all(engine, [request])
            prefill = alone.times[0] - (alone.times[-1] - alone.times[0]) / 3
            with _decoding(load, engine, others) as steps:
                step = median(b - a for a, b in pairwise(next(steps) for _ in range(9)))
                (busy,) = serve_all(engine, [request])
            if repeat >= 0:
                waits.append((busy.times[0] - prefill) / step)
    return {"steps": median(waits), "most": max(waits)}


@contextmanager
def _decoding(load: Workload, engine: TransformersEngine, users: int) -> Iterator[Iterator[float]]:
    """So many endless generations, meanwhile; yields the times of the last one's tokens."""
    seen: SimpleQueue[float] = SimpleQueue()
    tickets = []
    for user in range(users):
        last = user == users - 1
        request = load.request(user, temperature=0, max_tokens=10**6)
        tickets.append(engine.submit(request, lambda event, last=last: seen.put(perf_counter()) if last else None))  # type: ignore[misc]
    try:
        yield iter(seen.get, None)
    finally:
        for ticket in tickets:
            ticket.cancel()
        while engine.stats().running:
            sleep(0.01)


def differing_tokens(load: Workload, users: int = 8) -> dict[str, float]:
    """Share of tokens at or after which a greedy row in a crowd differs from the same row alone, steered and not.

    0 in float32 (contract 3). In bfloat16 kernels round by batch shape, unsteered just as well: the unsteered share is
    the control.
    """
    shares = {}
    for name in ("steered", "unsteered"):
        requests = [load.request(u, temperature=0, steered=name == "steered") for u in range(users)]
        with running(load.lm, prefix_cache_bytes=0) as engine:
            shares[name] = differing_in_a_crowd(engine, requests)
    return shares


def differing_in_a_crowd(engine: TransformersEngine, requests: Sequence[Request]) -> float:
    """Share of tokens from each row's first difference on, between the rows together and each alone."""
    alone = [generate(engine, request).token_ids for request in requests]
    return share_differing(alone, [served.tokens for served in serve_all(engine, requests)])


def first_difference(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two rows begin with in common."""
    return next((i for i, (a, b) in enumerate(zip_longest(one, other)) if a != b), len(one))


def share_differing(expected: Sequence[Sequence[int]], found: Sequence[Sequence[int]]) -> float:
    """Share of tokens from each row's first difference on."""
    lost = 0
    for one, other in zip(expected, found, strict=True):
        lost += len(one) - first_difference(one, other)
    return lost / sum(map(len, expected))


# --- all of it ---

MEASUREMENTS = ("throughput", "steering", "traits", "generate", "episodes", "conversation", "newcomer", "crowd")


def measure(
    load: Workload,
    users: Sequence[int] = (1, 8, 32),
    *,
    turns: int = 20,
    quick: bool = False,
    only: Sequence[str] = MEASUREMENTS,
) -> Iterator[tuple[str, Any]]:
    """The measurements of this module, by name, as they are done; all of them JSON but for ``Ratio``.

    quick: a few repeats of each, to look at; the intervals say how little that tells.
    """
    steps, repeats = (20, 2) if quick else (160, 5)
    several = max(users)
    if problem := why_not_continuous(load.lm):
        for name in ("steering", "traits", "newcomer"):
            if name in only:
                yield name, {"not measured": f"requests run in micro-batches: {problem}"}
        only = [name for name in only if name not in ("steering", "traits", "newcomer")]
    if "throughput" in only:
        yield "throughput", throughput(load, users, repeats)
    if "steering" in only:
        found = {}
        for count in users:
            conditions = {"one layer": [load.additions(0)] * count, "all layers": [load.every_layer()] * count}
            found[count] = steering_cost(load.lm, load.prompts(count), conditions, steps)
        yield "steering", found
    if "traits" in only:
        conditions = {f"{k} traits": [load.composed(k)] * 8 for k in (8, 64)}
        yield "traits", steering_cost(load.lm, load.prompts(8), conditions, steps, baseline=[load.composed(1)] * 8)
    if "generate" in only:
        counts = [count for count in users if count > 1] or [several]
        yield "generate", {count: against_generate(load, count, repeats=2 if quick else 3) for count in counts}
    if "episodes" in only:
        count = min(several, 8)
        yield "episodes", {count: episodes(load, count, repeats=1 if quick else 3)}
    if "conversation" in only:
        yield "conversation", growing(load, turns=min(turns, 4) if quick else turns, repeats=1 if quick else 3)
    if "newcomer" in only:
        yield "newcomer", newcomer(load, repeats=2 if quick else 7)
    if "crowd" in only:
        yield "crowd", differing_tokens(load)


def made_with(load: Workload) -> dict[str, Any]:
    """What a figure depends on (contract 11)."""
    return {
        "model": load.lm.name,
        "model_fingerprint": load.lm.fingerprint,
        "basis": load.basis.fingerprint,
        "dtype": load.lm.dtype_name,
        "device": str(load.lm.device),
        "threads": torch.get_num_threads(),
        "tokens": load.tokens,
        "seed": load.seed,
        "prompt_tokens": median(map(len, load.prompts(8))),
        "versions": {name: version(name) for name in ("traitbasis", "transformers", "torch")},
    }
