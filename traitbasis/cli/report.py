"""`traitbasis report`: what runs of a harness say of an agent, and whether a CI should let it through."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from traitbasis.cli import faults as fault_options
from traitbasis.cli.common import app, err, out, spare

if TYPE_CHECKING:
    from traitbasis.drop_tables import Grid
    from traitbasis.drops import Robustness

TOO_FRAGILE = 3  # exit status: measured, and not good enough; 1 is could not measure


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="Results of runs; those of several agents are set side by side.")],
    floor: Annotated[
        list[Path] | None, typer.Option(help="Results of the scripted oracle with the same user: the noise floor.")
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page with figures and dialogues (extra `plots`).")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write every figure, with what made it.")] = None,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print the tables as Markdown.")] = False,
    max_drop: Annotated[
        float | None,
        typer.Option(
            help="Most success that a condition may cost, all domains together: 0.1 is 10 points. Wants nine in ten of "
            "the planned tasks with both users, and one solved with the unsteered one."
        ),
    ] = None,
    confident: Annotated[
        bool, typer.Option("--confident", help="Exceed --max-drop only where the whole 95 % interval does.")
    ] = False,
    k: Annotated[str, typer.Option(help="Which k of pass^k, with commas; by default 1 to the number of trials.")] = "",
    transcripts: Annotated[int, typer.Option(min=0, max=50, help="Pairs of dialogues on the page.")] = 5,
    faults: fault_options.Wanted = False,
    judge_url: fault_options.JudgeUrl = "",
    judge_model: fault_options.JudgeModel = "",
    judge_key: fault_options.JudgeKey = "",
    judge_cache: fault_options.JudgeCache = None,
    policy: fault_options.Policy = None,
) -> None:
    """Say what steered users cost an agent: success, pass^k, and the drop of each condition against the unsteered user.

    Exit status: 0 fine; 1 could not be measured or read; 2 bad usage; 3 a drop exceeds --max-drop.

    Example: traitbasis report runs/mine.jsonl --floor runs/oracle.jsonl --html report.html --max-drop 0.1 --faults
    """
    from traitbasis.drop_tables import (
        drops_grid,
        effort_grid,
        leaderboard_grid,
        markdown,
        record,
        success_grid,
        summary,
    )
    from traitbasis.drops import measure
    from traitbasis.fault_tables import fault_grids
    from traitbasis.files import write_whole
    from traitbasis.outcomes import by_agent, read_run

    ks = _ks(k)
    if confident and max_drop is None:
        raise typer.BadParameter("says how --max-drop is meant; give that, too", param_hint="--confident")
    if max_drop is not None and not 0 <= max_drop <= 1:  # nan is neither
        raise typer.BadParameter("is a share of tasks, such as 0.1", param_hint="--max-drop")
    spare([json_file, html], [*runs, *(floor or ())])
    fault_options.check(faults, judge_url, judge_model, policy, judge_cache, [*runs, *(floor or ())])
    agents, oracle = by_agent([read_run(path) for path in runs], [read_run(path) for path in floor or ()])
    found = [measure(agent, oracle, ks) for agent in agents]
    asked = (judge_url, judge_model, judge_key, policy, judge_cache)
    wrong, said_of_faults = fault_options.look(agents, *asked) if faults else ([], None)

    grids = [leaderboard_grid(found)] if len(found) > 1 else []
    for each in found:
        grids += [drops_grid(each), success_grid(each), effort_grid(each)]
    grids += [grid for each in wrong for grid in fault_grids(each)]
    if as_markdown:
        said = [*(summary(each) for each in found), *(markdown(grid) for grid in grids)]
        typer.echo("\n\n".join(said))
    else:
        for grid in grids:
            _print(grid)
        for each in found:
            out.print(summary(each), markup=False, highlight=False)
    notes = [note for each in wrong for note in each.notes]
    for warning in dict.fromkeys([*(warning for each in found for warning in each.warnings), *notes]):
        err.print(f"[yellow]note:[/yellow] {escape(warning)}", highlight=False, soft_wrap=True)
    if json_file:
        figures = record(found) | ({"faults": said_of_faults} if faults else {})
        write_whole(json_file, json.dumps(figures, ensure_ascii=False, indent=1, allow_nan=False) + "\n")
    if html:
        from traitbasis.robustness import write_page

        write_page(html, found, transcripts=transcripts, faults=wrong)
    for path in filter(None, (json_file, html)):
        err.print(f"saved: {path}", highlight=False, soft_wrap=True, markup=False)
    if max_drop is not None:
        _gate(found, max_drop, confident)


def _gate(found: list[Robustness], allowed: float, confident: bool) -> None:
    from traitbasis.drops import breaches, unmeasured
    from traitbasis.errors import HarnessError

    of = "with its whole 95 % interval " if confident else ""
    if over := breaches(found, allowed, confident):
        for agent, drop in over:
            err.print(
                f"[red]too fragile:[/red] {escape(agent)} loses {escape(str(drop.drop))} of success under "
                f"{escape(drop.condition)}, {of}more than the {allowed:g} allowed",
                highlight=False,
                soft_wrap=True,
            )
        raise typer.Exit(TOO_FRAGILE)
    if without := [each.agent.name for each in found if not each.pooled]:
        raise HarnessError(f"{', '.join(without)} was tried with the unsteered user only; there is no drop to judge")
    if unknown := unmeasured(found, confident):
        for agent, drop, why in unknown:
            err.print(
                f"[red]error:[/red] {escape(agent)} under {escape(drop.condition)} cannot be held against --max-drop: "
                f"{why}; run what is missing",
                highlight=False,
                soft_wrap=True,
            )
        raise typer.Exit(1)


def _ks(text: str) -> tuple[int, ...]:
    try:
        ks = tuple(sorted({int(part) for part in text.split(",")})) if text else ()
    except ValueError:
        ks = (0,)
    if any(k < 1 for k in ks):
        raise typer.BadParameter(f"{text!r} is no list of whole numbers from 1 on, such as 1,2,3", param_hint="--k")
    return ks


def _print(grid: Grid) -> None:
    table = Table(title=escape(grid.title), caption=escape(grid.caption), caption_justify="left", title_justify="left")
    for i, column in enumerate(grid.columns):
        table.add_column(escape(column), justify="right" if i else "left", overflow="fold", no_wrap=i == 0)
    for row in grid.rows:
        table.add_row(*(escape(cell) for cell in row))
    out.print(table)
    out.print()
