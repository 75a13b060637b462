"""Models behind URLs: whatever comes back there is a completion that can be used, or one error that says what to do."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from harnesses.wire import ScriptedAgent, listening

from traitbasis.collect import Customer, EndpointAgent, collect, open_dialogues
from traitbasis.collect import ScriptedAgent as Scripted
from traitbasis.dialogue_tasks import DialogueTask
from traitbasis.dialogues import read_dialogues
from traitbasis.errors import EvaluationError, HarnessError
from traitbasis.harness.published import User
from traitbasis.metrics.judge import JudgeModel
from traitbasis.remote import RemoteModel, Threads, without_password

SECRET = "sk-secret-0123456789"
TASK = DialogueTask(
    id="lamp",
    domain="lamps",
    company="Lamp House",
    instruction="You are a customer of Lamp House. You bought lamp W1.",
    facts={"order number": "W1"},
    agent=("Lamp House, hello?", "What is your order number?", "Done: W1 is sent."),
    resolved=2,
)


class Raw(ScriptedAgent):
    """Answers with bytes, whatever it is asked."""

    status, content = 200, b""

    def answer(self, path: str, headers: dict[str, str], body: bytes | None) -> tuple[int, bytes]:
        self.asked.append({"headers": headers, "body": json.loads(body or b"null")})
        return self.status, self.content


@pytest.fixture(scope="module")
def served() -> Iterator[Raw]:
    with listening(raw := Raw()):
        yield raw


@pytest.fixture
def raw(served: Raw, monkeypatch: pytest.MonkeyPatch) -> Raw:
    monkeypatch.setattr(served, "status", 200)
    served.asked.clear()
    return served


def completion(message: Any = None, **more: Any) -> dict[str, Any]:
    message = {"role": "assistant", "content": "Hello."} if message is None else message
    choices = [{"index": 0, "message": message, "finish_reason": "stop"}]
    return {"id": "1", "object": "chat.completion", "created": 1, "model": "m", "choices": choices, **more}


NO_COMPLETIONS = [
    b"",
    b"<html>It works!</html>",
    b'"hello"',
    b"[]",
    b"null",
    b"{}",
    b'{"choices": null}',
    b'{"choices": []}',
    b'{"choices": [null]}',
    b'{"choices": [{}]}',
    b'{"choices": "hello"}',
    b'{"choices": {"message": "hello"}}',
    *(json.dumps(completion(message)).encode() for message in ("hello", [], {"content": ["Hello."]}, {"content": 7})),
    b"{" + b'"a": {' * 20_000,
    b"\xff\xfe\x00",
]


@pytest.mark.parametrize("content", NO_COMPLETIONS, ids=range(len(NO_COMPLETIONS)))
def test_what_is_no_completion_is_one_error(raw: Raw, content: bytes) -> None:
    raw.content = content
    with RemoteModel(f"{raw.url}/v1", retries=0) as remote, pytest.raises(EvaluationError, match="no chat completion"):
        remote.complete("m", messages=[])


@pytest.mark.parametrize("usage", [None, {}, {"prompt_tokens": None, "completion_tokens": None}, {"prompt_tokens": 3}])
def test_tokens_that_nobody_counted_are_no_tokens(raw: Raw, usage: Any, tmp_path: Path) -> None:
    """A dialogue is kept with what is known of it; totals have what was counted."""
    raw.content = json.dumps(completion(usage=usage)).encode()
    with RemoteModel(f"{raw.url}/v1", retries=0) as remote:
        assert remote.complete("m", messages=[]).usage is None
        _collected(tmp_path / "a.jsonl", remote)
    _, (dialogue,) = read_dialogues([tmp_path / "a.jsonl"])
    assert not any("usage" in turn.made_by for turn in dialogue.turns)


def test_half_a_surrogate_pair_does_not_end_a_dialogue(raw: Raw, tmp_path: Path) -> None:
    """What a model said is sent back to it with the next turn."""
    raw.content = b'{"choices": [{"message": {"content": "Hi \\ud83d", "role": "assistant"}, "finish_reason": "stop"}]}'
    with RemoteModel(f"{raw.url}/v1", retries=0) as remote:
        _collected(tmp_path / "a.jsonl", remote)
    _, (dialogue,) = read_dialogues([tmp_path / "a.jsonl"])
    assert dialogue.said == ("Hi ?", "Hi ?")


def test_half_a_surrogate_pair_is_sent_as_a_character(raw: Raw) -> None:
    """A benchmark's own turns may have one."""
    raw.content = json.dumps(completion()).encode()
    with RemoteModel(f"{raw.url}/v1", retries=0) as remote:
        remote.complete("m", messages=[{"role": "user", "content": "Hi \ud83d"}])
    assert raw.asked[0]["body"]["messages"] == [{"role": "user", "content": "Hi ?"}]


