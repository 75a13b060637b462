"""Commands around support seekers: their scenarios, the tools that an agent may use, the scores of its dialogues."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from traitbasis.cli.common import app, err, out, progress

support_app = typer.Typer(
    no_args_is_help=True, help="People who look for support: scenarios, tools, scores (TEA-Bench)."
)
app.add_typer(support_app, name="support")

Scenarios = Annotated[Path | None, typer.Option("--scenarios", help="YAML file of your own; by default ours.")]


@support_app.command("list")
def list_(file: Scenarios = None) -> None:
    """List the scenarios, and what is wrong with them; exit status 1 when anything is.

    Example: traitbasis support list
    """
    from traitbasis.reactive.support import check_scenario, read_scenarios, scenarios

    table, wrong = Table("id", "feeling", "when", "where"), list[str]()
    for one in (read_scenarios(file) if file else scenarios()).values():
        when = f"{one.time:%a %Y-%m-%d %H:%M}"
        table.add_row(one.id, escape(one.emotion), when, escape(f"{one.place.name}, {one.place.city}"))
        wrong += [f"{one.id}: {problem}" for problem in check_scenario(one)]
    out.print(table)
    for problem in wrong:
        err.print(f"[red]{escape(problem)}[/red]", soft_wrap=True, highlight=False)
    if wrong:
        raise typer.Exit(1)


@support_app.command()
def show(
    scenario: Annotated[str, typer.Argument(help="Id of a scenario.")],
    user_type: Annotated[str, typer.Option("--type", help="action-oriented or emotion-oriented.")] = "emotion-oriented",
    prompt: Annotated[str, typer.Option(help="first, standard or doubting.")] = "first",
    file: Scenarios = None,
) -> None:
    """Show what a simulated person is told.

    Example: traitbasis support show exam-library --prompt doubting
    """
    from traitbasis.errors import ReactionError
    from traitbasis.reactive.support import USER_TYPES, read_scenarios, render_prompt, scenarios

    known = read_scenarios(file) if file else scenarios()
    if scenario not in known:
        raise ReactionError(f"unknown scenario {scenario!r}; known: {', '.join(known)}")
    if user_type not in USER_TYPES:
        raise ReactionError(f"unknown user type {user_type!r}; known: {', '.join(USER_TYPES)}")
    told = render_prompt(prompt, known[scenario], user_type, invented="what the agent made up")
    out.print(told, markup=False, highlight=False, soft_wrap=True)


@support_app.command()
def tools(
    scenario: Annotated[
        str, typer.Option(help="Serve the tools of this scenario over stdio, for an MCP client; without it list them.")
    ] = "",
) -> None:
    """List the tools of a support agent, or serve them over stdio with the Model Context Protocol.

    Example: traitbasis support tools --scenario exam-library
    """
    from traitbasis.reactive.support import scenario as scenario_of
    from traitbasis.reactive.support_tools import TOOLS, mcp_server

    if scenario:
        mcp_server(scenario_of(scenario)).run("stdio")  # stdout is the protocol's from here on
        return
    table = Table("category", "tool", "arguments", "what it does")
    for tool in sorted(TOOLS.values(), key=lambda tool: tool.category):
        arguments = ", ".join(
            name if field.is_required() else f"\\[{name}]" for name, field in tool.arguments.model_fields.items()
        )
        table.add_row(tool.category, tool.name, arguments, escape(tool.description))
    out.print(table)


@support_app.command()
def score(
    dialogues: Annotated[
        Path, typer.Argument(help="JSONL of {messages, id, scenario, user_type}, or a file of `eval collect`.")
    ],
    judge: Annotated[str, typer.Option(help="URL#MODEL of a judge that gives the five TEA scores.")] = "",
    judge_facts: Annotated[bool, typer.Option("--judge-facts", help="Ask the judge for the facts as well.")] = False,
    api_key_file: Annotated[Path | None, typer.Option(help="File with the judge's API key.")] = None,
    cache: Annotated[
        Path | None, typer.Option(help="JSONL of the judge's answers; a run that was cut goes on.")
    ] = None,
    system: Annotated[bool, typer.Option("--system", help="The agent's system prompt counts as a source.")] = False,
    out_file: Annotated[Path | None, typer.Option("--out", help="Write all of it as JSON, too.")] = None,
) -> None:
    """Score an agent's dialogues: how much it states, how much of that it made up, and by a judge the TEA scores.

    Example: traitbasis support score dialogues.jsonl --judge http://localhost:9000/v1#MODEL
    """
    import json

    from traitbasis.errors import ReactionError
    from traitbasis.files import write_whole
    from traitbasis.reactive.grounding import (
        Factuality,
        fact_ratio,
        ground_all,
        hallucination_rate,
        hallucination_ratio,
        judge_groundings,
    )
    from traitbasis.reactive.support import RUBRICS, read_support_dialogues, tea_scores

    if judge_facts and not judge:
        raise typer.BadParameter("--judge-facts needs --judge URL#MODEL")
    found = read_support_dialogues(dialogues)
    turns = [dialogue.turns for dialogue in found]
    record: dict[str, Any] = {"dialogues": len(found), "facts_by": "rules"}
    scores: list[Any] = [None] * len(found)
    if judge:
        from traitbasis.evaluation.judges import LlmRater

        key = api_key_file.read_text(encoding="utf-8") if api_key_file else None
        model = LlmRater.from_spec(judge, api_key=key, cache=cache).model
        record["judge"] = {"url": model.url, "model": model.model}
        with progress("scoring", len(turns)) as advance:
            scores = tea_scores(model, turns, progress=advance)
    if judge_facts:
        record["facts_by"] = model.model
        judged = judge_groundings(model, turns)
        groundings = [[one for one in some if one is not None] for some in judged]
        record["unreadable_replies"] = sum(one is None for some in judged for one in some)
    else:
        groundings = [ground_all(some, system=system) for some in turns]
    facts = [Factuality.of(some) for some in groundings if some]
    if not facts:
        raise ReactionError(f"there is no reply of an agent to score in {dialogues}")
    record["fact_ratio"], record["hallucination_ratio"] = fact_ratio(facts), hallucination_ratio(facts)
    record["hallucination_rate"] = hallucination_rate(facts)
    table = Table("figure", "value", title=f"{len(found)} dialogues, facts by {escape(record['facts_by'])}")
    for name in ("fact_ratio", "hallucination_ratio", "hallucination_rate"):
        value = record[name]
        table.add_row(name.replace("_", " "), "undefined: no facts" if value is None else f"{value:.3f}")
    if rated := [one for one in scores if one is not None]:
        record["scored"] = len(rated)
        record["tea"] = {name: 25 * sum(one.record[name] for one in rated) / len(rated) for name in RUBRICS}
        record["tea_score"] = sum(one.score for one in rated) / len(rated)
        for name, value in (*record["tea"].items(), ("TEA score", record["tea_score"])):
            table.add_row(name, f"{value:.1f}")
    out.print(table)
    record["by_dialogue"] = [
        {"id": dialogue.id, "replies": [one.record for one in some], "tea": rating.record if rating else None}
        for dialogue, some, rating in zip(found, groundings, scores, strict=True)
    ]
    if out_file:
        write_whole(out_file, json.dumps(record, ensure_ascii=False, indent=1) + "\n")
        out.print("saved:", out_file, soft_wrap=True, markup=False)
