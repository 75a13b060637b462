"""tau-trait 0.1.1, unmodified. Its clients all call one name, ``completion``; an endpoint stands there in this process.

The user is the package's ``llm`` user with provider ``hosted_vllm``, not its ``steer`` provider: that posts to an
address written into its code, without a seed, with a fixed temperature, and what comes back carries no usage. The
prompt is the same: the package's, for every condition.
"""

from __future__ import annotations

import importlib
from importlib.metadata import version
from typing import Any

from .worker import Driver, Endpoint, Json, messages_of, serve

_STOP = "###STOP###"


class TauTrait:
    """Environments are made once a domain; ``reset`` loads an environment's data anew for each episode."""

    def __init__(self, settings: Json, agent: Endpoint, user: Endpoint) -> None:
        import tau_trait.agents.chat_react_agent
        import tau_trait.agents.tool_calling_agent
        import tau_trait.envs.user
        import tau_trait.run

        tau_trait.envs.user.completion = user
        tau_trait.agents.tool_calling_agent.completion = agent
        tau_trait.agents.chat_react_agent.completion = agent
        self._settings, self._agent, self._user = settings, agent, user
        self._environments: dict[str, Any] = {}

    def ready(self) -> Json:
        """Versions, and the tasks of the domains: their places in the package's list."""
        tasks = {domain: [str(i) for i in range(len(self._tasks(domain)))] for domain in self._settings["domains"]}
        return {"harness_version": version("tau-trait"), "litellm": version("litellm"), "tasks": tasks}

    def play(self, cell: Json) -> Json:
        self._user.begin(**cell["user"])
        environment = self._environment(cell["domain"])
        self._user.begin(**cell["user"])  # the constructor of an environment has asked for a turn, which is nobody's
        task = self._tasks(cell["domain"])[int(cell["task"])]
        result = self._agent_for(environment).solve(environment, int(cell["task"]), self._settings["max_steps"])
        messages = messages_of(result.messages)
        reward = result.info.get("reward_info")
        said = [message["text"] for message in messages if message["speaker"] == "customer"]
        ended = "max_steps" if reward is None else "user_stop" if _STOP in said[-1] else "agent"
        return {
            "reward": float(result.reward),
            "ended": ended,
            "steps": sum(message["speaker"] == "agent" for message in messages),
            "messages": messages,
            "instruction": task.instruction,
            "reference": [{"name": a.name, "arguments": a.kwargs} for a in task.actions if a.name != "respond"],
            "reward_info": reward and reward["info"],
        }

    def _environment(self, domain: str) -> Any:
        from tau_trait.envs import get_env

        if domain not in self._environments:
            split = self._settings["split"]
            self._environments[domain] = get_env(domain, "llm", "", split, "hosted_vllm", task_index=0)
        return self._environments[domain]

    def _tasks(self, domain: str) -> list[Any]:
        split = self._settings["split"]
        module = importlib.import_module(f"tau_trait.envs.{domain}.tasks_{split}")
        return list(getattr(module, f"TASKS_{split.upper()}", None) or module.TASKS)  # airline has the latter

    def _agent_for(self, environment: Any) -> Any:
        from tau_trait.run import agent_factory
        from tau_trait.types import RunConfig

        asked = self._settings["agent"]
        if asked["kind"] == "oracle":
            from .oracle import OracleAgent

            return OracleAgent(patience=asked["patience"])
        config = RunConfig(
            model=asked["model"],
            model_provider="openai",
            user_model_provider="hosted_vllm",
            agent_strategy=asked["strategy"],
        )
        agent = agent_factory(environment.tools_info, environment.wiki, config)
        agent.temperature = asked["temperature"]  # None: the model's own, for models that take no other
        return agent


def _make(settings: Json, agent: Endpoint, user: Endpoint) -> Driver:
    return TauTrait(settings, agent, user)


if __name__ == "__main__":
    serve(_make)
