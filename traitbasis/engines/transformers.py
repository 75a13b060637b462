"""The embedded engine: continuous batching over a transformers model, in one thread that owns the model.

The loop: let newcomers in, then one decode step for everybody. A newcomer's prompt but its last token is prefilled
alone and without any hook, so the past is clean by construction (contract 4), and most of it comes from the prefix
cache. From the last prompt token on it is one row of the batch, with its own addition. A finished row leaves at once.
Additions belong to the running batch, never to the model (contract 6); a batch in which nobody is steered registers no
hook at all (contract 2).

Rows live in ``kv.Slots``. A model that does not give the same logits there as in a plain forward (sliding windows, for
instance) is served in micro-batches instead: left-padded, prefilled together, and nobody joins until all are done.
Why a loop of our own: docs/design.md, "Decisions".
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import DynamicLayer

from traitbasis.cpu import packed_products, repack
from traitbasis.engines.base import (
    WRAP_UP_TOKENS,
    EngineStats,
    Event,
    Failure,
    Finish,
    Guide,
    Listener,
    Request,
    Sampling,
    TokenLogprob,
)
from traitbasis.engines.kv import PrefixCache, Slots
from traitbasis.engines.sampling import Sampler, draw, token_logprobs
from traitbasis.engines.text import TokenText
from traitbasis.errors import EngineBusyError, EngineClosedError, EngineError, RequestError, TraitBasisError
from traitbasis.hooks import steer
from traitbasis.model import LanguageModel, pad_left

logger = logging.getLogger("traitbasis.engine")

DEFAULT_MAX_BATCH = 32
DEFAULT_PREFIX_CACHE_BYTES = 2**30
# While others decode, newcomers are let in until they have had this many tokens computed; then the others' next step.
_PREFILL_BUDGET = 512
# Tokens of a prompt whose log-probabilities are asked for that are read at once: their logits are held together.
_SCORED_TOKENS = 64
# Slots that have grown beyond this are given back when nobody runs.
_KEPT_SLOT_BYTES = 2**28


class TransformersEngine:
    """See the module docstring.

    max_batch: rows that run together. max_queue: requests that may wait. max_context: tokens of a prompt and its reply
    together, at most what the model's positions allow. prefix_cache_bytes: 0 turns the prefix cache off.
    """

    def __init__(
        self,
        lm: LanguageModel,
        *,
        max_batch: int = DEFAULT_MAX_BATCH,
        max_queue: int = 256,
        max_context: int | None = None,
        prefix_cache_bytes: int = DEFAULT_PREFIX_CACHE_BYTES,
    ) -> None:
        for name, value, least in (
            ("max_batch", max_batch, 1),
            ("max_queue", max_queue, 1),
            ("max_context", 2 if max_context is None else max_context, 2),
            ("prefix_cache_bytes", prefix_cache_bytes, 0),
        ):
            if value < least:
                raise EngineError(f"{name} is {value}; it must be at least {least}")
        self._lm = lm
        self._max_batch = max_batch
        self._max_queue = max_queue
        limits = [limit for limit in (lm.context_length, max_context) if limit is not None]
        self._max_context = min(limits, default=None)
        self._batch: Batch
        problem = why_not_continuous(lm)
        if problem is None:
            self._batch = SlotBatch(lm, prefix_cache_bytes)
        else:
            logger.warning("%s: requests run in micro-batches, without a prefix cache: %s", lm.name, problem)
            self._batch = PaddedBatch(lm)
        self._rows: list[Row] = []
        self._steps = self._prompt_tokens = self._generated = self._steered = 0
        self._waiting: deque[Row] = deque()
        self._wake = threading.Condition()
        self._closed = False
        self._held = 0
        self._thread = threading.Thread(target=self._work, name="traitbasis-engine", daemon=True)
        self._thread.start()

    @property
    def continuous(self) -> bool:
        """Whether a request joins the running batch; else it waits for the micro-batch before it."""
        return isinstance(self._batch, SlotBatch)

    def submit(self, request: Request, listener: Listener, *, again: bool = False) -> Row:
        """See ``Engine.submit``. Raises RequestError when the prompt leaves no room in the context; a reply that
        reaches its end finishes with "length". What making the guide raises is raised here, as an EngineError if it is
        none of ours."""
        if not request.prompt_ids:
            raise RequestError("the prompt is empty")
        limit = self._max_context
        room = None if limit is None else limit - len(request.prompt_ids)
        if room is not None and room < 1:
            raise RequestError(
                f"the conversation has {len(request.prompt_ids)} tokens; the context of {self._lm.name} is {limit}",
                code="context_length_exceeded",
            )
        for layer, addition in request.additions.items():
            if type(layer) is not int or not 0 <= layer < len(self._lm.layers):
                raise RequestError(f"layer {layer!r} does not exist; layers are 0 to {len(self._lm.layers) - 1}")
            if not isinstance(addition, Tensor) or addition.layout != torch.strided:
                raise RequestError(f"the addition at layer {layer} is no dense tensor but {type(addition).__name__}")
            if addition.shape != (self._lm.width,):
                raise RequestError(
                    f"the addition at layer {layer} has shape {tuple(addition.shape)}; {self._lm.name} takes "
                    f"({self._lm.width},)"
                )
        for where, tokens in (("the prompt", request.prompt_ids), ("logit_bias", request.sampling.logit_bias)):
            for token in tokens:
                if type(token) is not int or not 0 <= token < self._lm.vocabulary:
                    most = self._lm.vocabulary - 1
                    raise RequestError(f"token id {token!r} in {where} does not exist; ids are 0 to {most}")
        row = Row(request, listener, self._lm.tokenizer, room)
        with self._wake:
            if self._closed:
                raise EngineClosedError("the engine is closed")
            # Cancelled ones go with the next step; until then they take nobody's place, within bounds.
            if again:
                self._waiting.appendleft(row)
                self._wake.notify()
                return row
            if len(self._waiting) >= self._max_queue and (
                len(self._waiting) >= 2 * self._max_queue
                or sum(not other.cancelled for other in self._waiting) >= self._max_queue
            ):
                raise EngineBusyError(f"{len(self._waiting)} requests are waiting already; try again later")
            self._waiting.append(row)
            self._wake.notify()
        return row

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Begin nothing new inside the context. What is submitted meanwhile begins together: its batches do not depend
        on how fast it was submitted, and so neither do tokens in half precision (contract 9)."""
        with self._wake:
            self._held += 1
        try:
            yield
        finally:
            with self._wake:
                self._held -= 1
                self._wake.notify()

    def stats(self) -> EngineStats:
        """See ``Engine.stats``."""
        prefix = self._batch.prefix
        return EngineStats(
            max_batch=self._max_batch,
            max_queue=self._max_queue,
            max_context=self._max_context,
            running=len(self._rows),
            waiting=len(self._waiting),
            steps=self._steps,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._batch.cached_tokens,
            generated_tokens=self._generated,
            steered_tokens=self._steered,
            slot_bytes=self._batch.slot_bytes,
            cache_bytes=prefix.bytes if prefix else 0,
            cache_limit=prefix.limit if prefix else 0,
            cache_evictions=prefix.evictions if prefix else 0,
            closed=self._closed or not self._thread.is_alive(),
        )

    def close(self) -> None:
        """End the thread after the step it is in; unfinished requests get a Failure."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        self._thread.join()

    def _work(self) -> None:
        with torch.inference_mode(), packed_products():
            while self._has_work():
                try:
                    if not self._rows and repack(self._lm.model):
                        self._batch.forget()  # somebody changed weights while nothing ran
                    self._drop_cancelled()
                    self._batch.admit(self._take, self._rows, self._max_batch)
                    if self._rows:
                        self._step()
                except Exception as error:  # a batch must not take the thread with it
                    if not self._rows and (row := self._take()):  # else the next round would be this one again
                        row.fail(error)
                    self._end_rows(error)
            self._end_rows(EngineClosedError("the engine was closed"))
        with self._wake:
            for row in self._waiting:
                row.fail(EngineClosedError("the engine was closed"))
            self._waiting.clear()

    def _has_work(self) -> bool:
        with self._wake:
            self._wake.wait_for(lambda: self._rows or (self._waiting and not self._held) or self._closed)
            return not self._closed

    def _take(self, like: Row | None = None) -> Row | None:
        """The next waiting request, unless it steers other positions than `like`."""
        with self._wake:
            if self._closed or self._held or not self._waiting:
                return None
            if like and self._waiting[0].request.positions != like.request.positions:
                return None
            row = self._waiting.popleft()
        self._prompt_tokens += len(row.request.prompt_ids)
        return row

    def _drop_cancelled(self) -> None:
        """End cancelled requests that still wait; they need not wait for a place."""
        with self._wake:
            dropped = [row for row in self._waiting if row.cancelled]
            for row in dropped:
                self._waiting.remove(row)
        for row in dropped:
            row.end_cancelled()

    def _step(self) -> None:
        logits = self._batch.step(self._rows).float()
        self._steps += 1
        if self._closed:  # its listeners hear that, not one more token
            return
        running = [i for i, row in enumerate(self._rows) if not row.cancelled]
        if len(running) < len(self._rows):  # indexing copies, so not at every step
            logits = logits[running]
        drawn = draw([self._rows[i].sampler for i in running], logits)
        silenced = False
        for i, result in zip(running, drawn, strict=True):
            row = self._rows[i]
            self._generated += 1
            self._steered += (steered := bool(row.additions))
            if result is None:
                self._batch.spoiled(i)
                if row.sampler.error is not None:
                    row.fail(_guide_error(row.sampler.error))
                else:
                    row.fail(EngineError("the model's logits are not finite: the additions are too large for it"))
            else:
                row.take(*result)
                silenced |= steered and not row.additions
        for i, row in enumerate(self._rows):
            if row.cancelled and not row.finished:
                self._batch.spoiled(i)  # it may be; nobody looked at its logits
                row.end_cancelled()
        if silenced:
            self._batch.resteer(self._rows)
        if any(row.finished for row in self._rows):
            self._batch.leave(self._rows)

    def _end_rows(self, error: Exception) -> None:
        for row in self._rows:
            row.fail(error)
        for i in range(len(self._rows)):
            self._batch.spoiled(i)
        self._batch.leave(self._rows)


_GREEDY = Sampling(temperature=0, max_tokens=100)


class Batch(Protocol):
    """The running rows' place in the model. `rows` is the engine's list, which only these methods change."""

    @property
    def prefix(self) -> PrefixCache | None: ...

    @property
    def cached_tokens(self) -> int: ...

    @property
    def slot_bytes(self) -> int: ...

    def admit(self, take: Callable[..., Row | None], rows: list[Row], most: int) -> None:
        """Append newcomers to `rows`, ready for their first step."""

    def step(self, rows: Sequence[Row]) -> Tensor:
        """One forward; logits ``(rows, vocabulary)``."""

    def resteer(self, rows: Sequence[Row]) -> None:
        """Rows' additions have changed."""

    def spoiled(self, place: int) -> None:
        """The row at this place left something that is not finite."""

    def leave(self, rows: list[Row]) -> None:
        """Remove finished rows from `rows`."""

    def forget(self) -> None:
        """Keep nothing that was computed before; no rows run."""


