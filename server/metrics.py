"""``GET /metrics`` for Prometheus: what the engine can take, is doing and has done, and what was served."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Sequence
from typing import Any

from fastapi import APIRouter
from fastapi.responses import Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from traitbasis.engines.base import Engine, Failure
from traitbasis.spec import format_traits
from traitbasis.tries import TurnListener, UserTurn

from .logs import RequestRecord, current

logger = logging.getLogger("traitbasis.request")

# Fields of EngineStats, under the names of the exposition format.
_GAUGES = {
    "running": ("requests_running", "Requests that are being generated"),
    "waiting": ("requests_waiting", "Requests in the queue"),
    "max_batch": ("requests_running_limit", "Requests that can be generated together"),
    "max_queue": ("requests_waiting_limit", "Requests that may wait"),
    "slot_bytes": ("slot_bytes", "Memory of running requests' keys and values"),
    "cache_bytes": ("prefix_cache_bytes", "Memory of the prefix cache"),
    "cache_limit": ("prefix_cache_bytes_limit", "Memory the prefix cache may take"),
}
_COUNTERS = {
    "steps": ("decode_steps", "Decode steps, each one forward for all running requests"),
    "prompt_tokens": ("prompt_tokens", "Prompt tokens of requests that were started"),
    "cached_tokens": ("prompt_tokens_cached", "Prompt tokens that came from the prefix cache"),
    "generated_tokens": ("generated_tokens", "Tokens drawn"),
    "steered_tokens": ("steered_tokens", "Tokens drawn by requests with steering"),
    "cache_evictions": ("prefix_cache_evictions", "Blocks that left the prefix cache for others"),
}
_FIRST_TOKEN_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_TURN_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_DOSES = (0, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.6, 1, 2, 5, 10)
_LONGEST_WAIT = 30  # clients give up on a Retry-After of more than a minute


class Observer:
    """What the routes tell about the turns they serve; it counts, and completes the request's line in the log.

    log_text: the line holds the last message and the replies, too.
    """

    def __init__(self, engine: Engine, *, log_text: bool = False) -> None:
        self._engine = engine
        self._log_text = log_text
        self._turn_seconds = 1.0  # a moving average
        self.registry = registry = CollectorRegistry()  # its own: several applications may live in one process
        registry.register(_EngineCollector(engine))

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"traitbasis_{name}", text, labels, registry=registry)

        def histogram(name: str, text: str, buckets: Sequence[float]) -> Histogram:
            return Histogram(f"traitbasis_{name}", text, registry=registry, buckets=buckets)

        self._requests = counter("http_requests", "Requests answered, but for probes that succeed", "route", "status")
        self._turns = counter("turns", "User turns, by how they ended", "finish")
        self._tokens_in = counter("usage_prompt_tokens", "Prompt tokens, as replies report them")
        self._tokens_out = counter("usage_completion_tokens", "Tokens of turns that went out")
        self._retries = counter("retries", "Generations after a rejected one")
        self._rejected = counter("guard_rejects", "Generations a guard rejected", "guard")
        self._marked = counter("turns_marked", "Turns that went out though they fail a guard", "guard")
        self._first = histogram("first_token_seconds", "Until text of a turn could be sent", _FIRST_TOKEN_SECONDS)
        self._whole = histogram("turn_seconds", "Until a turn was whole", _TURN_SECONDS)
        self._dose = histogram("dose", "Size of a turn's addition beside a hidden state; 0 is unsteered", _DOSES)

    def asked(self, model: str, messages: Sequence[Any] = ()) -> None:
        """The model this request names, and its conversation."""
        if record := current.get():
            record.model = model
            if self._log_text and messages:
                record.asked = messages[-1]

    def watch(self, listener: TurnListener, *, choice: int = 0) -> TurnListener:
        """Goes between the simulator and a turn's listener; call it, in the request's context, when the turn is
        submitted. choice: which of several replies to one prompt; the prompt is counted with the first."""
        record = current.get()
        began = time.monotonic()
        first: float | None = None

        def heard(item: str | UserTurn | Failure) -> None:
            nonlocal first
            now = time.monotonic() - began
            first = now if first is None else first
            if isinstance(item, UserTurn):
                self._turn(item, first, now, choice, record)
            elif isinstance(item, Failure):
                self._turns.labels("failed").inc()
                if record:
                    record.error = type(item.error).__name__
            listener(item)

        return heard

    def _turn(self, turn: UserTurn, first: float, seconds: float, choice: int, record: RequestRecord | None) -> None:
        prompt_tokens = 0 if choice else turn.prompt_tokens
        self._turns.labels(turn.finish).inc()
        self._tokens_in.inc(prompt_tokens)
        self._tokens_out.inc(turn.completion_tokens)
        self._retries.inc(max(turn.tries - 1, 0))  # what is said as it stands took none
        for guard, count in turn.rejected.items():
            self._rejected.labels(guard).inc(count)
        if turn.failed_guard and turn.finish != "cancelled":  # nobody got that one
            self._marked.labels(turn.failed_guard).inc()
        self._first.observe(first)
        self._whole.observe(seconds)
        self._dose.observe(turn.dose)
        self._turn_seconds += 0.1 * (seconds - self._turn_seconds)
        if record is None:
            return
        if not record.turns:
            record.spec, record.dose = format_traits(turn.intensities), round(turn.dose, 4)
        record.turns += 1
        record.tokens_in += prompt_tokens
        record.tokens_out += turn.completion_tokens
        record.first_token_seconds = min(first, record.first_token_seconds or math.inf)
        record.tries += turn.tries
        record.rejected.update(turn.rejected)
        if turn.failed_guard:
            record.failed_guards.append(turn.failed_guard)
        if self._log_text:
            record.replies.append(turn.text)

    def answered(self, record: RequestRecord, route: str) -> None:
        """A request is over. route: the template of its path, which bounds how many there are."""
        status = "none" if record.status is None else f"{record.status}"
        self._requests.labels(route, status).inc()
        level = logging.ERROR if (record.status or 0) >= 500 else logging.INFO
        logger.log(level, "request", extra={"fields": record.line()})

    def retry_after(self) -> int:
        """Whole seconds until about half of those who wait now have begun, at the pace of late."""
        stats = self._engine.stats()
        seconds = self._turn_seconds * stats.waiting / stats.max_batch / 2
        return max(1, min(_LONGEST_WAIT, math.ceil(seconds)))


class _EngineCollector(Collector):
    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        stats = self._engine.stats()
        for field, (name, text) in _GAUGES.items():
            yield GaugeMetricFamily(f"traitbasis_{name}", text, value=getattr(stats, field))
        for field, (name, text) in _COUNTERS.items():
            yield CounterMetricFamily(f"traitbasis_{name}", text, value=getattr(stats, field))


def router(observer: Observer) -> APIRouter:
    """The route, for what `observer` has counted."""
    routes = APIRouter(tags=["operation"])

    text: dict[int | str, dict[str, Any]] = {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}}

    @routes.get("/metrics", response_class=Response, responses=text)  # its errors are JSON all the same
    async def metrics() -> Response:
        """Counters, gauges and histograms in Prometheus' text format."""
        return Response(generate_latest(observer.registry), media_type=CONTENT_TYPE_LATEST)

    return routes
