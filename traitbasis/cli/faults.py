"""`traitbasis report --faults`: what of it needs more than a line in ``report.py``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from traitbasis.cli.common import progress

if TYPE_CHECKING:
    from traitbasis.faults import Faults
    from traitbasis.outcomes import Agent

Wanted = Annotated[
    bool,
    typer.Option(
        "--faults", help="Say what went wrong in failed episodes: five categories, fifteen types, by rules and judge."
    ),
]
JudgeUrl = Annotated[
    str,
    typer.Option(help="With --faults: URL of an OpenAI-compatible judge for what rules cannot see (extra `judge`)."),
]
JudgeModel = Annotated[str, typer.Option(help="The judge's model there.")]
JudgeKey = Annotated[
    str, typer.Option(help="Its API key, if it wants one.", envvar="TRAITBASIS_JUDGE_KEY", show_envvar=True)
]
JudgeCache = Annotated[
    Path | None, typer.Option(help="Keep the judge's answers here (JSONL), so that a killed run goes on.")
]
Policy = Annotated[
    list[str] | None,
    typer.Option(help="With a judge: a domain's policy as DOMAIN=FILE; without it no breach of it is looked for."),
]


def check(
    wanted: bool, url: str, model: str, policy: Sequence[str] | None, cache: Path | None, spared: Sequence[Path]
) -> None:
    """Raises BadParameter for options that do not go together, and for a cache that is one of the files read."""
    from traitbasis.cli.common import spare

    if bool(url) != bool(model):
        raise typer.BadParameter("a judge needs both --judge-url and --judge-model")
    if url and not wanted:
        raise typer.BadParameter("a judge looks for faults; ask for them with --faults", param_hint="--judge-url")
    if (policy or cache) and not url:
        raise typer.BadParameter("--policy and --judge-cache are for a judge; give --judge-url and --judge-model")
    spare([cache], list(spared))


def look(
    agents: Sequence[Agent], url: str, model: str, key: str, policy: Sequence[str] | None, cache: Path | None
) -> tuple[list[Faults], dict[str, Any]]:
    """The faults of each agent, and what is written of them as JSON."""
    from traitbasis.fault_judge import FaultJudge, read_policies
    from traitbasis.faults import CATEGORIES, diagnose, measure_faults

    judge = FaultJudge(url, model, read_policies(policy or ()), api_key=key or None, cache=cache) if url else None
    found = []
    for agent in agents:
        failed = sum(not episode.success and not episode.infrastructure for episode in agent.episodes)
        with progress("looking for faults", failed) as advance:
            found.append(measure_faults(agent, diagnose(agent, judge, progress=advance)))
    said = {
        "taxonomy": {category: list(types) for category, types in CATEGORIES.items()},
        "judge": judge.record if judge else None,
        "agents": [each.record for each in found],
    }
    return found, said