class SlotBatch:
    """Continuous batching: row i of the batch lives in slot i."""

    def __init__(self, lm: LanguageModel, prefix_cache_bytes: int = 0) -> None:
        self._lm = lm
        self._slots = Slots(len(DynamicCache(config=lm.model.config).layers))
        self.prefix = PrefixCache(prefix_cache_bytes)
        self.cached_tokens = 0
        self.additions: dict[int, Tensor] | None = None  # of the running rows; None when they changed

    def admit(self, take: Callable[..., Row | None], rows: list[Row], most: int) -> None:
        computed = 0
        while len(rows) < most and computed < _PREFILL_BUDGET and (row := take()):
            try:
                computed += self.join(row, len(rows))
            except Exception as error:  # the running rows are not concerned
                row.fail(error)
                self.spoiled(len(rows))
                continue
            rows.append(row)
            self.additions = None

    def join(self, row: Row, slot: int) -> int:
        """Prefill a row's prompt but its last token into a slot; returns how many tokens were computed."""
        past = row.request.prompt_ids[:-1]
        clean = row.request.positions == "generated"
        scored = row.request.prompt_logprobs is not None
        self._slots.reserve(slot + 1, len(past) + 1)
        blocks = self.prefix.match(past) if clean and not scored else []
        known = 0
        if blocks:
            self._slots.write(slot, blocks)
            known = sum(len(block[0]) for block in blocks)
            self.cached_tokens += known
        if known < len(past):
            ids = torch.tensor([past], device=self._lm.device)
            positions = torch.arange(len(past), device=self._lm.device)[None]
            with nullcontext() if clean else steer(self._lm.layers, stack_additions([row], self._lm)):
                for start, stop in _pieces(known, len(past), scored):
                    self._slots.prefill(slot, start)
                    part = slice(start, stop)
                    logits = self._lm.forward(
                        ids[:, part], None, self._slots.cache, last_only=not scored, positions=positions[:, part]
                    )
                    if scored:
                        row.score(logits[0], start)
        if clean:
            self.prefix.insert(past, lambda start, stop: self._slots.read(slot, start, stop))
        return len(past) - known

    def step(self, rows: Sequence[Row]) -> Tensor:
        if self.additions is None:
            self.additions = stack_additions(rows, self._lm)
        lengths = [row.length for row in rows]
        self._slots.reserve(len(rows), max(lengths) + 1)
        device = self._lm.device
        mask = self._slots.decode(lengths, self._lm.model.dtype, device)
        tokens = torch.tensor([[row.token] for row in rows], device=device)
        positions = torch.tensor(lengths, device=device)[:, None]
        with steer(self._lm.layers, self.additions):
            return self._lm.forward(tokens, mask, self._slots.cache, positions=positions)[:, -1]

    def resteer(self, rows: Sequence[Row]) -> None:
        self.additions = None

    def spoiled(self, place: int) -> None:
        self._slots.clear(place)

    def forget(self) -> None:
        self.prefix.clear()
        self._slots.release()

    @property
    def slot_bytes(self) -> int:
        return self._slots.bytes

    def leave(self, rows: list[Row]) -> None:
        self.additions = None
        self._leave(rows)
        if not rows and self._slots.bytes > _KEPT_SLOT_BYTES:
            self._slots.release()

    def _leave(self, rows: list[Row]) -> None:
        for slot in reversed(range(len(rows))):
            if rows[slot].finished:
                last = rows.pop()
                if slot < len(rows):
                    self._slots.move(len(rows), slot, last.length)
                    rows[slot] = last


