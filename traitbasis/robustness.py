"""What steered users cost an agent, as one HTML file that needs nothing else: ``traitbasis report --html out.html``.

Dialogues are hostile input: an agent and a model wrote them, and maybe somebody who wants the reader's browser. They
are escaped text, cut where they are long, and their control and bidirectional characters are written out.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import resources
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from traitbasis import drop_plots, plots
from traitbasis.drop_tables import drops_grid, effort_grid, leaderboard_grid, success_grid, summary
from traitbasis.drops import DRAWS, Robustness, Task
from traitbasis.errors import ReportError
from traitbasis.fault_tables import fault_grids
from traitbasis.faults import Faults
from traitbasis.files import write_whole
from traitbasis.outcomes import UNSTEERED, Episode, Message

_ROWS = 500  # of a matrix
_MESSAGES = 60  # of a dialogue: its first and its last half of them
_TEXT, _CALLS, _NAME = 1500, 1000, 200  # characters of a message, of its calls' arguments, of a name
_JOINERS = "\u200c\u200d"  # invisible, and part of words and emoji


@dataclass(frozen=True)
class TaskRow:
    """A task's line of the matrix. cells: by condition its success as ``2/3`` and the share that failed, None where no
    episode counts. drop: the largest of its conditions, None without one."""

    domain: str
    task: str
    cells: tuple[tuple[str, float] | None, ...]
    drop: float | None


@dataclass(frozen=True)
class ShownMessage:
    """A message as the page has it. calls: name and arguments, as text. folded: behind a click."""

    speaker: str
    text: str
    calls: tuple[tuple[str, str], ...] = ()

    @property
    def folded(self) -> bool:
        return self.speaker in ("system", "tool")


@dataclass(frozen=True)
class Beside:
    """Two dialogues about one task, with the unsteered user and under a condition."""

    agent: str
    task: Task
    condition: str
    drop: float
    unsteered: Episode
    steered: Episode


def write_page(
    path: str | Path, found: Sequence[Robustness], *, transcripts: int = 5, faults: Sequence[Faults] = ()
) -> Path:
    """Write the page, under a temporary name first.

    found: of agents that can be compared (``outcomes.by_agent``). transcripts: pairs of dialogues, the biggest drops
    first. faults: of the same agents, where they were looked for. Raises ReportError without matplotlib, and when the
    file cannot be written.
    """
    template = (resources.files("traitbasis") / "robustness.html").read_text("utf-8")
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters.update(shown=shown, messages=shown_messages, plain=_plain)
    oracle = found[0].oracle
    page = environment.from_string(template).render(
        policy=_policy(template),
        found=found,
        summaries=[summary(each) for each in found],
        warnings=list(dict.fromkeys(warning for each in found for warning in each.warnings)),
        leaderboard=leaderboard_grid(found) if len(found) > 1 else None,
        sections=[_section(i, each) for i, each in enumerate(found)],
        fault_grids={each.agent: fault_grids(each) for each in faults},
        fault_notes=list(dict.fromkeys(note for each in faults for note in each.notes)),
        faults_of={(each.agent, d.episode.cell): d.faults for each in faults for d in each.diagnoses},
        pairs=beside(found, transcripts),
        runs=[*(run for each in found for run in each.agent.runs), *(oracle.runs if oracle else ())],
        draws=DRAWS,
        written_by={name: version(name) for name in ("traitbasis", "matplotlib")},
    )
    path = Path(path)
    try:
        write_whole(path, page)
    except OSError as error:
        raise ReportError(f"cannot write the report to {path}: {error.strerror or error}") from error
    return path


def task_rows(found: Robustness) -> list[TaskRow]:
    """Success by task and condition, the biggest drops first."""
    tasks = {task for by_task in found.trials.values() for task in by_task}
    rows = []
    for task in tasks:
        rates = {name: _rate(by_task[task]) for name, by_task in found.trials.items() if task in by_task}
        cells = [_counts(by_task.get(task, ())) for by_task in found.trials.values()]
        lost = [rates[UNSTEERED] - rate for name, rate in rates.items() if name != UNSTEERED and UNSTEERED in rates]
        rows.append(TaskRow(*task, tuple(cells), max(lost, default=None)))
    return sorted(rows, key=lambda row: (-(-2 if row.drop is None else row.drop), row.domain, row.task))


def beside(found: Iterable[Robustness], most: int) -> list[Beside]:
    """The tasks with the biggest drops, a dialogue of each side: where it can be one that went well unsteered and one
    that went badly steered, of the same trial. Of equal drops every condition has its turn."""
    every, seen = list[tuple[float, int, Beside]](), Counter[tuple[str, str]]()
    for robustness in found:
        plain = robustness.trials[UNSTEERED]
        for name, by_task in robustness.trials.items():
            if name == UNSTEERED:
                continue
            drops = {task: _rate(plain[task]) - _rate(trials) for task, trials in by_task.items() if task in plain}
            for task in sorted(drops, key=lambda task: (-drops[task], task)):
                one, two = _telling(plain[task], by_task[task])
                at = robustness.agent.name, name
                every.append((-drops[task], seen[at], Beside(at[0], task, name, drops[task], one, two)))
                seen[at] += 1
    return [pair for *_, pair in sorted(every, key=lambda item: item[:2])[:most]]


def shown(text: str, most: int = _NAME) -> str:
    """Text with what cannot be seen written out, such as ``⟨U+202E⟩``, and cut with a note of how much is missing."""
    cut = f" … ({len(text) - most:,} more characters)" if len(text) > most else ""
    return "".join(_visible(character) for character in text[:most]) + cut


def shown_messages(messages: Sequence[Message]) -> list[ShownMessage]:
    """What the page has of a dialogue; between the first and the last messages of a long one stands how many are
    missing."""
    half = _MESSAGES // 2
    if len(messages) <= _MESSAGES:
        return [_message(message) for message in messages]
    note = ShownMessage("note", f"{len(messages) - 2 * half} messages are left out here")
    return [*map(_message, messages[:half]), note, *map(_message, messages[-half:])]


# ---- Parts


def _section(number: int, found: Robustness) -> dict[str, Any]:
    """What the page shows of one agent."""
    figures = {"drops": drop_plots.drops_figure(found)} if found.drops else {}
    figures["success"] = drop_plots.success_figure(found)
    if len(found.ks) > 1:
        figures["pass"] = drop_plots.pass_figure(found)
    rows = task_rows(found)
    return {
        "id": f"agent-{number}",
        "name": found.agent.name,
        "summary": summary(found),
        "grids": {"drops": drops_grid(found), "success": success_grid(found), "effort": effort_grid(found)},
        "figures": {name: Markup(plots.svg(figure, f"f{number}-{name}")) for name, figure in figures.items()},
        "conditions": list(found.trials),
        "rows": rows[:_ROWS],
        "more": len(rows) - _ROWS,
        "several": len(found.domains) > 1,
    }


def _rate(trials: Sequence[Episode]) -> float:
    return sum(episode.success for episode in trials) / len(trials)


def _counts(trials: Sequence[Episode]) -> tuple[str, float] | None:
    return (f"{sum(e.success for e in trials)}/{len(trials)}", 1 - _rate(trials)) if trials else None


def _telling(unsteered: Sequence[Episode], steered: Sequence[Episode]) -> tuple[Episode, Episode]:
    """The pair of trials that shows the difference; the same trial of both if it can be."""
    pairs = [(one, two) for one in unsteered for two in steered]
    return min(pairs, key=lambda pair: (_contrary(*pair), pair[0].trial != pair[1].trial, pair[0].trial))


def _contrary(unsteered: Episode, steered: Episode) -> int:
    """How many of both did not end as a drop would have it."""
    return int(not unsteered.success) + int(steered.success)


def _message(message: Message) -> ShownMessage:
    calls = tuple((shown(call.name), shown(_plain(call.arguments), _CALLS)) for call in message.calls[:10])
    if len(message.calls) > 10:
        calls += ((f"and {len(message.calls) - 10} more", ""),)
    return ShownMessage(message.speaker, shown(message.text, _TEXT), calls)


def _visible(character: str) -> str:
    category = unicodedata.category(character)
    if character in "\n\t" or character in _JOINERS or category not in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"):
        return character
    return f"⟨U+{ord(character):04X}⟩"


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _policy(template: str) -> str:
    """A Content-Security-Policy under which the page's own script counts and no other. Styles may stand in elements,
    as the figures' do."""
    (script,) = re.findall(r"<script>(.*?)</script>", template, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; base-uri 'none'; "
        "form-action 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    )
