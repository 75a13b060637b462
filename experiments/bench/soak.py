"""Does memory stay flat? Many short requests with changing prompts, traits, lengths and cancellations.

    python experiments/bench/soak.py --requests 10000

Prints resident memory and the prefix cache's bytes along the way, and fails when the cache exceeds its bound or the
memory of the last tenth exceeds that of the second tenth by more than 5 %.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from queue import SimpleQueue
from statistics import median

import torch
from rich.progress import track

from traitbasis.embedded import DEFAULT_MODEL
from traitbasis.engines.base import Failure, Request, Sampling
from traitbasis.engines.transformers import TransformersEngine
from traitbasis.model import load_model


def resident() -> int:
    """Bytes of memory this process holds."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--cache-mb", type=int, default=64)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    lm = load_model(options.model, dtype=options.dtype)
    directions = torch.randn(4, lm.width, generator=torch.Generator().manual_seed(0))
    limit = options.cache_mb * 2**20
    engine = TransformersEngine(lm, max_batch=32, prefix_cache_bytes=limit)
    rng = random.Random(0)
    ended: SimpleQueue[None] = SimpleQueue()
    memory, cache = [], []

    def listener(event: object) -> None:
        if isinstance(event, Failure) or getattr(event, "finish", None):
            ended.put(None)

    def request(number: int) -> Request:
        begin = [rng.randrange(lm.vocabulary) for _ in range(rng.choice((1, 8, 40)))]
        shared = [100 + number % 7] * 40
        additions = {len(lm.layers) // 2: rng.choice((0.0, 0.1, 0.2)) * directions[rng.randrange(len(directions))]}
        sampling = Sampling(max_tokens=rng.randrange(1, 6))
        return Request((*shared, *begin), number, sampling, frozenset(), additions)

    in_flight = 0
    for number in track(range(options.requests), "requests"):
        while in_flight >= 64:
            ended.get()
            in_flight -= 1
        ticket = engine.submit(request(number), listener)
        in_flight += 1
        if rng.random() < 0.1:
            ticket.cancel()
        if number % max(1, options.requests // 100) == 0:
            memory.append(resident())
            cache.append(engine.stats().cache_bytes)
    for _ in range(in_flight):
        ended.get()
    stats = engine.stats()
    engine.close()
    tenth = max(1, len(memory) // 10)
    early, late = median(memory[tenth : 2 * tenth]), median(memory[-tenth:])
    figures = {
        "requests": options.requests,
        "cache_limit": limit,
        "cache_most": max(cache),
        "evictions": stats.cache_evictions,
        "resident_mb": [round(value / 2**20) for value in memory[:: max(1, len(memory) // 20)]],
        "late_over_early": late / early,
    }
    print(json.dumps(figures))
    if options.out:
        options.out.write_text(json.dumps(figures, indent=1) + "\n")
    assert max(cache) <= limit, "the prefix cache exceeded its bound"
    assert late <= 1.05 * early, f"memory grew by {late / early - 1:.1%}"


if __name__ == "__main__":
    main()
