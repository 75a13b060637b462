"""Running a server: keys, limits, request ids, the log, metrics, probes, stopping, CORS, the OpenAPI document.

Numbers such as "1.5.7" are the items of docs/harness-contract.md that a test shows.
"""

from __future__ import annotations

import gc
import io
import json
import logging
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from fastapi import APIRouter, FastAPI
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from reference import END, Gate
from samples import random_basis
from scripted import Script, ScriptedEngine
from serving import serving
from tiny import WIDTH, save_folder, tiny_model
from traitbasis.server import Limits, Settings, create_app
from traitbasis.server.errors import ErrorBody
from traitbasis.server.keys import KeyCheck, read_keys
from traitbasis.server.logs import JsonLines, TextLines, current
from traitbasis.server.metrics import Observer
from traitbasis.server.operation import Requests, Server
from typer.testing import CliRunner

from traitbasis import cli
from traitbasis.engines.base import EngineStats, Sampling
from traitbasis.engines.transformers import TransformersEngine
from traitbasis.errors import TraitBasisError
from traitbasis.model import LanguageModel
from traitbasis.simulator import UserSimulator
from traitbasis.tries import PreparedTurn

SECRET = "Zanzibar"
MESSAGES = [
    {"role": "system", "content": "You are a customer. Your order is #W1."},
    {"role": "user", "content": f"Hi from {SECRET}! How can I help you today?"},
]
KEYS = ("key-one", "key-two")
ENDLESS = {"max_tokens": 1900, "logit_bias": {str(END): -100}, "temperature": 1, "stream": True}


@pytest.fixture(scope="module")
def lm() -> LanguageModel:
    return tiny_model()


@pytest.fixture(scope="module")
def simulator(lm: LanguageModel) -> Iterator[UserSimulator]:
    """Without guards: random weights write what any guard may reject."""
    basis = random_basis(lm, "impatience", "skeptical")
    with UserSimulator(lm, basis, sampling=Sampling(max_tokens=8), guards=()) as simulator:
        yield simulator


@contextmanager
def client_of(simulator: UserSimulator, **settings: Any) -> Iterator[httpx.Client]:
    app = create_app(simulator, settings=Settings(**settings))
    with serving(app) as url, httpx.Client(base_url=url, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def client(simulator: UserSimulator) -> Iterator[httpx.Client]:
    with client_of(simulator) as client:
        yield client


@pytest.fixture(scope="module")
def keyed(simulator: UserSimulator) -> Iterator[httpx.Client]:
    with client_of(simulator, api_keys=KEYS, cors_origins=("https://page.example",)) as client:
        yield client


def ask(client: httpx.Client, headers: dict[str, str] | None = None, **body: Any) -> httpx.Response:
    whole = {"model": "steered-user", "messages": MESSAGES, **body}
    return client.post("/v1/chat/completions", json=whole, headers=headers)


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    """The error, in OpenAI's shape and no other."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    return ErrorBody.model_validate(response.json(), extra="forbid").model_dump()["error"]


class Lines:
    """What is logged while this is entered, by line."""

    def __init__(self, formatter: logging.Formatter) -> None:
        self._stream = io.StringIO()
        self._handler = logging.StreamHandler(self._stream)
        self._handler.setFormatter(formatter)
        self._logger = logging.getLogger("traitbasis")

    def __enter__(self) -> Lines:
        self._level = self._logger.level
        self._logger.setLevel(logging.INFO)
        self._logger.addHandler(self._handler)
        return self

    def __exit__(self, *exception: object) -> None:
        self._logger.removeHandler(self._handler)
        self._logger.setLevel(self._level)

    @property
    def text(self) -> str:
        return self._stream.getvalue()

    def clear(self) -> None:
        self._stream.seek(0)
        self._stream.truncate()

    def json(self, count: int) -> list[dict[str, Any]]:
        """The lines as objects, once there are `count`: a line is written after the client has its answer."""
        deadline = time.monotonic() + 10
        while self.text.count("\n") < count and time.monotonic() < deadline:
            time.sleep(0.005)
        found = [json.loads(line) for line in self.text.splitlines()]
        assert len(found) == count, self.text
        return found


@pytest.fixture
def log(client: httpx.Client, keyed: httpx.Client, limited: httpx.Client) -> Iterator[Lines]:
    """Only this test's lines: those of earlier requests have been written when that of a later one has."""
    with Lines(JsonLines()) as lines:
        deadline = time.monotonic() + 10
        for number, server in enumerate((client, keyed, limited)):
            server.get("/nothing", headers={"X-Request-ID": f"mark-{number}"})
            while f"mark-{number}" not in lines.text and time.monotonic() < deadline:
                time.sleep(0.005)
        lines.clear()
        yield lines


# --- API keys ---


@pytest.mark.parametrize(
    "headers",
    [
        {"Authorization": "Bearer key-one"},
        {"Authorization": "bearer  key-two"},
        {"API-Key": "key-two"},
        {"API-Key": "key-one", "Authorization": "Bearer fake-api-key"},
        {"API-Key": "None", "Authorization": "Bearer key-one"},
    ],
    ids=str,
)
def test_any_of_the_keys_opens_every_route_in_either_header(keyed: httpx.Client, headers: dict[str, str]) -> None:
    """1.5.5: harnesses send a made-up token beside the header that counts."""
    assert ask(keyed, headers).status_code == 200
    for path in ("/v1/models", "/metrics"):
        assert keyed.get(path, headers=headers).status_code == 200
    assert keyed.post("/steer_bare", json={"messages": MESSAGES}, headers=headers).status_code == 200
    assert keyed.get("/nothing", headers=headers).status_code == 404


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer key"},
        {"Authorization": "Bearer key-one1"},
        {"Authorization": "Bearer KEY-ONE"},
        {"Authorization": "Bearer key-one,key-two"},
        {"Authorization": "Basic key-one"},
        {"Authorization": "key-one"},
        {"Authorization": "Bearer"},
        {"API-Key": ""},
        {"API-Key": "Bearer key-one"},
        {"X-API-Key": "key-one"},
    ],
    ids=str,
)
def test_without_one_of_the_keys_it_is_401(keyed: httpx.Client, headers: dict[str, str]) -> None:
    responses = [
        ask(keyed, headers),
        keyed.post("/steer_tau", json={"messages": MESSAGES}, headers=headers),
        keyed.get("/v1/models", headers=headers),
        keyed.get("/metrics", headers=headers),
        keyed.get("/nothing", headers=headers),
        keyed.get("/health/", headers=headers),
    ]
    for response in responses:
        error = error_of(response, 401)
        assert error["code"] == "invalid_api_key" and error["type"] == "invalid_request_error"
        assert "Bearer" in error["message"] and "key-" not in error["message"]
        assert response.headers["www-authenticate"] == "Bearer"
    assert keyed.head("/v1/models", headers=headers).status_code == 401