class PaddedBatch:
    """Micro-batches: rows start together, padded on the left."""

    prefix: PrefixCache | None = None
    cached_tokens = slot_bytes = 0

    def __init__(self, lm: LanguageModel) -> None:
        self._lm = lm
        self._cache: Any = None
        self._mask = torch.empty(0)
        self.additions: dict[int, Tensor] = {}

    def admit(self, take: Callable[..., Row | None], rows: list[Row], most: int) -> None:
        if rows:
            return
        while len(rows) < most and (row := take(rows[0] if rows else None)):
            rows.append(row)
        if not rows:
            return
        lm = self._lm
        ids, mask = pad_left([row.request.prompt_ids for row in rows], lm.tokenizer.pad_token_id or 0, lm.device)
        self._cache, self._mask = DynamicCache(config=lm.model.config), mask[:, :-1]
        self.additions = stack_additions(rows, lm)
        past = ids.shape[1] - 1
        whole = rows[0].request.positions == "all"
        scored = {i: row for i, row in enumerate(rows) if row.request.prompt_logprobs is not None}
        with steer(lm.layers, self.additions) if whole else nullcontext():
            for start, stop in _pieces(0, past, bool(scored), len(rows)):
                logits = lm.forward(ids[:, start:stop], mask[:, :stop], self._cache, last_only=not scored)
                for i, row in scored.items():
                    padding = past - row.length
                    row.score(logits[i, max(0, padding - start) :], max(0, start - padding))

    def step(self, rows: Sequence[Row]) -> Tensor:
        self._mask = torch.cat([self._mask, self._mask.new_ones((len(rows), 1))], dim=-1)
        tokens = torch.tensor([[row.token] for row in rows], device=self._lm.device)
        with steer(self._lm.layers, self.additions):
            return self._lm.forward(tokens, self._mask, self._cache)[:, -1]

    def resteer(self, rows: Sequence[Row]) -> None:
        self.additions = stack_additions(rows, self._lm)

    def spoiled(self, place: int) -> None:
        pass  # the cache goes with the batch, and each row reads only its own part of it

    def forget(self) -> None:
        pass  # nothing is kept

    def leave(self, rows: list[Row]) -> None:
        going = [i for i, row in enumerate(rows) if not row.finished]
        rows[:] = [rows[i] for i in going]
        if not rows:
            self._cache = None
            return
        index = torch.tensor(going, device=self._lm.device)
        self._cache.batch_select_indices(index)
        self._mask = self._mask[index]
        self.additions = stack_additions(rows, self._lm)


