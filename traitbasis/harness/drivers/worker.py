"""One worker: cells come in as JSON lines on standard input, one at a time, and each is answered by one JSON line.

    parent: {settings}                      driver: {"ready": {"harness_version": …, "tasks": {domain: [ids]}, …}}
    parent: {"cell": {…}}                   driver: {"episode": {…}} or {"failed": {"side", "fatal", "text", …}}

``failed`` says that an endpoint did not answer, so that the cell says nothing about the agent. It is fatal where no
other cell would fare better. Closed input means that nobody waits any more: the process ends at once, also in the
middle of a cell.
"""

from __future__ import annotations

import json
import math
import os
import queue
import re
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol
from urllib.parse import urlsplit

Json = dict[str, Any]
_PASSING = (408, 409, 425, 429)  # and 5xx: worth asking again
_LONGEST_WAIT = 30.0  # seconds between two tries
_PASSWORD = re.compile(r"(?<=://)[^/?#\s]*@")


class Driver(Protocol):
    """A harness. Made from the settings; imports the harness, and puts the endpoints in the place of its clients."""

    def ready(self) -> Json:
        """What made the run, and which tasks there are."""

    def play(self, cell: Json) -> Json:
        """Runs one cell; the episode's reward, messages and how it ended. Raises what the harness raises."""


class Endpoint:
    """``litellm.completion`` for one side, asked at an address of its own and written down.

    side: ``agent`` or ``user``. settings: url, key (None where it needs none), retries, timeout (seconds of a request),
    price (dollars of a million tokens: ``{"in", "out"}``, or None for litellm's own). Arguments whose value is None are
    not sent.
    """

    def __init__(self, side: str, settings: Json) -> None:
        self.side, self._settings = side, settings
        self.begin()

    def begin(self, **always: Any) -> None:
        """A new episode. always: arguments that each of its calls gets, whatever the harness asks for."""
        self._always = always
        self.failure: Json | None = None
        self.calls, self.prompt, self.completion = 0, 0, 0
        self.cost: float | None = 0.0
        self.made_by: Json = {}
        self.messages: list[Any] = []  # as last sent: what is left of an episode that breaks off

    def __call__(self, **request: Any) -> Any:
        try:
            return self._answer(**request)
        except _Refused as refused:
            raise refused.error from None
        except Exception as error:  # nothing that the other side has said: a reply without a message, no litellm, …
            self.failure = self.failure or {
                "side": self.side,
                "fatal": False,
                "text": f"{self.hidden(self._settings['url'])} gave no reply to go on with: "
                f"{type(error).__name__}: {self._line(error)}",
            }
            raise

    def _answer(self, **request: Any) -> Any:
        import litellm

        self.calls += 1
        self.messages = request["messages"]
        asked = {**request, **self._always, "timeout": self._settings["timeout"]}
        asked |= {"api_base": self._settings["url"], "api_key": self._settings["key"] or "none"}
        asked = {name: value for name, value in asked.items() if value is not None}
        tries = self._settings["retries"]
        for i in range(tries + 1):
            try:
                reply = litellm.completion(**asked, num_retries=0, max_retries=0, drop_params=True)
                break
            except Exception as error:
                status = getattr(error, "status_code", None) or 500
                passing = status in _PASSING or status >= 500
                if passing and i < tries:
                    time.sleep(_wait(error, i))
                    continue
                # Only what an agent has said can make a later request of its own a bad one: that is its result. So is
                # one to the user when the agent said nothing.
                users = self.side == "user" and not _says_nothing(request["messages"])
                if passing or status in (401, 403, 404) or users or self.calls == 1:
                    self.failure = self._failure(error, status, passing)
                    raise
                raise _Refused(error) from None
        self._count(reply)
        message = reply.choices[0].message
        if isinstance(message.content, str):  # half of a surrogate pair, where a model was cut, can be sent to nobody
            message.content = message.content.encode("utf-8", "replace").decode()
        if self.side == "user" and not message.tool_calls and not (message.content or "").strip():
            self.failure = {"side": "user", "fatal": False, "text": "the user's reply is empty"}
            raise ValueError("the user's reply is empty")
        return reply

    @property
    def tokens(self) -> Json:
        return {"prompt": self.prompt, "completion": self.completion}

    def _count(self, reply: Any) -> None:
        made_by = getattr(reply, "traitbasis", None)
        if isinstance(made_by, dict) and not self.made_by:
            self.made_by = made_by
        usage = getattr(reply, "usage", None)
        prompt, completion = (getattr(usage, name, 0) or 0 for name in ("prompt_tokens", "completion_tokens"))
        self.prompt, self.completion = self.prompt + prompt, self.completion + completion
        price, known = self._settings.get("price"), reply._hidden_params.get("response_cost")
        if price:
            known = (prompt * price["in"] + completion * price["out"]) / 1e6
        elif made_by:  # served here: no price, and it costs nothing
            known = 0.0
        self.cost = None if known is None or self.cost is None else self.cost + known
        reply._hidden_params["response_cost"] = known or 0.0  # some agents add it up, and break on None

    def _failure(self, error: Exception, status: int, passing: bool) -> Json:
        url = self.hidden(self._settings["url"])
        if passing and not _listening(self._settings["url"]):
            text = f"nobody answers at {url}: {self._line(error)}"
            return {"side": self.side, "fatal": True, "text": text}
        fatal = status in (401, 403, 404) or (not passing and self.calls == 1)
        return {"side": self.side, "fatal": fatal, "text": f"{url} answered {status}: {self._line(error)}"}

    def _line(self, error: Exception) -> str:
        return self.hidden(_line(error))

    def hidden(self, text: str) -> str:
        """Without the key, which some endpoints and clients repeat, and without passwords in URLs: texts are kept."""
        key = self._settings["key"]
        return _PASSWORD.sub("", text.replace(key, "…") if key else text)