@pytest.mark.parametrize("status", [400, 401, 403, 404, 409, 422, 429, 500, 503])
def test_no_error_tells_a_key_or_a_password(raw: Raw, status: int) -> None:
    raw.status, raw.content = status, json.dumps({"error": {"message": f"the key {SECRET} is no good"}}).encode()
    url = raw.url.replace("http://", "http://me:pass@word@") + "/v1"
    with RemoteModel(url, SECRET, retries=0) as remote, pytest.raises(EvaluationError) as caught:
        remote.complete("m", messages=[])
    assert str(status) in str(caught.value) or status == 404
    assert SECRET not in str(caught.value) and "word" not in str(caught.value)
    with pytest.raises(HarnessError) as refused:
        User(url.replace("me:pass@word@", ""), key=SECRET).probe({"unsteered": {}})
    assert "is refused" in str(refused.value) and SECRET not in str(refused.value)


@pytest.mark.parametrize("key", [f"{SECRET}\r\n", f" {SECRET}"])
def test_a_key_from_a_file_may_end_in_a_line_break(raw: Raw, key: str) -> None:
    raw.content = json.dumps(completion()).encode()
    with RemoteModel(f"{raw.url}/v1", key, retries=0) as remote:
        remote.complete("m", messages=[])
    assert raw.asked[0]["headers"]["authorization"] == f"Bearer {SECRET}"


def test_a_key_that_no_request_can_carry_is_refused_and_not_told() -> None:
    for key in (f"{SECRET}\n{SECRET}", f"{SECRET}é"):
        with pytest.raises(EvaluationError, match="API key has characters") as caught:
            RemoteModel("http://localhost/v1", key)
        assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    "url", ["", "localhost:8000", "http:///v1", "http://[bad/v1", "http://host:abc", "http://a\0b"]
)
def test_what_is_no_url_is_refused_at_once(url: str) -> None:
    with pytest.raises(EvaluationError, match="must be a base URL"):
        RemoteModel(url)


def test_a_password_may_hold_an_at_sign() -> None:
    assert without_password("--url http://me:p@ss@host/v1?to=a@b c@d") == "--url http://host/v1?to=a@b c@d"
    assert JudgeModel("http://me:p@ss@host/v1", "m").url == "http://host/v1"


# --- a probe of the user, by urllib ---


@pytest.mark.parametrize("content", [b"", b"<html>", b"[]", b"{}", b'{"detail": "ok"}', b'{"choices": []}'])
def test_a_probe_wants_a_completion(raw: Raw, content: bytes) -> None:
    raw.content = content
    with pytest.raises(HarnessError, match="no simulated user answers"):
        User(raw.url).probe({"unsteered": {}})


@pytest.mark.parametrize("told", ["text", [1], 5, None, {"traits": 5}])
def test_a_probe_takes_what_strangers_say_of_themselves_for_nothing(raw: Raw, told: Any) -> None:
    raw.content = json.dumps(completion(traitbasis=told, traits=told, details=told)).encode()
    assert User(raw.url).probe({"unsteered": {}})["url"] == raw.url
    with pytest.raises(HarnessError, match="--traits"):
        User(raw.url).traits()


