"""What every answer must be, whatever was asked."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import jsonschema
from served import SECONDS, Reply

FINISHES = {"stop", "length", "tool_calls"}


def refused(reply: Reply) -> bool:
    """Whether an answer is a refusal; then it is a proper one: in OpenAI's shape, and with words."""
    assert reply.seconds < SECONDS, f"it took {reply.seconds:.0f} s"
    if reply.status == 200:
        body = events(reply)[-1] if is_stream(reply) else {}  # a refusal may come when the status line is out
        if "error" not in body:
            return False
    else:
        body = reply.json()
        assert reply.status in {400, 404} or (reply.status, body["error"]["code"]) == (422, "invalid_traits"), body
    check_error(body)
    return True


def check_error(body: Any) -> None:
    """In OpenAI's shape, and of a kind that asking again does not mend."""
    assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}, body
    assert body["error"]["message"].strip() and body["error"]["type"] == "invalid_request_error", body
    assert all(isinstance(body["error"][name], str | None) for name in ("param", "code")), body


def check_chat(reply: Reply, body: dict[str, Any]) -> None:
    """A 200 of ``/chat/completions``, whole or streamed."""
    answer = _chat(reply, body)
    _check_head(answer, body, 1)
    wanted = _wanted_schema(body)
    for choice in answer["choices"]:
        message = choice["message"]
        calls = message.get("tool_calls")
        assert message["role"] == "assistant" and choice["finish_reason"] in FINISHES, choice
        assert "reasoning_content" not in message
        if calls:
            assert message["content"] is None and choice["finish_reason"] == "tool_calls", choice
            for call in calls:
                assert call["id"] and call["type"] == "function" and call["function"]["name"], call
                assert isinstance(json.loads(call["function"]["arguments"]), dict), call
            continue
        assert choice["finish_reason"] != "tool_calls" and "tool_calls" not in message, choice
        assert isinstance(message["content"], str) and message["content"].strip(), f"no content: {answer}"
        if wanted is None:
            _check_text(message["content"], body)
        else:
            said = json.loads(message["content"])
            with suppress(jsonschema.SchemaError):  # what is no schema is read as far as it goes
                jsonschema.validate(said, wanted)
        if logprobs := choice.get("logprobs"):
            assert all(entry["logprob"] <= 0 for entry in logprobs["content"]), choice


def chat_said(reply: Reply, body: dict[str, Any]) -> list[Any]:
    """The choices of a 200, without log-probabilities, whose last digits depend on the batch."""
    return [{**choice, "logprobs": None} for choice in _chat(reply, body)["choices"]]


def _chat(reply: Reply, body: dict[str, Any]) -> dict[str, Any]:
    return _streamed_chat(reply, body) if is_stream(reply) else reply.json()


def _check_text(text: str, body: dict[str, Any]) -> None:
    """A user's turn, unless its prompt asked for JSON in words."""
    if text.startswith("{"):
        return
    assert not any(mark in text for mark in ("<|", "<think>", "\ufffd")), text
    stops = body.get("stop") or []
    found = [stop for stop in ([stops] if isinstance(stops, str) else stops) if stop in text]
    assert not found or text == "...", (text, found)


def check_completion(reply: Reply, body: dict[str, Any]) -> None:
    """A 200 of ``/completions``. Its text may be empty: a text may be at its end already."""
    prompt = body["prompt"]
    prompts = len(prompt) if isinstance(prompt, list) and isinstance(prompt[0], list | str) else 1
    answer = _streamed_completion(reply, body) if is_stream(reply) else reply.json()
    _check_head(answer, body, prompts)
    for choice in answer["choices"]:
        assert isinstance(choice["text"], str) and choice["finish_reason"] in {"stop", "length"}, choice
        assert not body.get("echo") or choice["text"], choice
        if logprobs := choice["logprobs"]:
            names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
            assert len({len(logprobs[name]) for name in names}) == 1, choice