class _Refused(Exception):  # noqa: N818  (whose fault it is)
    """A request that an endpoint refuses for what the agent under test has said before."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


def serve(make: Callable[[Json, Endpoint, Endpoint], Driver]) -> None:
    """Answer cells until standard input closes. What the harness prints goes nowhere."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    lines: queue.Queue[str] = queue.Queue()
    threading.Thread(target=_read, args=(lines,), daemon=True).start()
    settings = json.loads(lines.get())
    agent, user = Endpoint("agent", _with_key(settings["agent"])), Endpoint("user", _with_key(settings["user"]))
    # Harnesses build clients at import that want a key and are never asked; litellm asks the network for prices.
    os.environ.setdefault("OPENAI_API_KEY", "unused")
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    driver = make(settings, agent, user)

    def answer(what: Json) -> None:
        answers.write(json.dumps(what, default=str) + "\n")
        answers.flush()

    answer({"ready": {"python": sys.version.split()[0], **driver.ready()}})
    while True:
        answer(_played(driver, json.loads(lines.get())["cell"], agent, user))


def _played(driver: Driver, cell: Json, agent: Endpoint, user: Endpoint) -> Json:
    started = time.monotonic()
    agent.begin()
    user.begin()
    found: Json
    try:
        found = driver.play(cell)
    except Exception as error:
        # The harness's own rule: an episode that raises is one that the agent did not solve; its call was no JSON, say.
        text = f"{type(error).__name__}: {agent.hidden(user.hidden(_line(error)))}"
        found = {"reward": 0.0, "ended": "error", "error": text, "messages": messages_of(agent.messages)}
    more = {
        "seconds": round(time.monotonic() - started, 2),
        "tokens": {"agent": agent.tokens, "user": user.tokens},
        "cost": {"agent": agent.cost, "user": user.cost},
        "made_by": user.made_by,
    }
    if failure := user.failure or agent.failure:
        return {"failed": {**failure, **more, "messages": found["messages"]}}
    return {"episode": {"error": None, **found, **more}}


def messages_of(messages: list[Any], agent_role: str = "assistant") -> list[Json]:
    """The agent's conversation in the product's words; its policy, the system text, is left out.

    agent_role: the role that the agent's messages have.
    """
    speakers = {"user": "customer", "assistant": "agent", "tool": "tool"}
    found = []
    for message in messages:
        if not isinstance(message, dict):
            message = message.model_dump()
        speaker, text = speakers.get(message["role"]), _text(message.get("content"))
        if speaker == "customer" and text.startswith("API output: "):  # the ReAct agents' form of a tool's answer
            speaker = "tool"
        if speaker is None:
            continue
        said: Json = {"speaker": speaker, "text": text}
        calls = [call.get("function", call) for call in message.get("tool_calls") or []]
        if calls:
            said["calls"] = [{"name": call["name"], "arguments": _object(call["arguments"])} for call in calls]
        found.append(said)
    return found


def _text(content: Any) -> str:
    """What a message says; of content in parts, those that are text."""
    if isinstance(content, list):
        return "".join(str(part.get("text") or "") for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""


def _says_nothing(messages: list[Any]) -> bool:
    """Whether the other side's latest message is empty."""
    latest = messages[-1] if messages and isinstance(messages[-1], dict) else {}
    return latest.get("role") == "user" and not _text(latest.get("content")).strip()


def _object(arguments: Any) -> Any:
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        return arguments


def _with_key(side: Json) -> Json:
    """The key is taken from the environment, so that it stands in no file and no list of processes."""
    return {**side, "key": os.environ.get(side.get("key_env") or "", "").strip() or None}


def _read(lines: queue.Queue[str]) -> None:
    for line in sys.stdin:
        lines.put(line)
    os._exit(0)


def _wait(error: Exception, i: int) -> float:
    headers = getattr(getattr(error, "response", None), "headers", None) or {}
    with suppress(KeyError, ValueError):
        asked = float(headers["retry-after"])
        if math.isfinite(asked):
            return min(max(asked, 0.0), _LONGEST_WAIT)
    return float(min(2**i, _LONGEST_WAIT))


def _listening(url: str) -> bool:
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        with socket.create_connection((parts.hostname or "", port), timeout=5):
            return True
    except OSError:
        return False


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:500]