@pytest.mark.parametrize("banner", [b"SSH-2.0-OpenSSH_9.6\r\n", b"", b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{"])
def test_a_port_that_speaks_something_else_is_named(banner: bytes) -> None:
    with _answering(banner) as url:
        with pytest.raises(HarnessError, match="no simulated user answers"):
            User(url).probe({"unsteered": {}})
        with RemoteModel(f"{url}/v1", retries=0) as remote, pytest.raises(EvaluationError, match="cannot be reached"):
            remote.complete("m", messages=[])


# --- side by side ---


def test_calls_run_side_by_side_and_an_error_begins_no_more() -> None:
    barrier = threading.Barrier(2, timeout=5)
    with Threads(2) as pool:
        both = [pool.submit(barrier.wait) for _ in range(2)]
    assert sorted(future.result() for future in both) == [0, 1]
    ran = list[None]()
    with pytest.raises(ZeroDivisionError), Threads(1) as pool:
        first = pool.submit(lambda: 1 // 0)
        rest = [pool.submit(lambda: ran.append(time.sleep(0.05))) for _ in range(9)]
        first.result()
    assert all(future.done() for future in rest) and len(ran) < 9


SLOW = """
import sys, threading
from pathlib import Path
sys.path.insert(0, sys.argv[3])
from test_remote import TASK, _collected
from traitbasis.metrics.judge import JudgeModel
from traitbasis.remote import RemoteModel
if sys.argv[1] == "collect":
    _collected(Path(sys.argv[4]) / "a.jsonl", RemoteModel(sys.argv[2]))
if sys.argv[1] == "rephrase":
    from traitbasis.rephrase import RemoteWriter, rephrase_file
    from traitbasis.static_turns import Record
    records = [Record({"messages": [{"role": "user", "content": "Move it."}] * 50}, "messages", i) for i in range(3)]
    rephrase_file(RemoteWriter(RemoteModel(sys.argv[2]), "m-{spec}", "off"), records, Path(sys.argv[4]) / "a.jsonl")
if sys.argv[1] == "judge":
    JudgeModel(sys.argv[2], "m").ask(["?"] * 9, lambda answer, cut: answer)
"""


@pytest.mark.parametrize("what", ["collect", "judge", "rephrase"])
def test_ctrl_c_waits_for_no_slow_endpoint(what: str, tmp_path: Path) -> None:
    """The endpoint would answer after a minute."""
    asked, free = threading.Event(), threading.Event()

    class Slow(Raw):
        def answer(self, path: str, headers: dict[str, str], body: bytes | None) -> tuple[int, bytes]:
            if what != "collect" or len(self.asked) > 1:  # the first turn only opens the file
                asked.set()
                free.wait(60)
            self.asked.append({})
            return 200, json.dumps(completion()).encode()

    with listening(slow := Slow()):
        command = [sys.executable, "-c", SLOW, what, f"{slow.url}/v1", str(Path(__file__).parent), str(tmp_path)]
        process = subprocess.Popen(command, stderr=subprocess.PIPE)
        assert asked.wait(60), process.stderr and process.stderr.read()
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        begun = time.monotonic()
        process.wait(30)
        free.set()
        assert time.monotonic() - begun < 10 and process.returncode


def test_two_runs_do_not_collect_into_one_file(raw: Raw, tmp_path: Path) -> None:
    """Both would hold every dialogue, and each would be counted twice."""
    path, errors = tmp_path / "a.jsonl", list[str]()
    raw.content = json.dumps(completion()).encode()

    def again(turns: int) -> None:
        if not errors:
            errors.append("")
            with pytest.raises(EvaluationError, match="another run is writing"):
                _collected(path, RemoteModel(f"{raw.url}/v1"))
            errors.append("refused")

    _collected(path, RemoteModel(f"{raw.url}/v1"), progress=again)
    assert errors == ["", "refused"] and len(read_dialogues([path])[1]) == 1
    _collected(path, RemoteModel(f"{raw.url}/v1"))
    assert len(read_dialogues([path])[1]) == 1


def test_what_another_run_has_added_meanwhile_is_not_held_again(raw: Raw, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    raw.content = json.dumps(completion()).encode()
    with RemoteModel(f"{raw.url}/v1") as remote:
        customer, agent = Customer("steered", remote), Scripted()
        file = open_dialogues(path, customer, [TASK], [{}], agent=agent, turns=2)
        _collected(path, remote)
        collect(file, customer, [TASK], [{}], agent=agent)
    assert len(read_dialogues([path])[1]) == len(file.dialogues) == 1


def test_an_agent_that_is_no_completion_is_named(raw: Raw, tmp_path: Path) -> None:
    raw.content = b'{"choices": [{}]}'
    other = RemoteModel(f"{raw.url}/v1", what="the agent", retries=0)
    with pytest.raises(EvaluationError, match=r"the agent at .* no chat completion"):
        EndpointAgent(other, "m").next(TASK, [*_turns()], 0)


def _turns() -> Iterator[Any]:
    from traitbasis.dialogues import DialogueTurn

    yield DialogueTurn("agent", "Hello?")
    yield DialogueTurn("customer", "Hi.")


def _collected(path: Path, remote: RemoteModel, **more: Any) -> None:
    customer, agent = Customer("steered", remote), Scripted()
    file = open_dialogues(path, customer, [TASK], [{}], agent=agent, turns=2)
    collect(file, customer, [TASK], [{}], agent=agent, **more)


@contextmanager
def _answering(banner: bytes) -> Iterator[str]:
    """A port that says something to whoever comes, and hangs up."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            while True:
                try:
                    caller, _ = server.accept()
                except OSError:
                    return
                with caller:
                    caller.recv(65536)
                    caller.sendall(banner)

        threading.Thread(target=answer, daemon=True).start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
        os.close(server.detach())