def check_steering(reply: Reply, body: Any) -> None:
    """A 200 of the ``/steer_…`` endpoints: as many texts as conversations."""
    answer = reply.json()
    texts = answer["responses"] if isinstance(body, list) else [answer["response"]]
    assert len(texts) == (len(body) if isinstance(body, list) else 1), answer
    assert all(isinstance(text, str) and text.strip() for text in texts), answer
    _printable(answer)


def check_promptfoo(reply: Reply, body: dict[str, Any]) -> None:
    """A 200 of ``/promptfoo``."""
    answer = reply.json()
    used = answer["tokenUsage"]
    assert answer["result"].strip() and used["total"] == used["prompt"] + used["completion"] > 0, answer
    _printable(answer)


def events(reply: Reply) -> list[dict[str, Any]]:
    """Of a stream, which ended as it should. Only the last one may be an error."""
    *lines, end = [line for line in reply.text.split("\n\n") if line]
    assert end == "data: [DONE]", f"the stream ends with {end[:200]!r}"
    found: list[dict[str, Any]] = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert found and not any("error" in event for event in found[:-1]), found
    return found


def is_stream(reply: Reply) -> bool:
    return reply.headers["content-type"].startswith("text/event-stream")


def _check_head(answer: dict[str, Any], body: dict[str, Any], prompts: int) -> None:
    _printable({**answer, "model": ""})  # which comes back as it was sent
    choices = prompts * (body.get("n") or 1)
    assert [choice["index"] for choice in answer["choices"]] == list(range(choices)), answer
    assert answer["model"] == body["model"] and answer["id"] and answer["system_fingerprint"], answer
    usage = answer["usage"]
    if usage is not None:
        assert all(type(count) is int and count >= 0 for count in usage.values()), usage
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"] > 0, usage


def _printable(answer: Any) -> None:
    """Half of a surrogate pair comes as an escape, and ends in an error in the client."""
    json.dumps(answer, ensure_ascii=False).encode()


def _wanted_schema(body: dict[str, Any]) -> Any:
    form = body.get("response_format") or {}
    if form.get("type") == "json_object":
        return {"type": "object"}
    return form["json_schema"]["schema"] if form.get("type") == "json_schema" else None


def _streamed(reply: Reply, body: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The answer's head, and its choices as they came."""
    found = events(reply)
    asked = (body.get("stream_options") or {}).get("include_usage")
    usage = found.pop()["usage"] if asked else None
    assert all(len(event["choices"]) == 1 for event in found) and not any("usage" in event for event in found)
    assert len({(event["id"], event["model"]) for event in found}) == 1
    return {**found[0], "usage": usage, "choices": []}, [event["choices"][0] for event in found]


def _streamed_chat(reply: Reply, body: dict[str, Any]) -> dict[str, Any]:
    answer, pieces = _streamed(reply, body)
    for index in sorted({piece["index"] for piece in pieces}):
        own = [piece for piece in pieces if piece["index"] == index]
        deltas = [piece["delta"] for piece in own]
        assert [delta.get("role") for delta in deltas] == ["assistant", *[None] * (len(deltas) - 1)], own
        ends = [piece["finish_reason"] for piece in own]
        assert ends[-1] and not any(ends[:-1]), own
        calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
        text = "".join(delta.get("content") or "" for delta in deltas)
        assert not (calls and text), own
        message = {"role": "assistant", "content": None if calls else text, **({"tool_calls": calls} if calls else {})}
        choice = {"index": index, "message": message, "finish_reason": ends[-1], "logprobs": own[-1]["logprobs"]}
        answer["choices"].append(choice)
    return answer


def _streamed_completion(reply: Reply, body: dict[str, Any]) -> dict[str, Any]:
    answer, pieces = _streamed(reply, body)
    for index in sorted({piece["index"] for piece in pieces}):
        own = [piece for piece in pieces if piece["index"] == index]
        ends = [piece["finish_reason"] for piece in own]
        assert ends[-1] and not any(ends[:-1]), own
        answer["choices"].append({**own[-1], "text": "".join(piece["text"] for piece in own)})
    return answer
