"""What stands at the two ends of a harness: a recording proxy before the served user, and a scripted agent.

Standard library only: the harnesses' environments have neither torch nor TraitBasis.
"""

from __future__ import annotations

import json
import os
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # whatever proxy the machine has
_KEPT = ("authorization", "api-key", "content-type", "x-traits", "x-trial")


def high(trait: str) -> float:
    """What the served basis takes "high" for: calibration says so, for each trait."""
    with _DIRECT.open(os.environ["TRAITBASIS_SERVED"] + "/traits", timeout=60) as reply:
        levels: dict[str, Any] = json.load(reply)["details"][trait]["levels"]
    return float(levels["high"]["intensity"])


@dataclass(frozen=True)
class Exchange:
    """One request of a harness and what it got. headers: lower-case names. sent, got: JSON, None for anything else."""

    path: str
    headers: dict[str, str]
    sent: Any
    status: int
    got: Any

    @property
    def made_by(self) -> dict[str, Any]:
        """The reply's `traitbasis` field."""
        found: dict[str, Any] = self.got["traitbasis"]
        return found

    @property
    def message(self) -> dict[str, Any]:
        """The reply's message."""
        found: dict[str, Any] = self.got["choices"][0]["message"]
        return found


@dataclass
class Recorder:
    """Passes requests on to a served user and remembers them."""

    upstream: str
    url: str = ""
    exchanges: list[Exchange] = field(default_factory=list)

    def answer(self, path: str, headers: dict[str, str], body: bytes | None) -> tuple[int, bytes]:
        kept = {name: value for name, value in headers.items() if name in _KEPT}
        request = urllib.request.Request(self.upstream + path, body, kept)
        try:
            with _DIRECT.open(request, timeout=300) as reply:
                status, answer = reply.status, reply.read()
        except urllib.error.HTTPError as error:
            status, answer = error.code, error.read()
        self.exchanges.append(Exchange(path, headers, _json(body), status, _json(answer)))
        return status, answer

    def asked_again(self, exchange: Exchange) -> Any:
        """What the same request gets now."""
        status, answer = self.answer(exchange.path, exchange.headers, json.dumps(exchange.sent).encode())
        assert status == 200, answer
        return self.exchanges.pop().got

    @property
    def turns(self) -> list[Exchange]:
        """Chat completions, in order; every one of them was answered."""
        found = [exchange for exchange in self.exchanges if exchange.path.endswith("/chat/completions")]
        for exchange in found:
            assert exchange.status == 200, exchange
            message = exchange.message
            assert message["role"] == "assistant"
            assert message.get("tool_calls") or (message["content"] or "").strip(), exchange
        return found


Say = Callable[[dict[str, Any]], "str | dict[str, Any]"]


@dataclass
class ScriptedAgent:
    """The agent under test behind the OpenAI protocol. say: what it answers to a request, a text or a message."""

    say: Say = lambda body: "Thank you. One moment, please."
    url: str = ""
    asked: list[dict[str, Any]] = field(default_factory=list)

    def answer(self, path: str, headers: dict[str, str], body: bytes | None) -> tuple[int, bytes]:
        sent = _json(body)
        self.asked.append(sent)
        said = self.say(sent)
        message = {"role": "assistant", "content": said} if isinstance(said, str) else said
        finish = "tool_calls" if message.get("tool_calls") else "stop"
        reply = {
            "id": f"chatcmpl-{len(self.asked)}",
            "object": "chat.completion",
            "created": 1,
            "model": sent["model"],
            "choices": [{"index": 0, "message": message, "finish_reason": finish}],
            "usage": {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15},
        }
        return 200, json.dumps(reply).encode()


def call(name: str, **arguments: Any) -> dict[str, Any]:
    """A message of the agent that calls a tool."""
    function = {"name": name, "arguments": json.dumps(arguments)}
    calls = [{"id": "call_1", "type": "function", "function": function}]
    return {"role": "assistant", "content": None, "tool_calls": calls}


@contextmanager
def listening(end: Recorder | ScriptedAgent) -> Iterator[None]:
    """Serve `end` on a free port; sets its url."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._reply(None)

        def do_POST(self) -> None:
            self._reply(self.rfile.read(int(self.headers.get("Content-Length") or 0)))

        def _reply(self, body: bytes | None) -> None:
            headers = {name.lower(): value for name, value in self.headers.items()}
            status, answer = end.answer(self.path, headers, body)
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *message: object) -> None:
            """Nothing: pytest's output is long enough."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    end.url = f"http://127.0.0.1:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()


def _json(body: bytes | None) -> Any:
    try:
        return json.loads(body) if body else None
    except ValueError:
        return None
