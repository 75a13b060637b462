"""``GET /metrics`` for Prometheus: what the engine can take, is doing and has done."""

from __future__ import annotations

from collections.abc import Iterator

from fastapi import APIRouter
from fastapi.responses import Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from traitbasis.engines.base import Engine

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


class _EngineCollector(Collector):
    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        stats = self._engine.stats()
        for field, (name, text) in _GAUGES.items():
            yield GaugeMetricFamily(f"traitbasis_{name}", text, value=getattr(stats, field))
        for field, (name, text) in _COUNTERS.items():
            yield CounterMetricFamily(f"traitbasis_{name}", text, value=getattr(stats, field))


def router(engine: Engine) -> APIRouter:
    """The route, with a registry of its own: several applications may live in one process."""
    registry = CollectorRegistry()
    registry.register(_EngineCollector(engine))
    routes = APIRouter(tags=["operation"])

    @routes.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    return routes
