"""Throughput of running servers under concurrent users, in turns: ours against any OpenAI-compatible peer's.

    traitbasis serve --no-guards --port 8000 &
    saklas serve FOLDER --probes none --no-web --device cpu --port 8001 &
    python experiments/bench/peers.py ours=http://127.0.0.1:8000/v1 saklas=http://127.0.0.1:8001/v1 --users 8

The first server named is compared with the others. In a round each user asks several times, one question after the
other, all users at the same time; tokens are what the server's `usage` says. A turn that is drawn again is work a peer
does not do: hence `--no-guards`. Servers wait idle while another one is measured, in changing order.
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


def body(server: str, model: str, user: int, turn: int, tokens: int) -> dict[str, Any]:
    """One user's request; only our own server is told traits."""
    ours = {"traits": SPECS[user % len(SPECS)], "stop": None} if server == "ours" else {}
    return {
        "model": model,
        "messages": [
            {"role": "system", "content": MESSAGES.format(order=1000 + 100 * turn + user)},
            {"role": "user", "content": "Hello! How can I help you today?"},
        ],
        "temperature": 0.7,
        "max_tokens": tokens,
        "seed": user,
        **ours,
    }


async def speed(client: httpx.AsyncClient, name: str, url: str, model: str, options: argparse.Namespace) -> float:
    """Generated tokens per second while so many users ask at once."""

    async def one(user: int) -> int:
        made = 0
        for turn in range(options.turns):
            question = body(name, model, user, turn, options.tokens)
            answer = (await client.post(f"{url}/chat/completions", json=question)).raise_for_status()
            made += answer.json()["usage"]["completion_tokens"]
        return made

    begin = perf_counter()
    made = sum(await asyncio.gather(*(one(user) for user in range(options.users))))
    return made / (perf_counter() - begin)


async def compare(servers: dict[str, str], options: argparse.Namespace) -> dict[str, list[float]]:
    """Speeds by server, round by round, after one round that is not counted."""
    found: dict[str, list[float]] = {name: [] for name in servers}
    async with httpx.AsyncClient(timeout=900) as client:
        models = {}
        for name, url in servers.items():
            models[name] = (await client.get(f"{url}/models")).raise_for_status().json()["data"][0]["id"]
        order = list(servers)
        for number in range(-1, options.rounds):
            order = order[1:] + order[:1]
            for name in order:
                value = await speed(client, name, servers[name], models[name], options)
                print(f"round {number}: {name} {value:.1f} tokens/s", flush=True)
                if number >= 0:
                    found[name].append(value)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("servers", nargs="+", help="name=base URL, ours first")
    parser.add_argument("--users", type=int, default=8)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    servers = dict(server.split("=", 1) for server in options.servers)
    found = asyncio.run(compare(servers, options))
    first, *others = servers
    figures = {
        "users": options.users,
        "turns": options.turns,
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
