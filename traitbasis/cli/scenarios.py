"""`traitbasis scenarios`: situations for users whose state is tracked, and what agents' rollouts in them are worth."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.markup import escape
from rich.table import Table

from traitbasis.cli.common import app, finite, out

scenarios_app = typer.Typer(no_args_is_help=True, help="Scenarios with state-tracked users, and agents' rollouts.")
app.add_typer(scenarios_app, name="scenarios")

File = Annotated[Path | None, typer.Argument(help="Scenarios in YAML; by default those that ship.")]
Rollouts = Annotated[list[Path], typer.Argument(help="Files of rollouts (JSON lines).")]
Weight = Annotated[
    float, typer.Option("--weight", min=0, max=1, callback=finite, help="λ, the relation's share of r_out.")
]


@scenarios_app.command("list")
def list_scenarios(
    file: File = None,
    scene: Annotated[
        Literal["Support", "Defense", "Repair", "Charm"] | None, typer.Option(help="Only this scene type.")
    ] = None,
) -> None:
    """Scenarios with their scene, setting and anchors.

    Example: traitbasis scenarios list --scene Defense
    """
    from traitbasis.reactive.scenarios import count_by_scene, read_scenarios

    found = [entry for entry in read_scenarios(file) if scene in (None, entry.scene)]
    table = Table("scenario", "scene", "setting", "start", "success", "failure")
    table.columns[0].no_wrap = True  # it is what `show` takes
    for entry in found:
        states = (entry.anchors.start, entry.anchors.succeed, entry.anchors.fail)
        table.add_row(
            *map(escape, (entry.id, entry.scene, entry.setting)),
            *(f"{s.a:g}, {s.t:g}" for s in states),
        )
    out.print(table)
    counted = ", ".join(f"{number} {name}" for name, number in count_by_scene(found).items() if number)
    out.print(f"{len(found)} scenarios: {counted or 'none of this scene'}; states are (a, t)", soft_wrap=True)


@scenarios_app.command("show")
def show_scenario(name: Annotated[str, typer.Argument(help="Its id.")], file: File = None) -> None:
    """What the customer and the agent of a scenario are told.

    Example: traitbasis scenarios show support-dog-last-day
    """
    from traitbasis.reactive.scenarios import find_scenario, read_scenarios

    entry = find_scenario(read_scenarios(file), name)
    customer, agent = entry.simulated_user_profile.text, entry.prompt[0]["content"]
    opens = "the agent" if entry.opening_line is None else f"the customer: {entry.opening_line}"
    for title, text in (("the customer is told", customer), ("the agent is told", agent), ("who opens", opens)):
        out.print(f"[bold]{title}[/bold]")
        out.print(text + "\n", markup=False, highlight=False)


@scenarios_app.command("check")
def check(file: File = None) -> None:
    """Check scenarios: fields, anchors (order, gaps, multiples of five, ranges), profiles, near copies.

    Example: traitbasis scenarios check my-scenarios.yaml
    """
    from traitbasis.reactive.scenarios import check_scenarios, count_by_scene, read_scenarios

    found = read_scenarios(file)
    problems = check_scenarios(found)
    for problem in problems:
        out.print(problem, markup=False, highlight=False, soft_wrap=True)
    counted = ", ".join(f"{number} {name}" for name, number in count_by_scene(found).items())
    out.print(f"{len(found)} scenarios ({counted}), {len(problems)} problems", highlight=False)
    if problems:
        raise typer.Exit(1)


@scenarios_app.command("score")
def score(
    rollouts: Rollouts,
    weight: Weight = 0.5,
    out_file: Annotated[Path | None, typer.Option("--out", help="Write the figures as JSON.")] = None,
) -> None:
    """Mean r_out × 100 of rollouts by scene, with intervals over scenarios, and how the dialogues ended.

    Example: traitbasis scenarios score rollouts.jsonl --out scores.json
    """
    from collections import Counter

    from traitbasis.files import write_whole
    from traitbasis.reactive.rollouts import read_rollouts, scene_scores

    found = read_rollouts(rollouts)
    scores = scene_scores(found, weight)
    table = Table("scene", "r_out × 100", "scenarios", "rollouts", "succeeded", "failed", "turns used up")
    record = {}
    for scene, estimate in scores.items():
        its = [rollout for rollout in found if scene in (rollout.scene, "all")]
        ended = Counter(rollout.ended for rollout in its)
        counts = (len({rollout.scenario for rollout in its}), len(its), *(ended[e] for e in ("succeeded", "failed")))
        table.add_row(scene, escape(f"{estimate:.1f}"), *map(str, counts), str(ended["turns"]))
        record[scene] = {**estimate.record, "scenarios": counts[0], "rollouts": counts[1], "ended": dict(ended)}
    out.print(table)
    if out_file:
        files = [str(path) for path in rollouts]
        write_whole(out_file, json.dumps({"rollouts": files, "weight": weight, "scores": record}, indent=2) + "\n")


@scenarios_app.command("export")
def export(
    rollouts: Rollouts,
    out_file: Annotated[Path, typer.Option("--out", help="JSON lines for a trainer.")],
    per: Annotated[Literal["turn", "rollout"], typer.Option(help="A line for each agent turn, or rollout.")] = "turn",
    credit: Annotated[
        Literal["centred", "direct", "none"], typer.Option(help="Centred turn credit (eq. 7), eq. 5, or none (eq. 4).")
    ] = "centred",
    alpha: Annotated[float, typer.Option(min=0, callback=finite, help="Turn-credit weight α.")] = 15.0,
    floor: Annotated[float, typer.Option(min=1e-6, callback=finite, help="Least standard deviation σ_min.")] = 0.1,
    weight: Weight = 0.5,
    sample_std: Annotated[
        bool, typer.Option("--sample-std", help="Divide the variance by K − 1, as verl and TRL do, and not by K.")
    ] = False,
) -> None:
    """Rollouts as a GRPO trainer's samples: prompt, completion, r_out, r_proc, and advantages a turn.

    Example: traitbasis scenarios export rollouts.jsonl --out train.jsonl --per turn
    """
    from traitbasis.reactive.rollouts import export_training, groups, read_rollouts, training_lines

    found = read_rollouts(rollouts)
    lines = training_lines(
        found, per, credit=credit, alpha=alpha, floor=floor, weight=weight, ddof=1 if sample_std else 0
    )
    written = export_training(out_file, lines)
    out.print(f"{written} lines of {len(found)} rollouts in {len(groups(found))} groups: {out_file}", soft_wrap=True)
    alone = sum(len(group) == 1 for group in groups(found).values())
    if alone:
        out.print(f"{alone} groups have one rollout only, whose outcome is worth nothing to GRPO", soft_wrap=True)
