"""What was found of an agent's faults as tables, for the terminal and the page alike."""

from __future__ import annotations

from traitbasis.drop_tables import Grid
from traitbasis.fault_types import CATEGORIES, REASONS, TYPES
from traitbasis.faults import Faults
from traitbasis.outcomes import UNSTEERED

_SHARE = "Share of failed episodes with at least one critical fault of the agent, 95 % intervals over tasks"
_LEAST = "≥: not every type of it was looked for in every episode, so that this is the least it can be"


def fault_grids(found: Faults) -> list[Grid]:
    """By category, by type, and how failed episodes ended for the customer."""
    return [categories_grid(found), types_grid(found), endings_grid(found)]


def categories_grid(found: Faults) -> Grid:
    """A condition a row; below the conditions' shares what they are beside the unsteered user's."""
    rows = []
    for name in found.conditions:
        shares = [share for share in found.categories if share.condition == name]
        rows.append((name, str(shares[0].failed), *map(str, shares)))
    for name in found.conditions:
        if name != UNSTEERED:
            shares = [share for share in found.categories if share.condition == name]
            said = [share.said(share.beside).removeprefix("≥ ") for share in shares]
            rows.append((f"{name} less {UNSTEERED}", "", *said))
    return Grid(
        f"Faults of {found.agent}",
        ("condition", "failed", *CATEGORIES),
        tuple(rows),
        f"{_SHARE} (tau-Emotion-Bench, C.2). {_LEAST}.",
    )


def types_grid(found: Faults) -> Grid:
    """A type a row: who looked for it, its share by condition, and how often it occurs."""
    by_type = {(share.of, share.condition): share for share in found.types}
    rows = []
    for type_ in TYPES:
        faults = [fault for diagnosis in found.diagnoses for fault in diagnosis.faults if fault.type == type_]
        minor = sum(fault.severity == "minor" and fault.source == "agent" for fault in faults)
        users = sum(fault.source == "user" for fault in faults)
        counted = f"{len(faults)} ({minor} minor, {users} the user's)" if faults else "0"
        cells = [by_type[type_, name] for name in found.conditions]
        rows.append(
            (
                type_,
                *("-" if not share.looked else str(share) for share in cells),
                counted if faults or type_ in found.looked else "not looked for",
            )
        )
    return Grid(
        f"Types of fault of {found.agent}",
        ("fault", *found.conditions, "all that were found"),
        tuple(rows),
        f"{_SHARE}. The last column counts every fault, also minor ones and the simulated user's own. "
        "-: nothing failed there, or nobody looked for it.",
    )


def endings_grid(found: Faults) -> Grid:
    """A condition a row: did the customer give up, and why."""
    columns = ("not abandoned", *REASONS, "unclear")
    rows = []
    for name in found.conditions:
        counted = found.endings(name)
        rows.append((name, *(str(counted[column]) for column in columns)))
    return Grid(
        f"How failed episodes of {found.agent} ended for the customer",
        ("condition", *columns),
        tuple(rows),
        "Failed episodes: not abandoned, or abandoned by the dominant reason. Without a judge only the token "
        "###UNSATISFIED### tells, and the reason is of rules.",
    )