def test_probes_and_the_page_need_no_key(keyed: httpx.Client) -> None:
    for path in ("/health", "/ready", "/openapi.json", "/docs"):
        assert keyed.get(path).status_code == 200, path
    assert keyed.head("/health").status_code == keyed.head("/ready").status_code == 200
    assert keyed.get("/").status_code == 200


def test_without_configured_keys_any_token_will_do(client: httpx.Client) -> None:
    """1.5.5."""
    for headers in ({}, {"Authorization": "Bearer x"}, {"API-Key": "None"}, {"Authorization": "nonsense"}):
        assert client.get("/v1/models", headers=headers).status_code == 200


def test_metrics_can_be_given_without_a_key(simulator: UserSimulator) -> None:
    with client_of(simulator, api_keys=KEYS, open_metrics=True) as client:
        assert client.get("/metrics").status_code == 200
        assert client.get("/v1/models").status_code == 401


def test_a_key_is_compared_with_all_keys_as_a_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time tells neither which key it was nor how much of it was right."""
    compared: list[tuple[bytes, bytes]] = []

    def compare(one: bytes, other: bytes) -> bool:
        compared.append((one, other))
        return one == other

    monkeypatch.setattr("traitbasis.server.keys.hmac.compare_digest", compare)

    async def app(*_: Any) -> None:
        pass

    check = KeyCheck(app, ["a", "b", "c"])
    for key, known in (("a", True), ("c", True), ("ab", False)):
        compared.clear()
        assert check._knows(key) is known
        assert len(compared) == 3 and all(len(part) == 32 for pair in compared for part in pair)


def test_keys_come_from_a_file_and_from_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "keys.txt"
    file.write_text("# ours\nsk-1\n\n  sk-2  \n#sk-3\nsk#4\n")
    assert read_keys(file, {}) == ("sk-1", "sk-2", "sk#4")
    assert read_keys(None, {"TRAITBASIS_API_KEYS": "a, b,,c"}) == ("a", "b", "c")
    assert read_keys(file, {"TRAITBASIS_API_KEYS": "a"}) == ("sk-1", "sk-2", "sk#4", "a")
    assert read_keys(None, {}) == ()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, ["keys.txt", "No such file"]),
        (b"", ["keys.txt", "no key"]),
        (b"# nothing yet\n\n", ["keys.txt", "no key"]),
        (b"good\nsk 1 secret\n", ["keys.txt", "line 2"]),
        ("schlüssel-secret\n".encode(), ["keys.txt", "line 1"]),
        (b"\xff\xfesecret", ["keys.txt", "UTF-8"]),
    ],
)
def test_a_bad_key_file_is_an_error_that_names_it(tmp_path: Path, content: bytes | None, words: list[str]) -> None:
    file = tmp_path / "keys.txt"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(TraitBasisError) as raised:
        read_keys(file, {})
    assert all(word in str(raised.value) for word in words) and "secret" not in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("value", ["", " , ", "a b"])
def test_a_variable_that_holds_no_key_is_an_error(value: str) -> None:
    """An operator who meant to set one would else serve everybody."""
    with pytest.raises(TraitBasisError, match="TRAITBASIS_API_KEYS"):
        read_keys(None, {"TRAITBASIS_API_KEYS": value})


# --- limits ---


def body_of(size: int) -> bytes:
    """A good request of so many bytes: white space between tokens means nothing."""
    body = json.dumps({"model": "steered-user", "messages": MESSAGES, "max_tokens": 1}).encode()
    return body[:-1] + b" " * (size - len(body)) + b"}"


@pytest.fixture(scope="module")
def limited(simulator: UserSimulator) -> Iterator[httpx.Client]:
    with client_of(simulator, limits=Limits(body_bytes=4096, messages=3, output_tokens=5)) as client:
        yield client


def pieces(body: bytes) -> Iterator[bytes]:
    """Makes httpx send a chunked body, which declares no length."""
    for start in range(0, len(body), 1000):
        yield body[start : start + 1000]


@pytest.mark.parametrize("send", [bytes, pieces], ids=["declared", "chunked"])
@pytest.mark.parametrize("size", [4097, 10_000, 3_000_000])
def test_a_body_beyond_the_limit_is_refused_and_one_at_it_is_not(
    limited: httpx.Client, send: Callable[[bytes], Any], size: int
) -> None:
    """1.5.7: a clear 400, which no client takes for a failure that may pass; the connection goes on."""
    headers = {"content-type": "application/json"}
    for _ in range(2):
        response = limited.post("/v1/chat/completions", content=send(body_of(size)), headers=headers)
        error = error_of(response, 400)
        assert error["code"] == "request_too_large"
        assert "4096" in error["message"] and f"{size}" in error["message"] and "--max-body-kb" in error["message"]
        assert "connection" not in response.headers
        assert limited.post("/v1/chat/completions", content=send(body_of(4096)), headers=headers).status_code == 200


def talk(url: str, *parts: bytes) -> bytes:
    """Send bytes and read until the server closes the connection."""
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        for part in parts:
            connection.sendall(part)
        found = b""
        while data := connection.recv(65536):
            found += data
    return found


def test_a_body_that_is_announced_as_enormous_is_refused_unread(limited: httpx.Client) -> None:
    """Neither is a client told to go on that asks first, as curl does."""
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    url = str(limited.base_url)
    for more in (b"Content-Length: 1000000000000\r\n\r\n", b"Content-Length: 5000\r\nExpect: 100-continue\r\n\r\n"):
        answer = talk(url, head + more)
        assert answer.startswith(b"HTTP/1.1 400 ") and b"request_too_large" in answer
        assert b"connection: close" in answer.lower()


def test_a_chunked_body_without_end_is_not_read_to_its_end(limited: httpx.Client) -> None:
    sent = 0

    def forever() -> Iterator[bytes]:
        nonlocal sent
        while True:
            sent += 2**16
            yield b" " * 2**16

    with suppress(httpx.TransportError):  # it was still writing when the connection was closed
        error_of(limited.post("/v1/chat/completions", content=forever()), 400)
    assert 4096 < sent < 40 * 2**20


def test_a_client_that_goes_away_while_it_sends_leaves_nothing_behind(limited: httpx.Client, log: Lines) -> None:
    host, port = limited.base_url.host, limited.base_url.port
    with socket.create_connection((host, port)) as connection:
        connection.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
    (line,) = log.json(1)
    assert line["disconnected"] is True and "status" not in line and line["level"] == "info"


def test_too_many_messages_are_refused(limited: httpx.Client) -> None:
    more = [{"role": "assistant", "content": "Hm."}, {"role": "user", "content": "Yes?"}]
    assert ask(limited, messages=[*MESSAGES, more[0]]).status_code == 200
    error = error_of(ask(limited, messages=[*MESSAGES, *more]), 400)
    assert error["code"] == "too_many_messages" and "4" in error["message"] and "3" in error["message"]


def test_max_tokens_beyond_the_limit_is_cut_and_costs_no_episode(limited: httpx.Client) -> None:
    """The reply says what it was drawn with, and that it was cut (contract 11)."""
    endless = {"logit_bias": {str(END): -100}}
    for asked in ({"max_tokens": 1000}, {"max_completion_tokens": 6}, {}):
        body = ask(limited, **asked, **endless).json()
        assert body["usage"]["completion_tokens"] == 5 and body["choices"][0]["finish_reason"] == "length"
        assert body["traitbasis"]["sampling"]["max_tokens"] == 5
    assert ask(limited, max_tokens=3, **endless).json()["usage"]["completion_tokens"] == 3
    assert error_of(ask(limited, max_tokens=0), 400)


def test_json_that_is_nested_without_end_is_a_bad_request(client: httpx.Client) -> None:
    headers = {"content-type": "application/json"}
    error_of(client.post("/v1/chat/completions", content=b"[" * 500_000, headers=headers), 400)


# --- request ids ---


@pytest.mark.parametrize("sent", ["abc-1", "x" * 128, "a.b:c/d+e=f@g_h"])
def test_a_request_keeps_its_id(client: httpx.Client, log: Lines, sent: str) -> None:
    response = ask(client, {"X-Request-ID": sent})
    assert response.headers.get_list("x-request-id") == [sent]
    assert log.json(1)[0]["request_id"] == sent


@pytest.mark.parametrize("sent", ["", "x" * 129, "a b", 'a"b', "ä", "a{b}"])
def test_an_id_that_is_none_is_replaced(client: httpx.Client, sent: str) -> None:
    first, again = (
        client.get("/v1/models", headers={b"X-Request-ID": sent.encode()}).headers["x-request-id"] for _ in range(2)
    )
    assert sent != first != again and len(first) == 32


def test_every_response_has_an_id_and_its_line_in_the_log_the_same(
    keyed: httpx.Client, simulator: UserSimulator, monkeypatch: pytest.MonkeyPatch, log: Lines
) -> None:
    """Refusals, streams, and failures nobody foresaw, whose traceback has it, too."""
    key = {"API-Key": "key-one"}
    responses = [
        keyed.get("/v1/models"),
        keyed.get("/nothing", headers=key),
        keyed.put("/v1/models", headers=key),
        ask(keyed, key, temperature=-1),
        ask(keyed, key, stream=True),
    ]

    def broken(*_: Any, **__: Any) -> PreparedTurn:
        raise ZeroDivisionError("of mine")

    monkeypatch.setattr(simulator, "prepare", broken)
    responses.append(ask(keyed, key))
    assert [response.status_code for response in responses] == [401, 404, 405, 400, 200, 500]
    assert "of mine" not in error_of(responses[-1], 500)["message"]
    *lines, traceback, last = log.json(7)
    ids = [response.headers["x-request-id"] for response in responses]
    assert [line["request_id"] for line in (*lines, last)] == ids and len(set(ids)) == 6
    assert traceback["request_id"] == ids[-1] and "ZeroDivisionError: of mine" in traceback["exception"]


# --- the log ---


def test_a_line_says_what_was_served_and_not_what_was_said(client: httpx.Client, log: Lines) -> None:
    model = "steered-user@impatience-high"
    body = ask(client, model=model, n=2).json()
    (line,) = log.json(1)
    usage, text = body["usage"], body["choices"][0]["message"]["content"]
    assert line["time"].endswith("+00:00") and line["level"] == "info" and line["message"] == "request"
    assert (line["method"], line["path"], line["status"]) == ("POST", "/v1/chat/completions", 200)
    assert (line["model"], line["spec"], line["dose"]) == (model, "impatience-1.5", pytest.approx(3.0, abs=1e-3))
    assert (line["tokens_in"], line["tokens_out"]) == (usage["prompt_tokens"], usage["completion_tokens"])
    assert line["turns"] == line["tries"] == 2
    assert 0 < line["first_token_seconds"] < line["seconds"] < 10
    assert "disconnected" not in line and "rejected" not in line
    assert SECRET not in log.text and json.dumps(text)[1:-1] not in log.text


def test_an_unsteered_turn_is_logged_with_dose_zero(client: httpx.Client, log: Lines) -> None:
    client.post("/steer_bare", json={"messages": MESSAGES})
    (line,) = log.json(1)
    assert line["dose"] == 0 and "spec" not in line and line["tokens_out"] > 0


def test_what_was_said_is_logged_when_asked_for(simulator: UserSimulator, log: Lines) -> None:
    with client_of(simulator, log_text=True) as client:
        text = ask(client).json()["choices"][0]["message"]["content"]
    (line,) = log.json(1)
    assert line["replies"] == [text] and line["asked"] == MESSAGES[-1]


def test_keys_are_never_in_the_log(keyed: httpx.Client, log: Lines) -> None:
    for headers in ({"API-Key": "key-one"}, {"Authorization": "Bearer key-two"}, {"API-Key": "key-wrong"}):
        keyed.get("/v1/models", headers=headers)
        keyed.get("/v1/models?api_key=key-one", headers=headers)
    assert [line["status"] for line in log.json(6)] == [200] * 4 + [401] * 2
    assert "key-" not in log.text
    assert "key-" not in repr(Settings(api_keys=KEYS))


def test_probes_that_succeed_leave_no_lines(client: httpx.Client, log: Lines) -> None:
    for path in ("/health", "/ready", "/metrics"):
        client.get(path)
    client.post("/health")
    (line,) = log.json(1)
    assert (line["method"], line["path"], line["status"]) == ("POST", "/health", 405)


def test_nothing_a_client_sends_breaks_a_line(client: httpx.Client) -> None:
    evil = 'x"}\n{"level": "error", "é\u2028'
    for formatter in (JsonLines(), TextLines()):
        with Lines(formatter) as lines:
            ask(client, model=evil)
            client.get("/%0a%0dINFO%20fake%e2%80%a8" + "y" * 5000)
            deadline = time.monotonic() + 5
            while lines.text.count("\n") < 2 and time.monotonic() < deadline:
                time.sleep(0.005)
        assert len(lines.text.splitlines()) == 2 and lines.text.isascii()
        assert all(len(line) < 2000 for line in lines.text.splitlines())
    assert "404" in lines.text and "status=404" in lines.text


def test_a_client_that_goes_away_is_logged_as_gone(client: httpx.Client, log: Lines) -> None:
    with client.stream("POST", "/v1/chat/completions", json={"model": "steered-user", "messages": MESSAGES, **ENDLESS}):
        pass
    (line,) = log.json(1)
    assert line["disconnected"] is True and line["status"] == 200


def test_a_request_that_is_over_is_nobodys_context(client: httpx.Client) -> None:
    ask(client)
    assert current.get() is None


# --- metrics ---

Samples = dict[tuple[str, ...], float]


def samples(client: httpx.Client) -> Samples:
    """Values by name and label values."""
    return {
        (sample.name.removeprefix("traitbasis_"), *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(client.get("/metrics").text)
        for sample in family.samples
    }


def grown(before: Samples, after: Samples) -> Samples:
    return {key: after[key] - before.get(key, 0) for key in after if after[key] != before.get(key, 0)}


def counted(client: httpx.Client, before: Samples, key: tuple[str, ...], least: float = 1) -> Samples:
    """What has grown, once `key` has by `least`: a request is counted after the client has its answer."""
    deadline = time.monotonic() + 10
    while (found := grown(before, samples(client))).get(key, 0) < least and time.monotonic() < deadline:
        time.sleep(0.005)
    return found


def test_turns_are_counted_by_what_they_were(client: httpx.Client) -> None:
    before = samples(client)
    plain = ask(client).json()["usage"]
    steered = ask(client, traits="impatience-low", n=2, stream=True, stream_options={"include_usage": True})
    usage = json.loads(steered.text.split("\n\n")[-3].removeprefix("data: "))["usage"]
    found = counted(client, before, ("http_requests_total", "/v1/chat/completions", "200"), 2)
    assert found["http_requests_total", "/v1/chat/completions", "200"] == 2
    assert found["usage_prompt_tokens_total",] == plain["prompt_tokens"] + usage["prompt_tokens"]
    assert found["usage_completion_tokens_total",] == plain["completion_tokens"] + usage["completion_tokens"]
    assert found["steered_tokens_total",] == usage["completion_tokens"]
    assert sum(value for key, value in found.items() if key[0] == "turns_total") == 3
    for name in ("first_token_seconds", "turn_seconds", "dose"):
        assert found[f"{name}_count",] == found[f"{name}_bucket", "+Inf"] == 3
    assert 0 < found["first_token_seconds_sum",] < found["turn_seconds_sum",] < 30
    # low is half of medium, and medium is a dose of 2 here
    assert found["dose_sum",] == pytest.approx(2.0, abs=1e-3)
    assert found["dose_bucket", "0.0"] == found["dose_bucket", "0.6"] == 1 and found["dose_bucket", "2.0"] == 3
    assert not [key for key in found if key[0] in ("guard_rejects_total", "turns_marked_total", "retries_total")]


def test_requests_are_counted_by_route_and_never_by_what_was_sent(keyed: httpx.Client) -> None:
    """Label values are bounded: an unknown path or a refusal is one of a kind. Reading metrics changes none."""
    key = {"API-Key": "key-one"}
    keyed.headers.update(key)
    try:
        before = samples(keyed)
        for path in ("/nothing", "/nowhere/42"):
            keyed.get(path)
        keyed.request("BREW", "/v1/models")
        ask(keyed, model="gpt-4o")
        keyed.get("/v1/models", headers={"API-Key": "wrong"})
        found = counted(keyed, before, ("http_requests_total", "unmatched", "401"))
        assert {key[1:]: value for key, value in found.items() if key[0] == "http_requests_total"} == {
            ("unmatched", "404"): 2,
            ("/v1/models", "405"): 1,
            ("/v1/chat/completions", "404"): 1,
            ("unmatched", "401"): 1,
        }
        assert samples(keyed) == samples(keyed)
    finally:
        del keyed.headers["API-Key"]


def test_a_route_is_the_template_of_its_path(simulator: UserSimulator) -> None:
    """With the prefix it was included under, whatever that holds."""
    observer = Observer(simulator.engine)
    app = FastAPI()
    app.add_middleware(Requests, observer=observer)
    routes = APIRouter(prefix="/models")
    routes.get("/{name}")(lambda name: name)
    app.include_router(routes, prefix="/u/{spec}/v1")
    app.include_router(routes, prefix="/v1")
    with serving(app) as url, httpx.Client(base_url=url) as client:
        for path in (
            "/u/impatience-high+skeptical-1/v1/models/a",
            "/u/%C3%A4/v1/models/b",
            "/v1/models/c",
            "/v1/models",
        ):
            client.get(path)
    text = generate_latest(observer.registry).decode()
    found = [family for family in text_string_to_metric_families(text) if family.name == "traitbasis_http_requests"]
    assert {sample.labels["route"]: sample.value for sample in found[0].samples if sample.name.endswith("total")} == {
        "/u/{spec}/v1/models/{name}": 2,
        "/v1/models/{name}": 1,
        "unmatched": 1,
    }


def test_guards_retries_and_marked_turns_are_counted_and_logged(lm: LanguageModel, log: Lines) -> None:
    """A scripted engine: one turn is empty twice, the other every time."""
    engine = ScriptedEngine("", "", "My order is late.", "")
    with (
        UserSimulator(lm, random_basis(lm, "impatience"), engine=engine) as simulator,
        client_of(simulator) as client,
    ):
        before = samples(client)
        made = [ask(client).json()["traitbasis"] for _ in range(2)]
        found = counted(client, before, ("http_requests_total", "/v1/chat/completions", "200"), 2)
    (guard,) = made[0]["rejected"]
    assert [turn["tries"] for turn in made] == [3, 4] and made[1]["failed_guard"] == guard
    assert found["guard_rejects_total", guard] == 2 + 4
    assert found["retries_total",] == 2 + 3
    assert found["turns_marked_total", guard] == 1
    first, second = log.json(2)
    assert (first["tries"], first["rejected"], "failed_guards" in first) == (3, {guard: 2}, False)
    assert (second["tries"], second["rejected"], second["failed_guards"]) == (4, {guard: 4}, [guard])


def test_a_failure_in_mid_stream_is_counted_and_logged(lm: LanguageModel, log: Lines) -> None:
    """Its status was 200 already."""
    engine = ScriptedEngine(Script(["My order"], fails=ZeroDivisionError()))
    with (
        UserSimulator(lm, random_basis(lm, "impatience"), engine=engine, guards=()) as simulator,
        client_of(simulator) as client,
    ):
        assert '"server_error"' in ask(client, stream=True).text
        assert samples(client)["turns_total", "failed"] == 1
    assert {line.get("error") for line in log.json(2)} == {None, "ZeroDivisionError"}


# --- probes ---


def test_ready_says_why_not_and_health_stays(lm: LanguageModel) -> None:
    engine = TransformersEngine(lm)
    simulator = UserSimulator(lm, random_basis(lm, "impatience"), engine=engine)
    app = create_app(simulator)
    with serving(app) as url, httpx.Client(base_url=url) as client:
        assert client.get("/ready").json() == {"status": "ready"}
        app.state.readiness.stopping = True
        response = client.get("/ready")
        assert "shutting down" in error_of(response, 503)["message"] and response.headers["retry-after"] == "1"
        app.state.readiness.stopping = False
        engine.close()
        assert "engine has stopped" in error_of(client.get("/ready"), 503)["message"]
        response = ask(client)
        assert error_of(response, 503)["code"] == "shutting_down" and response.headers["retry-after"] == "1"
        assert client.get("/health").json()["status"] == "ok"


# --- stopping ---


@pytest.fixture(scope="module")
def folder(lm: LanguageModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the tiny model and a basis for it."""
    path = tmp_path_factory.mktemp("serve")
    save_folder(lm, path / "tiny-llama")
    saved = replace(lm, name="tiny-llama") if lm.name != "tiny-llama" else lm
    random_basis(saved, "impatience").save(path / "basis.safetensors")
    return path


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_a_server_told_to_stop_finishes_its_turns_and_exits_with_0(folder: Path) -> None:
    """A real process: SIGTERM in mid-stream; newcomers are refused, the stream ends as any does."""
    port = free_port()
    (folder / "keys.txt").write_text("sk-1\n")
    command = [sys.executable, "-m", "traitbasis.cli", "serve", "--model", folder / "tiny-llama", "--port", str(port)]
    command += ["--basis", folder / "basis.safetensors", "--api-keys", folder / "keys.txt", "--no-guards"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    body = {"model": "steered-user", "messages": MESSAGES, **ENDLESS, "max_tokens": 600}
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", headers={"API-Key": "sk-1"}, timeout=60) as client:
            deadline = time.monotonic() + 120
            while True:
                try:
                    assert client.get("/ready").status_code == 200
                    break
                except httpx.TransportError:
                    assert server.poll() is None and time.monotonic() < deadline
                    time.sleep(0.1)
            with client.stream("POST", "/v1/chat/completions", json=body) as response:
                lines = response.iter_lines()
                events = [next(lines) for _ in range(6)]
                server.send_signal(signal.SIGTERM)
                time.sleep(0.3)
                with pytest.raises(httpx.ConnectError):
                    httpx.get(f"http://127.0.0.1:{port}/health")
                events += list(lines)
        output, errors = server.communicate(timeout=60)
    finally:
        server.kill()
    events = [event for event in events if event]
    assert events[-1] == "data: [DONE]"
    assert json.loads(events[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
    assert server.returncode == 0, errors
    assert "Traceback" not in errors + output
    lines = [json.loads(line) for line in output.splitlines()]
    (request,) = [line for line in lines if line["message"] == "request"]
    assert request["status"] == 200 and request["tokens_out"] == 600 and "disconnected" not in request
    assert "sk-1" not in output + errors and SECRET not in output + errors


def test_turns_that_take_longer_than_they_are_given_end_with_an_error(simulator: UserSimulator) -> None:
    """In this process: what runs is told so in its stream, what waits gets 503, and ready says why."""
    engine = TransformersEngine(simulator.lm, max_batch=1)
    slow = UserSimulator(simulator.lm, simulator.basis, engine=engine, guards=())
    hook = simulator.lm.model.register_forward_pre_hook(lambda *_: time.sleep(0.01))
    port = free_port()
    server = Server(create_app(slow), engine.close, host="127.0.0.1", port=port, shutdown_seconds=1)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as client, ThreadPoolExecutor(2) as pool:
            runs = pool.submit(ask, client, **ENDLESS)
            while not engine.stats().running:
                time.sleep(0.01)
            waits = pool.submit(ask, client, **{**ENDLESS, "stream": False})
            while not engine.stats().waiting:
                time.sleep(0.01)
            began = time.monotonic()
            server.handle_exit(signal.SIGTERM, None)
            *_, error, done = runs.result(30).text.strip().split("\n\n")
            assert 0.9 < time.monotonic() - began < 5
            assert json.loads(error.removeprefix("data: "))["error"]["code"] == "shutting_down"
            assert done == "data: [DONE]"
            assert error_of(waits.result(30), 503)["code"] == "shutting_down"
        thread.join(10)
        assert not thread.is_alive()
    finally:
        hook.remove()
        server.force_exit = server.should_exit = True
        thread.join(10)
        slow.close()
        gc.unfreeze()  # the server has put all there was out of the collector's sight


# --- the command ---


@pytest.fixture
def untouched_logging() -> Iterator[None]:
    """`serve` sends the log of the whole process to its own standard output."""
    root = logging.getLogger()
    before = root.handlers[:], root.level, [logging.getLogger(name).level for name in ("traitbasis", "uvicorn")]
    yield
    root.handlers[:], root.level, (ours, uvicorns) = before
    logging.getLogger("traitbasis").setLevel(ours)
    logging.getLogger("uvicorn").setLevel(uvicorns)


def start(*arguments: str | Path) -> Any:
    return CliRunner().invoke(cli.app, ["serve", "--model", "./gone", *map(str, arguments)], env={"COLUMNS": "300"})


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--api-keys", "gone.txt"], ["--api-keys gone.txt", "No such file"]),
        (["--cors-origin", "example.com"], ["--cors-origin 'example.com'", "https://example.com"]),
        (["--cors-origin", "https://example.com/"], ["--cors-origin 'https://example.com/'"]),
        (["--host", "203.0.113.1"], ["203.0.113.1:8000", "--host"]),
    ],
)
def test_what_is_wrong_is_said_before_a_model_is_loaded(arguments: list[str], words: list[str]) -> None:
    error = start("--port", "0" if "--host" not in arguments else "8000", *arguments).exception
    assert isinstance(error, TraitBasisError) and all(word in str(error) for word in words), error
    assert "\n" not in str(error)


@pytest.mark.usefixtures("untouched_logging")
def test_serving_others_without_keys_is_warned_of(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("k")
    for arguments, warned in (
        (["--host", "0.0.0.0"], True),
        (["--host", "0.0.0.0", "--api-keys", tmp_path / "keys"], False),
        (["--host", "127.0.0.1"], False),
        (["--host", "localhost"], False),
    ):
        output = start("--port", "0", *arguments).output
        assert ("no API keys" in output and "--api-keys" in output) is warned, output


# --- CORS ---

PREFLIGHT = {
    "Origin": "https://page.example",
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization, content-type, x-stainless-lang",
}


def test_pages_of_others_may_not_ask_unless_that_is_set(client: httpx.Client) -> None:
    headers = client.get("/v1/models", headers={"Origin": "https://page.example"}).headers
    assert not [name for name in headers if name.startswith("access-control")]
    error_of(client.options("/v1/chat/completions", headers=PREFLIGHT), 405)


def test_pages_of_a_set_origin_may_ask_with_a_key(keyed: httpx.Client) -> None:
    """A preflight brings no key; a refusal can be read by the page, too."""
    allowed = keyed.options("/v1/chat/completions", headers=PREFLIGHT)
    assert allowed.status_code == 200
    assert allowed.headers["access-control-allow-origin"] == "https://page.example"
    assert "authorization" in allowed.headers["access-control-allow-headers"]
    origin = {"Origin": "https://page.example"}
    for response in (ask(keyed, {**origin, "API-Key": "key-one"}), ask(keyed, origin)):
        assert response.headers["access-control-allow-origin"] == "https://page.example"
        assert "X-Request-ID" in response.headers["access-control-expose-headers"]
    other = keyed.options("/v1/chat/completions", headers={**PREFLIGHT, "Origin": "https://evil.example"})
    assert other.status_code == 400 and "access-control-allow-origin" not in other.headers


# --- overload and failures ---


class CrowdedEngine(ScriptedEngine):
    """Says that so many wait."""

    def __init__(self, waiting: int) -> None:
        super().__init__("Late!")
        self._waiting_now = waiting

    def stats(self) -> EngineStats:
        return EngineStats(max_batch=4, max_queue=256, max_context=None, waiting=self._waiting_now)


@pytest.mark.parametrize(
    ("waiting", "seconds", "expected"), [(0, 1, 1), (4, 1, 1), (80, 1, 10), (80, 0.1, 1), (256, 9, 30)]
)
def test_retry_after_is_when_half_of_the_queue_has_begun(
    lm: LanguageModel, waiting: int, seconds: float, expected: int
) -> None:
    with UserSimulator(lm, random_basis(lm, "impatience"), engine=CrowdedEngine(waiting)) as simulator:
        observer = create_app(simulator).state.observer
        observer._turn_seconds = seconds
        assert observer.retry_after() == expected


def test_a_full_queue_refuses_and_loses_nobody_who_waits(lm: LanguageModel) -> None:
    """1.5.7, over HTTP with the real engine held in its first step: two wait, the others are told when to come."""
    engine = TransformersEngine(lm, max_batch=1, max_queue=2)
    with (
        UserSimulator(lm, random_basis(lm, "impatience"), engine=engine, guards=()) as simulator,
        client_of(simulator) as client,
        ThreadPoolExecutor(2) as pool,
    ):
        with Gate(engine):
            waiting = [pool.submit(ask, client, seed=seed, max_tokens=3) for seed in range(2)]
            deadline = time.monotonic() + 10
            while engine.stats().waiting < 2 and time.monotonic() < deadline:
                time.sleep(0.01)
            for stream in (False, True):
                response = ask(client, stream=stream)
                assert error_of(response, 429)["code"] == "engine_busy"
                assert int(response.headers["retry-after"]) >= 1
        assert [future.result().status_code for future in waiting] == [200, 200]
        assert samples(client)["http_requests_total", "/v1/chat/completions", "429"] == 2


def test_a_request_that_fails_fails_alone(lm: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contract 3, over HTTP: one row of the running batch stops being finite; the others answer as they do alone."""
    engine = TransformersEngine(lm)
    with (
        UserSimulator(lm, random_basis(lm, "impatience"), engine=engine, guards=()) as simulator,
        client_of(simulator) as client,
        ThreadPoolExecutor(5) as pool,
    ):
        bodies = [{"seed": seed, "temperature": 1, "traits": {"impatience": seed / 2}} for seed in range(4)]
        alone = [ask(client, **body).json()["choices"] for body in bodies]
        prepare = simulator.prepare

        def spoil(messages: Any, traits: Any = None, **options: Any) -> PreparedTurn:
            turn = prepare(messages, traits, **options)
            if options["seed"] != 99:
                return turn
            return replace(turn, request=replace(turn.request, additions={1: torch.full((WIDTH,), torch.inf)}))

        monkeypatch.setattr(simulator, "prepare", spoil)
        with Gate(engine):  # so that all are there before any begins
            asked = [pool.submit(ask, client, **body) for body in (*bodies[:2], {"seed": 99}, *bodies[2:])]
            deadline = time.monotonic() + 10
            while engine.stats().waiting < 5 and time.monotonic() < deadline:
                time.sleep(0.01)
        responses = [future.result() for future in asked]
        assert error_of(responses.pop(2), 500)["type"] == "server_error"
        assert [response.json()["choices"] for response in responses] == alone


# --- what the server says of itself ---


def operations(document: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for path, methods in document["paths"].items():
        for operation in methods.values():
            yield path, operation


def test_the_openapi_document_says_how_every_route_fails(client: httpx.Client) -> None:
    """Statuses that are sent and no others, all in one shape."""
    document = client.get("/openapi.json").json()
    assert document["info"]["title"] == "TraitBasis" and document["info"]["version"].count(".") == 2
    tags = {tag["name"] for tag in document["tags"]}
    seen: set[str] = set()
    for path, operation in operations(document):
        seen.add(path)
        assert operation["tags"] and set(operation["tags"]) <= tags, path
        assert {"200", "400", "401", "429", "4XX", "5XX"} <= operation["responses"].keys(), path
        assert ("422" in operation["responses"]) is (path == "/steer_batch"), path  # whose client knows no other
        for status in operation["responses"].keys() - {"200"}:
            ((kind, content),) = operation["responses"][status]["content"].items()
            assert kind == "application/json" and content["schema"]["$ref"].endswith("/ErrorBody"), path
        declared = {parameter["name"] for parameter in operation.get("parameters", ()) if parameter["in"] == "path"}
        assert declared == set(re.findall("{([^}]+)}", path)), path
        kinds = {"text/plain"} if path == "/metrics" else {"application/json"}
        kinds |= {"text/event-stream"} if path.endswith("/completions") else set()
        assert operation["responses"]["200"]["content"].keys() == kinds, path
    assert {"/v1/chat/completions", "/steer_tau", "/metrics", "/health", "/ready"} <= seen
    assert "HTTPValidationError" not in document["components"]["schemas"]
    assert "securitySchemes" not in document["components"]


def test_the_openapi_document_says_what_needs_a_key(keyed: httpx.Client) -> None:
    """Either header will do, and what the document calls open is."""
    document = keyed.get("/openapi.json").json()
    schemes = document["components"]["securitySchemes"]
    assert {(scheme["type"], scheme.get("scheme") or scheme["name"]) for scheme in schemes.values()} == {
        ("http", "bearer"),
        ("apiKey", "API-Key"),
    }
    for path, operation in operations(document):
        needs = operation.get("security", [])
        assert sorted(map(sorted, needs)) in ([], sorted([name] for name in schemes)), "either, not both"
        if "get" in document["paths"][path] and "{" not in path:
            assert keyed.get(path).status_code == (401 if needs else 200), path


def test_methods_and_paths_that_do_not_exist_are_openai_errors(client: httpx.Client) -> None:
    for method, path, status in (
        ("GET", "/nothing", 404),
        ("DELETE", "/v1/models", 405),
        ("OPTIONS", "/v1/models", 405),
        ("GET", "/v1/chat/completions", 405),
        ("PUT", "/health", 405),
        ("POST", "/ready", 405),
    ):
        error_of(response := client.request(method, path), status)
        assert status == 404 or response.headers["allow"]
    assert client.head("/nothing").status_code == 404
    assert client.head("/v1/chat/completions").status_code == 405


def test_settings_name_everything_that_can_be_refused() -> None:
    """The defaults leave room for the longest episodes that harnesses play: 200 turns and more."""
    limits = Limits()
    limits.check_messages([{}] * 800)
    assert limits.max_tokens(2048, 96) == 2048 and limits.max_tokens(None, 96) == 96
    assert limits.body_bytes >= 2**20
