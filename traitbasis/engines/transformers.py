"""The embedded engine: a decode loop over a transformers model, in one thread that owns the model.

Waiting requests are taken together as one batch of rows. The prompt but its last token is prefilled without any hook,
so the past is clean by construction (contract 4); then the batch is decoded step by step from the last prompt token on,
with each row's own addition. A finished row leaves the batch at once. Additions live in the batch, never on the
model (contract 6); a batch in which nobody is steered registers no hook at all (contract 2).

A request that arrives while a batch runs waits for it to end. Joining a running batch is the next thing to build here.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers import (
    DynamicCache,
    PreTrainedTokenizerBase,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from traitbasis.engines.base import Event, Failure, Finish, Listener, Request
from traitbasis.errors import EngineBusyError, EngineError, RequestError
from traitbasis.hooks import steer
from traitbasis.model import LanguageModel, pad_left

# Logits divided by less overflow float32; what is drawn is the most likely token long before.
_COLDEST = 1e-5


class TransformersEngine:
    """See the module docstring. `max_batch` rows run together, at most `max_queue` requests wait."""

    def __init__(self, lm: LanguageModel, *, max_batch: int = 8, max_queue: int = 256) -> None:
        self._lm = lm
        self._max_batch = max_batch
        self._max_queue = max_queue
        self._waiting: deque[_Row] = deque()
        self._wake = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="traitbasis-engine", daemon=True)
        self._thread.start()

    def submit(self, request: Request, listener: Listener) -> _Row:
        """See ``Engine.submit``. Raises RequestError when the prompt leaves no room in the model's context;
        a reply that reaches its end finishes with "length"."""
        if not request.prompt_ids:
            raise RequestError("the prompt is empty")
        limit = self._lm.context_length
        room = None if limit is None else limit - len(request.prompt_ids)
        if room is not None and room < 1:
            raise RequestError(
                f"the conversation has {len(request.prompt_ids)} tokens; the context of {self._lm.name} is {limit}",
                code="context_length_exceeded",
            )
        for layer, addition in request.additions.items():
            if not 0 <= layer < len(self._lm.layers):
                raise RequestError(f"layer {layer} does not exist; layers are 0 to {len(self._lm.layers) - 1}")
            if addition.shape != (self._lm.width,):
                raise RequestError(
                    f"the addition at layer {layer} has shape {tuple(addition.shape)}; {self._lm.name} takes "
                    f"({self._lm.width},)"
                )
        row = _Row(request, listener, self._lm.tokenizer, room)
        with self._wake:
            if self._closed:
                raise EngineError("the engine is closed")
            if len(self._waiting) >= self._max_queue:
                raise EngineBusyError(f"{len(self._waiting)} requests are waiting already; try again later")
            self._waiting.append(row)
            self._wake.notify()
        return row

    def close(self) -> None:
        """End the thread after the step it is in; unfinished requests get a Failure."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        self._thread.join()

    def _work(self) -> None:
        while rows := self._next_batch():
            try:
                self._run(rows)
            except Exception as error:  # a batch must not take the thread with it
                for row in rows:
                    row.fail(error)
        with self._wake:
            for row in self._waiting:
                row.fail(EngineError("the engine was closed"))
            self._waiting.clear()

    def _next_batch(self) -> list[_Row]:
        """The requests at the head of the queue that can run together; empty when the engine closes."""
        rows: list[_Row] = []
        with self._wake:
            while not rows and not self._closed:
                self._wake.wait_for(lambda: self._waiting or self._closed)
                while self._waiting and not self._closed and len(rows) < self._max_batch:
                    if rows and self._waiting[0].request.positions != rows[0].request.positions:
                        break
                    row = self._waiting.popleft()
                    if row.cancelled:
                        row.step(None)
                    else:
                        rows.append(row)
        return rows

    def _drop_cancelled(self) -> None:
        """End cancelled requests that still wait, so that they need not wait for the running batch."""
        with self._wake:
            dropped = [row for row in self._waiting if row.cancelled]
            for row in dropped:
                self._waiting.remove(row)
        for row in dropped:
            row.step(None)

    def _run(self, rows: list[_Row]) -> None:
        lm = self._lm
        ids, mask = pad_left([row.request.prompt_ids for row in rows], lm.tokenizer.pad_token_id or 0, lm.device)
        cache: Any = DynamicCache(config=lm.model.config)
        additions = _stack([row.request for row in rows], lm.width)
        if ids.shape[1] > 1:
            whole = rows[0].request.positions == "all"
            with steer(lm.layers, additions) if whole else nullcontext():
                lm.forward(ids[:, :-1], mask[:, :-1], cache)
        tokens = ids[:, -1:]
        while True:
            with steer(lm.layers, additions):
                logits = lm.forward(tokens, mask, cache)[:, -1].float().cpu()
            if self._closed:
                raise EngineError("the engine was closed")
            self._drop_cancelled()
            chosen = [row.step(scores) for row, scores in zip(rows, logits, strict=True)]
            going = [i for i, row in enumerate(rows) if not row.finished]
            if not going:
                return
            tokens = torch.tensor([[chosen[i]] for i in going], device=lm.device)
            if len(going) < len(rows):
                rows = [rows[i] for i in going]
                index = torch.tensor(going, device=lm.device)
                cache.batch_select_indices(index)
                mask = mask[index]
                additions = _stack([row.request for row in rows], lm.width)
            mask = torch.cat([mask, mask.new_ones((len(rows), 1))], dim=-1)


