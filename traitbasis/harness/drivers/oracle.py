"""The oracle: an agent that knows a task's gold actions, and fails only where its user does.

It follows tau-trait's ``Agent`` interface. Of the arguments of the gold actions, those that occur in the task's
instruction are *facts*: the customer has to say them, in any of their forms and in any message, before the oracle uses
them. What only the database knows is free to it. So what its success under a user lacks to 1 is the user's own doing:
facts withheld or changed, a stop too early, or none at all. (An estimate: it takes words as they stand, where an agent
might infer; and it asks for no items, which have no literal value in an instruction.)

It asks for what is missing one thing at a time, confirms, performs the gold actions with the environment's own tools,
says what the task wants said, and answers until the user stops. When a fact that the outcome depends on is not told in
time it hands over to a human, as an agent would. The reward is the harness's: where the gold actions change nothing,
handing over is right, too.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, NoReturn

from tau_trait.agents.base import Agent
from tau_trait.types import RESPOND_ACTION_NAME, Action, SolveResult

from .facts import Fact, facts_of, leaves, words

_READS = ("find_", "get_", "list_", "search_", "check_", "calculate", "think")
_HANDS_OVER = "transfer_to_human"
_NO_FACTS = ("calculate", "think", _HANDS_OVER)  # their arguments are the agent's own words
_ASK = (
    "Could you tell me the {}, please?",
    "I still need the {} to go on. What is it?",
    "I am sorry, but I cannot help you without the {}. Could you give it to me?",
)
_SORRY = "I am sorry, I cannot do this without what I asked you for."


class OracleAgent(Agent):  # type: ignore[misc]  # tau-trait has no types
    """patience: how often it asks for one thing."""

    def __init__(self, patience: int = 3) -> None:
        self.patience = patience

    def solve(self, env: Any, task_index: int | None = None, max_num_steps: int = 30) -> SolveResult:
        """Play one task. Raises what the environment raises."""
        episode = _Episode(env, env.reset(task_index=task_index), max_num_steps)
        with suppress(_Over):
            self._play(episode, env)
        return SolveResult(reward=episode.reward, messages=episode.messages, info=episode.info)

    def _play(self, episode: _Episode, env: Any) -> None:
        task = env.task
        identity = _identity(env, task)
        gold = [action for action in task.actions if not action.name.startswith("find_user_id_by_")]
        facts = [_facts(action, task.instruction) for action in gold]
        # What is only read changes no outcome, unless something is to be told from it.
        decides = [bool(task.outputs) or not action.name.startswith((*_READS, _HANDS_OVER)) for action in gold]
        needs = [fact for found, does in zip(facts, decides, strict=True) if does for fact in found]
        for ways in (identity, *([[fact]] for fact in dict.fromkeys(needs))):
            if not self._told(episode, ways):
                self._give_up(episode, env)
        writes = [action for action in gold if not action.name.startswith((*_READS, _HANDS_OVER))]
        if writes:
            steps = "; ".join(f"{words(action.name)} ({_plain(action.kwargs)})" for action in writes)
            episode.say(f"Let me read back what I am going to do: {steps}. Shall I go ahead?")
        for lookup in _lookups(identity, episode.heard):
            episode.do(lookup)
        for action, found in zip(gold, facts, strict=True):
            if not action.name.startswith(_HANDS_OVER) and all(fact.told(episode.heard) for fact in found):
                episode.do(action)
        answer = f" What you wanted to know: {', '.join(task.outputs)}." if task.outputs else ""
        episode.say(f"That is all done.{answer} Is there anything else?")
        for action in gold:
            if action.name.startswith(_HANDS_OVER):
                episode.do(action)
        while True:
            episode.say("Everything you asked for is done. Thank you, and goodbye.")

    def _give_up(self, episode: _Episode, env: Any) -> NoReturn:
        """To a human, where there is one; then, or else, until the end."""
        if hand_over := next((name for name in env.tools_map if name.startswith(_HANDS_OVER)), None):
            episode.say(f"{_SORRY} I hand you over to a colleague.")
            episode.do(Action(name=hand_over, kwargs={"summary": "The customer did not say what is needed."}))
        while True:
            episode.say(_SORRY)

    def _told(self, episode: _Episode, ways: list[list[Fact]]) -> bool:
        """Ask until one of the ways, each some facts, is told in full; False when patience runs out."""
        for i in range(self.patience):
            if not ways or any(_told(way, episode.heard) for way in ways):
                return True
            wanted = " or the ".join(
                " and ".join(fact.label for fact in way if not fact.told(episode.heard)) for way in ways
            )
            episode.say(_ASK[min(i, len(_ASK) - 1)].format(wanted))
        return any(_told(way, episode.heard) for way in ways)


class _Over(Exception):  # noqa: N818  (no error: how an episode ends)
    """The user stopped, the agent handed over, or the steps ran out."""


class _Episode:
    """What was said and done. heard: all of the customer's words."""

    def __init__(self, env: Any, first: Any, steps: int) -> None:
        self._env, self._steps = env, steps
        self.messages: list[dict[str, Any]] = []
        self.reward, self.info = 0.0, first.info.model_dump()
        self.heard = ""
        self._hear(first.observation)

    def say(self, text: str) -> None:
        self._hear(self._step(Action(name=RESPOND_ACTION_NAME, kwargs={"content": text}), {"content": text}))
        self._go_on()

    def do(self, action: Action) -> None:
        call = {"function": {"name": action.name, "arguments": json.dumps(action.kwargs)}}
        result = self._step(action, {"content": None, "tool_calls": [call]})
        self.messages.append({"role": "tool", "content": result})
        self._go_on()

    def _step(self, action: Action, message: dict[str, Any]) -> str:
        if self._steps <= 0:
            raise _Over
        self._steps -= 1
        self.messages.append({"role": "assistant", **message})
        response = self._env.step(action)
        self.reward, self._done = response.reward, response.done
        self.info |= response.info.model_dump()
        return str(response.observation)

    def _go_on(self) -> None:
        if self._done:
            raise _Over

    def _hear(self, text: str) -> None:
        self.messages.append({"role": "user", "content": text})
        self.heard = f"{self.heard}\n{text}"


