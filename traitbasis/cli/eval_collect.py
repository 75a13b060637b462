"""`traitbasis eval collect`: dialogues, which all other evaluations read."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from traitbasis.cli.common import finite, listed, out, progress
from traitbasis.cli.evaluate import eval_app

_USER_KEY, _AGENT_KEY = "TRAITBASIS_USER_KEY", "TRAITBASIS_AGENT_KEY"


@eval_app.command("collect")
def collect_dialogues(
    url: Annotated[str, typer.Option(help="OpenAI-compatible URL of the simulated user.")] = "http://127.0.0.1:8000/v1",
    method: Annotated[str, typer.Option(help="What makes this user; names it in tables.")] = "steered",
    model: Annotated[
        str,
        typer.Option(
            help="Model id to ask for; {spec} becomes impatience-high+skeptical-low, {name} the same with a dot for "
            "the plus; for the neutral user nothing, and 'neutral'."
        ),
    ] = "steered-user@{spec}",
    traits: Annotated[str, typer.Option(help="Traits, with commas.")] = "",
    levels: Annotated[
        str, typer.Option(help="Levels of each trait and mix, with commas: low, medium, high.")
    ] = "medium",
    mixes: Annotated[
        str, typer.Option(help="Mixes, with commas: impatience+skeptical, or with levels of their own.")
    ] = "",
    neutral: Annotated[bool, typer.Option("--neutral", help="The user without traits as well.")] = False,
    tasks: Annotated[Path | None, typer.Option(help="Your own tasks; by default those that ship.")] = None,
    limit_tasks: Annotated[int | None, typer.Option(min=1, help="Only the first so many tasks.")] = None,
    trials: Annotated[
        int, typer.Option(min=1, help="Dialogues of each task and condition, each with another seed.")
    ] = 1,
    turns: Annotated[int, typer.Option(min=1, help="The user's turns in a dialogue, at most.")] = 12,
    positions: Annotated[
        Literal["generated", "all"], typer.Option(help="all: the past is steered, too (TraitBasis servers).")
    ] = "generated",
    force: Annotated[
        bool, typer.Option("--force", help="Traits beyond their limit, too (TraitBasis servers).")
    ] = False,
    temperature: Annotated[
        float | None, typer.Option(min=0, callback=finite, help="By default what the endpoint uses.")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Of one turn; by default what the endpoint uses.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Every task and trial gets a seed from it, all conditions the same.")] = 0,
    agent_url: Annotated[
        str,
        typer.Option(help="OpenAI-compatible URL of a model that plays the agent; by default the task's script does."),
    ] = "",
    agent_model: Annotated[str, typer.Option(help="Its model id.")] = "",
    agent_temperature: Annotated[
        float | None, typer.Option(min=0, callback=finite, help="By default what that endpoint uses.")
    ] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Dialogues that run at a time.")] = 8,
    timeout: Annotated[float, typer.Option(min=1, callback=finite, help="Seconds that one reply may take.")] = 600.0,
    api_key: Annotated[
        str, typer.Option(help="The user's API key, if it wants one.", envvar=_USER_KEY, show_envvar=True)
    ] = "",
    agent_key: Annotated[
        str, typer.Option(help="The agent's API key, if it wants one.", envvar=_AGENT_KEY, show_envvar=True)
    ] = "",
    out_file: Annotated[
        Path | None, typer.Option("--out", help="File of this method; by default dialogues/METHOD.jsonl.")
    ] = None,
) -> None:
    """Let a served user talk to an agent, about each task under each condition; a run that was stopped goes on.

    Example: traitbasis eval collect --traits impatience,confusion --neutral --out dialogues/steered.jsonl
    """
    if bool(agent_url) != bool(agent_model):
        raise typer.BadParameter("give both --agent-url and --agent-model, or neither")
    from traitbasis.collect import (
        Agent,
        Customer,
        EndpointAgent,
        ScriptedAgent,
        collect,
        open_dialogues,
        read_conditions,
    )
    from traitbasis.dialogue_tasks import read_tasks
    from traitbasis.remote import RemoteModel

    conditions = read_conditions(listed(traits), listed(levels), listed(mixes), neutral)
    every = read_tasks(tasks)
    chosen = every[:limit_tasks]
    path = out_file or Path("dialogues") / f"{method}.jsonl"
    sampling = {"temperature": temperature, "max_tokens": max_tokens}
    with RemoteModel(url, api_key or None, what="the simulated user", timeout=timeout) as remote:
        customer = Customer(method, remote, model, positions, force, seed, _given(sampling))
        agent: Agent = ScriptedAgent()
        if agent_url:
            other = RemoteModel(agent_url, agent_key or None, what="the agent", timeout=timeout)
            agent = EndpointAgent(other, agent_model, _given({"temperature": agent_temperature}))
        file = open_dialogues(path, customer, every, conditions, agent=agent, turns=turns)
        before = len(file.dialogues)
        with progress("turns", len(chosen) * len(conditions) * trials * turns) as advance:
            collect(
                file,
                customer,
                chosen,
                conditions,
                agent=agent,
                trials=trials,
                concurrency=concurrency,
                progress=advance,
            )
    said = [turn for dialogue in file.dialogues for turn in dialogue.turns]
    usage = [turn.made_by.get("usage") for turn in said]
    tokens = sum(n for used in usage if isinstance(used, dict) for n in used.values() if type(n) is int)
    out.print(
        f"{path}: {len(file.dialogues)} dialogues ({len(file.dialogues) - before} new), {len(said)} turns, "
        f"{sum(turn.speaker == 'customer' for turn in said)} of them the customer's, {tokens} tokens",
        soft_wrap=True,
        highlight=False,
        markup=False,
    )


def _given(options: dict[str, float | int | None]) -> dict[str, float | int]:
    return {name: value for name, value in options.items() if value is not None}