def _stack(requests: Sequence[Request], width: int) -> dict[int, Tensor]:
    """Additions of a batch, ``(rows, d_model)`` float32 by layer; layers that no row steers are absent."""
    layers = sorted({layer for request in requests for layer in request.additions})
    nothing = torch.zeros(width)
    return {z: torch.stack([request.additions.get(z, nothing) for request in requests]) for z in layers}


class _Row:
    """One request in a batch, and its ticket: samples with its own generator, so a batchmate changes nothing."""

    def __init__(
        self, request: Request, listener: Listener, tokenizer: PreTrainedTokenizerBase, room: int | None = None
    ) -> None:
        self.request = request
        self.finished = False
        self._listener = listener
        self.cancelled = False
        self._left = min(request.sampling.max_tokens, room or request.sampling.max_tokens)
        self._generator = torch.Generator().manual_seed(request.seed)
        self._text = TokenText(tokenizer, request.sampling.stop)
        sampling = request.sampling
        self._warpers: list[Any] = []
        if sampling.temperature >= _COLDEST:
            self._warpers.append(TemperatureLogitsWarper(float(sampling.temperature)))
            if sampling.top_k:
                self._warpers.append(TopKLogitsWarper(sampling.top_k))
            if sampling.top_p < 1:
                self._warpers.append(TopPLogitsWarper(float(sampling.top_p)))

    def cancel(self) -> None:
        self.cancelled = True

    def step(self, scores: Tensor | None) -> int:
        """Draw the next token from logits ``(vocabulary,)``, tell the listener, and decide whether this was the end.

        Without logits the row can only end, as a cancelled one does.
        """
        if self.cancelled or scores is None:
            self._end(None, "cancelled")
            return 0
        if not math.isfinite(scores.max()):  # nan too; the batchmates' logits are their own
            self.fail(EngineError("the model's logits are not finite: the additions are too large for it"))
            return 0
        token = self._draw(scores)
        self._left -= 1
        if token in self.request.stop_ids:
            self._end(token, "stop")
            return token
        text, stopped = self._text.push(token)
        if stopped:
            self._finish(Event(token, text, "stop"))
        elif not self._left:
            self._end(token, "length", text)
        else:
            self._tell(Event(token, text))
        return token

    def fail(self, error: Exception) -> None:
        if not self.finished:
            self.finished = True
            self._tell(Failure(error))

    def _draw(self, scores: Tensor) -> int:
        if self.request.sampling.temperature < _COLDEST:
            return int(scores.argmax())
        scores = scores[None]
        for warper in self._warpers:
            scores = warper(None, scores)
        return int(torch.multinomial(scores.softmax(-1), 1, generator=self._generator))

    def _end(self, token: int | None, finish: Finish, text: str = "") -> None:
        self._finish(Event(token, text + self._text.flush(), finish))

    def _finish(self, event: Event) -> None:
        self.finished = True
        self._tell(event)

    def _tell(self, event: Event | Failure) -> None:
        try:
            self._listener(event)
        except Exception:  # whoever listened is gone; its batchmates are not
            self.cancelled = True


class TokenText:
    """Text of a growing token sequence: what is final so far, cut before the first stop string.

    Held back are incomplete characters and endings that may yet become a stop string, so that a stop string is found
    across token borders and no part of it is ever sent.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stop = stop
        self._ids: list[int] = []
        self._sent = 0

    def push(self, token: int) -> tuple[str, bool]:
        """Text that became final with `token`, and whether a stop string was reached."""
        self._ids.append(token)
        text = self._decode()
        found = [at for at in (text.find(stop) for stop in self._stop) if at >= 0]
        if found:
            return self._take(text, min(found)), True
        end = len(text.rstrip("\ufffd"))
        held = (size for stop in self._stop for size in range(1, len(stop)) if text.endswith(stop[:size], 0, end))
        end -= max(held, default=0)
        return self._take(text, end), False

    def flush(self) -> str:
        """The held-back rest."""
        text = self._decode()
        return self._take(text, len(text))

    def _take(self, text: str, end: int) -> str:
        part = text[self._sent : end]
        self._sent = max(self._sent, end)
        return part

    def _decode(self) -> str:
        return str(self._tokenizer.decode(self._ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))