def _identity(env: Any, task: Any) -> list[list[Fact]]:
    """How the customer can say who it is: in retail by e-mail, or by name and zip code; elsewhere by its user id, and
    as the gold actions want it. Only ways that the instruction knows in full."""
    ways: list[dict[str, Any]] = [{"user_id": task.user_id}]
    if "find_user_id_by_name_zip" in env.tools_map:
        user = env.data["users"].get(task.user_id)
        ways = [{"email": user["email"]}, {**user["name"], "zip": user["address"]["zip"]}] if user else []
    found = [[fact for name, value in way.items() for fact in facts_of(name, value, task.instruction)] for way in ways]
    return [facts for way, facts in zip(ways, found, strict=True) if len(facts) == len(way)]


def _lookups(identity: list[list[Fact]], heard: str) -> Iterator[Action]:
    """How the customer is looked up in retail."""
    way = next((way for way in identity if _told(way, heard)), None)
    if way and way[0].argument != "user_id":
        kwargs = {fact.argument: fact.value for fact in way}
        yield Action(name="find_user_id_by_email" if "email" in kwargs else "find_user_id_by_name_zip", kwargs=kwargs)


def _facts(action: Any, instruction: str) -> list[Fact]:
    if action.name.startswith(_NO_FACTS):
        return []
    return [fact for name, value in leaves(action.kwargs) for fact in facts_of(name, value, instruction)]


def _told(way: list[Fact], heard: str) -> bool:
    return all(fact.told(heard) for fact in way)


def _plain(kwargs: dict[str, Any]) -> str:
    return ", ".join(f"{words(name)}: {value}" for name, value in leaves(kwargs))