def stack_additions(rows: Sequence[Row], lm: LanguageModel) -> dict[int, Tensor]:
    """Additions of a batch ``(rows, d_model)`` by layer, cast once to the layer's dtype and device (contract 5);
    layers that no row steers are absent."""
    nothing = torch.zeros(lm.width)
    stacked = {}
    for z in sorted({layer for row in rows for layer in row.additions}):
        parameter = next(lm.layers[z].parameters())
        device = lm.device if parameter.device.type == "meta" else parameter.device  # meta: offloaded
        stacked[z] = torch.stack([row.additions.get(z, nothing) for row in rows]).to(device, lm.model.dtype)
    return stacked


def _pieces(start: int, stop: int, scored: bool, rows: int = 1) -> Iterator[tuple[int, int]]:
    """Begin and end of the parts in which the tokens of prompts are read: all at once, unless their logits are kept."""
    size = max(1, _SCORED_TOKENS // rows) if scored else max(1, stop - start)
    for begin in range(start, stop, size):
        yield begin, min(begin + size, stop)


_problems: WeakKeyDictionary[PreTrainedModel, str | None] = WeakKeyDictionary()


def why_not_continuous(lm: LanguageModel) -> str | None:
    """Why a model cannot run in slots, found by trying (once a model); None when it can.

    Three ragged rows join, decode and leave in turn; each one's logits must be those of one forward over its tokens.
    """
    if lm.model not in _problems:
        _problems[lm.model] = _try_slots(lm)
    return _problems[lm.model]


def _try_slots(lm: LanguageModel) -> str | None:
    kinds = {type(layer) for layer in DynamicCache(config=lm.model.config).layers}
    if kinds != {DynamicLayer}:  # short test rows would not notice a sliding window
        other = ", ".join(sorted(kind.__name__ for kind in kinds - {DynamicLayer}))
        return f"its layers keep their past in other ways than full attention ({other or 'none'})"
    tolerance = 1e-3 if lm.exact else 0.1

    def row(seed: int, length: int) -> Row:
        ids = tuple((seed + 7 * i) % lm.vocabulary for i in range(length))
        return Row(Request(ids, 0, _GREEDY, frozenset()), lambda event: None, lm.tokenizer, None)

    batch = SlotBatch(lm)
    rows: list[Row] = []
    longest = max(1, min(70, (lm.context_length or 70) - 4))
    waiting = deque([row(3, longest), row(5, 3), row(11, 1)])
    seen = {r: list(r.request.prompt_ids) for r in waiting}
    try:
        with torch.inference_mode():
            for newcomers in (2, 0, 1, 0):  # one leaves before the third step
                for _ in range(newcomers):
                    batch.join(waiting[0], len(rows))
                    rows.append(waiting.popleft())
                    batch.additions = None
                logits = batch.step(rows).float()
                for r, scores in zip(rows, logits, strict=True):
                    expected = lm.forward(*pad_left([seen[r]], 0, lm.device))[0, -1].float()
                    distance = float((scores - expected).norm() / expected.norm())
                    if not distance < tolerance:
                        return f"a row's logits differ by {distance:.1%} from those of a plain forward"
                    r.take(int(expected.argmax()))
                    seen[r].append(r.token)
                if not newcomers and waiting:
                    rows[0].finished = True
                    batch.leave(rows)
    except Exception as error:
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no reason'}"
    return None


class Row:
    """One request, and its ticket. `length` tokens of it are in the model's past; `token` is the next to go in."""

    def __init__(
        self, request: Request, listener: Listener, tokenizer: PreTrainedTokenizerBase, room: int | None
    ) -> None:
        self.request = request
        self.guide: Guide | None = None
        self.additions = {z: a.detach().to("cpu", torch.float32) for z, a in request.additions.items() if a.any()}
        if request.guide is not None:
            try:
                self.guide = request.guide()
                self._silence()
            except Exception as error:
                raise _guide_error(error) from error
        self.sampler = Sampler(request, self.guide)
        self.length = len(request.prompt_ids) - 1
        self.token = request.prompt_ids[-1]
        self.finished = False
        self.cancelled = False
        self._listener = listener
        wanted = request.sampling.max_tokens
        self._left = min(wanted, room or wanted)
        self._extra = WRAP_UP_TOKENS if room is None else min(WRAP_UP_TOKENS, room - self._left)  # for wrapping up
        self._wrapping = False
        self._text = TokenText(tokenizer, request.sampling.stop, request.shown_ids)
        self._scores: list[TokenLogprob | None] | None = None if request.prompt_logprobs is None else [None]

    def cancel(self) -> None:
        self.cancelled = True

    def score(self, logits: Tensor, start: int) -> None:
        """Note the log-probabilities of the prompt's tokens from `start` + 1 on; logits ``(tokens, vocabulary)``."""
        if len(logits):
            tokens = torch.tensor(self.request.prompt_ids[start + 1 : start + 1 + len(logits)], device=logits.device)
            assert self._scores is not None and self.request.prompt_logprobs is not None
            self._scores += token_logprobs(logits.float(), tokens, self.request.prompt_logprobs)

    def take(self, token: int, logprob: TokenLogprob | None = None) -> None:
        """Go on with a drawn token: tell the listener, and decide whether this was the end."""
        self.length += 1
        self.token = token
        self._left -= 1
        try:
            ended = token in self.request.stop_ids
            finish = self._over(None if ended else token)
        except Exception as error:  # its batchmates are not concerned
            self.fail(_guide_error(error))
            return
        text, stopped = ("", False) if ended else self._text.push(token)
        if stopped:
            finish = self._whole
        elif finish:
            text += self._text.flush()
        scores, self._scores = self._scores, None
        event = Event(token, text, finish, logprob, None if scores is None else tuple(scores))
        if finish:
            self._end(event)
        else:
            self._tell(event)

    @property
    def _whole(self) -> Finish:
        """How a reply finishes that ends of itself."""
        return "length" if self._wrapping else "stop"

    def _over(self, token: int | None) -> Finish | None:
        """How the reply finishes if this token is its last; None stands for a stop id. Raises what a guide raises."""
        guide = self.guide
        if guide is not None and token is not None:
            guide.take(token)
            self._silence()
        if token is None or (guide is not None and guide.done):
            return self._whole
        if self._left:
            return None
        if guide is None or self._wrapping or not self._extra or not guide.wrap_up():
            return "length"
        self._wrapping, self._left = True, self._extra
        return None

    def _silence(self) -> None:
        if self.additions and self.guide is not None and self.guide.silent:
            self.additions = {}

    def end_cancelled(self) -> None:
        self._end(Event(None, self._text.flush(), "cancelled"))

    def fail(self, error: Exception) -> None:
        if not self.finished:
            self.finished = True
            self._tell(Failure(error))

    def _end(self, event: Event) -> None:
        self.finished = True
        self._tell(event)

    def _tell(self, event: Event | Failure) -> None:
        try:
            self._listener(event)
        except BaseException:  # whoever listened is gone (a cancelled task, say); its batchmates are not
            self.cancelled = True


def _guide_error(error: Exception) -> TraitBasisError:
    if isinstance(error, TraitBasisError):
        return error
    ours = EngineError(f"the guide of this request failed: {type(error).__name__}: {error}")
    ours.__cause__ = error
    return ours
