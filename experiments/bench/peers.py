"""Throughput of running servers under concurrent users, in turns: ours against any OpenAI-compatible peer's.

    traitbasis serve --port 8000 &
    saklas serve FOLDER --probes none --no-web --device cpu --port 8001 &
    python experiments/bench/peers.py ours=http://127.0.0.1:8000/v1 saklas=http://127.0.0.1:8001/v1 --users 8

The first server named is compared with the others. Each user asks once a round, all at the same time; tokens are what
the server's `usage` says. Servers wait idle while another one is measured; the order changes from round to round.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import httpx

from traitbasis.bench import ratio_of

MESSAGES = "You are a customer of an online shop. Your order #W{order}, a desk lamp, is late. You want a refund."
SPECS = ("impatience-medium", "confusion-high", "", "skeptical-medium+incoherence-low")


def body(server: str, model: str, user: int, tokens: int) -> dict[str, Any]:
    """One user's request; only our own server is told traits."""
    ours = {"traits": SPECS[user % len(SPECS)], "stop": None} if server == "ours" else {}
    return {
        "model": model,
        "messages": [
            {"role": "system", "content": MESSAGES.format(order=1000 + user)},
            {"role": "user", "content": "Hello! How can I help you today?"},
        ],
        "temperature": 0.7,
        "max_tokens": tokens,
        "seed": user,
        **ours,
    }


async def speed(client: httpx.AsyncClient, name: str, url: str, model: str, users: int, tokens: int) -> float:
    """Generated tokens per second while so many users ask at once."""
    begin = perf_counter()
    answers = await asyncio.gather(
        *(client.post(f"{url}/chat/completions", json=body(name, model, user, tokens)) for user in range(users))
    )
    taken = perf_counter() - begin
    tokens_made: int = sum(answer.raise_for_status().json()["usage"]["completion_tokens"] for answer in answers)
    return tokens_made / taken


async def compare(servers: dict[str, str], users: int, tokens: int, rounds: int) -> dict[str, list[float]]:
    """Speeds by server, round by round, after one round that is not counted."""
    found: dict[str, list[float]] = {name: [] for name in servers}
    async with httpx.AsyncClient(timeout=900) as client:
        models = {}
        for name, url in servers.items():
            models[name] = (await client.get(f"{url}/models")).raise_for_status().json()["data"][0]["id"]
        order = list(servers)
        for number in range(-1, rounds):
            order = order[1:] + order[:1]
            for name in order:
                value = await speed(client, name, servers[name], models[name], users, tokens)
                print(f"round {number}: {name} {value:.1f} tokens/s", flush=True)
                if number >= 0:
                    found[name].append(value)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("servers", nargs="+", help="name=base URL, ours first")
    parser.add_argument("--users", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    servers = dict(server.split("=", 1) for server in options.servers)
    found = asyncio.run(compare(servers, options.users, options.tokens, options.rounds))
    first, *others = servers
    figures = {
        "users": options.users,
        "tokens": options.tokens,
        "median_tokens_per_second": {name: median(values) for name, values in found.items()},
        "times": {other: vars(ratio_of(found[first], found[other])) for other in others},
    }
    print(json.dumps(figures, indent=1))
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
