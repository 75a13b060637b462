"""What went wrong in failed episodes: five categories and fifteen types of fault, who made it and how bad it is.

The taxonomy and the figure are tau-Emotion-Bench's (appendix C.1, Table 11, and C.2): of an agent's failed episodes,
the share that has at least one critical fault of the agent, by category. There a judge names every fault. Here rules
name those that calls, results and the reference actions show (``fault_rules.py``), and a judge behind a URL the others
(``fault_judge.py``). A type that nobody looked for in an episode is no part of any share: not looked for is never 0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from traitbasis.drops import over_units
from traitbasis.fault_rules import diagnose_by_rules, references
from traitbasis.fault_types import (
    CATEGORIES,
    TYPES,
    Diagnosis,
    Fault,
    Severity,
    Source,
    category_of,
)
from traitbasis.metrics.estimate import Estimate
from traitbasis.outcomes import UNSTEERED, Agent
from traitbasis.reactive.appraisal import Appraisal, appraise_all

if TYPE_CHECKING:
    from traitbasis.chat import Turn
    from traitbasis.fault_judge import FaultJudge

__all__ = ["CATEGORIES", "TYPES", "Diagnosis", "Fault", "Faults", "Share", "diagnose", "measure_faults"]

# What harnesses' own reviews call faults. tau2's tags (harness contract 1.3 and the agent's, of `tau2 review`), and the
# fault types of tau-bench's error identification. None: no type of the taxonomy says it.
TAGS: Final[Mapping[str, str | None]] = {
    "missed_required_action": "Missed Action",
    "wrong_sequence": "Wrong Order",
    "irrelevant_tool_call": "Extra Action",
    "incorrect_interpretation": "Misread Intent",
    "premature_termination": "Early Stop",
    "tool_call_argument_error": "Wrong Arguments",
    "tool_call_schema_error": "Schema Error",
    "hallucination": "Hallucination",
    "inconsistent_behavior": "Inconsistent",
    "revealed_info_early": "Revealed Early",
    "guideline_violation": "Policy Breach",
    "interruption_error": None,
    "other": None,
    "called_wrong_tool": "Extra Action",
    "used_wrong_tool": "Extra Action",
    "used_wrong_tool_argument": "Wrong Arguments",
    "goal_partially_completed": "Missed Action",
    "took_unintended_action": "Extra Action",
}
_REVIEWED: Final = frozenset(  # what a reviewer that knows tau2's tags looks for
    type_ for tag, type_ in TAGS.items() if type_ and not tag.startswith(("called", "used", "goal", "took"))
)


@dataclass(frozen=True)
class Share:
    """Of the failed episodes under a condition, how many have a critical fault of the agent of one kind.

    of: a category or a type. failed: episodes. looked: of these, where somebody looked for it; none: the estimates are
    nan. tasks: of these. whole: every type of the category was looked for in every failed episode; else the share is
    the least it can be. share: interval over tasks. beside: share less the unsteered user's, nan for that one.
    """

    condition: str
    of: str
    failed: int
    looked: int
    tasks: int
    whole: bool
    share: Estimate
    beside: Estimate

    def __str__(self) -> str:
        return self.said(self.share)

    def said(self, figure: Estimate) -> str:
        """A figure of this share in words that tell nothing found from nobody looked."""
        if not self.failed:
            return "-"
        if not self.looked:
            return "not looked for"
        return f"{'' if self.whole else '≥ '}{figure}"


@dataclass(frozen=True)
class Faults:
    """What is said of one agent. diagnoses: of its failed episodes. categories, types: by condition, in the order of
    Table 11. notes: what a reader must know."""

    agent: str
    conditions: tuple[str, ...]
    diagnoses: tuple[Diagnosis, ...]
    categories: tuple[Share, ...]
    types: tuple[Share, ...]
    notes: tuple[str, ...] = ()

    @property
    def looked(self) -> frozenset[str]:
        """Types that were looked for in some episode."""
        return frozenset[str]().union(*(diagnosis.looked for diagnosis in self.diagnoses))

    def of(self, condition: str) -> list[Diagnosis]:
        return [diagnosis for diagnosis in self.diagnoses if diagnosis.episode.condition == condition]

    def endings(self, condition: str) -> Counter[str]:
        """Episodes by how they ended for the customer: ``not abandoned``, or the dominant reason."""
        return Counter(diagnosis.ending.label for diagnosis in self.of(condition))

    @property
    def record(self) -> dict[str, Any]:
        """For JSON: every share, and every fault of every failed episode."""
        return {
            "agent": self.agent,
            "categories": [_share(share) for share in self.categories],
            "types": [_share(share) for share in self.types],
            "endings": {name: dict(self.endings(name)) for name in self.conditions},
            "counts": _counts(self.diagnoses),
            "episodes": [diagnosis.record for diagnosis in self.diagnoses],
            "not_looked_for": [type_ for type_ in TYPES if type_ not in self.looked],
            "notes": list(self.notes),
        }


def diagnose(
    agent: Agent,
    judge: FaultJudge | None = None,
    *,
    appraise: Callable[[Sequence[Turn]], Sequence[Appraisal]] = appraise_all,
    progress: Callable[[int], None] | None = None,
) -> list[Diagnosis]:
    """The faults of every failed episode of an agent: those that rules find, those that its harness had found, and
    with a `judge` those that it finds. Infrastructure errors are left out: they say nothing about the agent.

    appraise: what each agent turn that answers a customer's does to the customer. progress: told 1 for each episode
    the judge was asked about. Raises JudgeError where the judge cannot be asked.
    """
    failed = [episode for episode in agent.episodes if not episode.success and not episode.infrastructure]
    known = references(agent.episodes)
    found = []
    for episode in sorted(failed, key=lambda episode: episode.cell):
        by_rules = diagnose_by_rules(episode, known.get((episode.domain, episode.task)), appraise)
        found.append(_with_review(by_rules))
    return judge.add(found, known, progress=progress) if judge else found


def measure_faults(agent: Agent, diagnoses: Sequence[Diagnosis]) -> Faults:
    """Shares by category and by type for each condition, beside the unsteered user's. diagnoses: of ``diagnose``."""
    conditions = agent.conditions
    kinds = [(category, types) for category, types in CATEGORIES.items()]
    categories = [_measured(diagnoses, name, category, types) for name in conditions for category, types in kinds]
    types = [_measured(diagnoses, name, type_, (type_,)) for name in conditions for type_ in TYPES]
    return Faults(agent.name, conditions, tuple(diagnoses), tuple(categories), tuple(types), tuple(_notes(diagnoses)))


def faults_of_review(review: Any) -> list[Fault]:
    """What ``tau2 review`` wrote of a simulation: its errors' tags as types; tags that no type says are left out.

    review: ``{"errors": [{"source", "severity", "error_tags", "turn_idx", "reasoning"}, …]}``. What helped or
    hindered critically is critical.
    """
    errors = review.get("errors") if isinstance(review, Mapping) else None
    found = []
    for error in errors if isinstance(errors, list) else ():
        if not isinstance(error, Mapping):
            continue
        source: Source = "user" if error.get("source") == "user" else "agent"
        severity: Severity = "critical" if str(error.get("severity")).startswith("critical") else "minor"
        tags, turn = error.get("error_tags"), error.get("turn_idx")
        at = turn if isinstance(turn, int) and turn >= 0 else 0
        for tag in tags if isinstance(tags, list) else ():
            if type_ := type_of_tag(str(tag)):
                found.append(Fault(type_, source, severity, at, str(error.get("reasoning") or tag)[:300], "harness"))
    return found


def type_of_tag(tag: str) -> str | None:
    """The type that a harness's own tag, or an episode's ``error_type``, stands for; None where none does."""
    plain = tag.strip().casefold().replace(" ", "_").replace("-", "_")
    ours = {type_.casefold().replace(" ", "_"): type_ for type_ in TYPES}
    return ours.get(plain) or TAGS.get(plain)


# ---- Parts


def _with_review(diagnosis: Diagnosis) -> Diagnosis:
    """With what the harness wrote of the episode. A review looks for all that it has tags for; an ``error_type`` names
    one fault and says nothing of others, so it is listed and makes nothing looked for."""
    episode = diagnosis.episode
    review = (episode.model_extra or {}).get("review")
    found = faults_of_review(review)
    looked = diagnosis.looked | (_REVIEWED if isinstance(review, Mapping) and "errors" in review else frozenset())
    if episode.error_type and (type_ := type_of_tag(episode.error_type)):
        at = max(len(episode.messages) - 1, 0)
        found.append(
            Fault(type_, "agent", "critical", at, f"the harness's error type: {episode.error_type}", "harness")
        )
    return replace(diagnosis, faults=(*diagnosis.faults, *found), looked=looked)


def _measured(diagnoses: Sequence[Diagnosis], condition: str, of: str, types: Sequence[str]) -> Share:
    wanted = frozenset(types)
    here = [diagnosis for diagnosis in diagnoses if diagnosis.episode.condition == condition]
    seen = [diagnosis for diagnosis in here if wanted & diagnosis.looked]
    plain = [d for d in diagnoses if d.episode.condition == UNSTEERED and wanted & d.looked]
    counted = _by_task(seen, wanted)
    both = [counted, _by_task(plain, wanted)]
    tasks = sorted(set().union(*both))
    rows = [[n for side in both for n in side.get(task, (0, 0))] for task in tasks]
    if condition == UNSTEERED or not (seen and plain):
        rows = []
    return Share(
        condition=condition,
        of=of,
        failed=len(here),
        looked=len(seen),
        tasks=len(counted),
        whole=all(wanted <= diagnosis.looked for diagnosis in here),
        share=over_units(np.array([counted[task] for task in sorted(counted)], np.float64), _ratio),
        beside=over_units(np.array(rows, np.float64), lambda drawn: _ratio(drawn[..., :2]) - _ratio(drawn[..., 2:])),
    )


def _by_task(diagnoses: Iterable[Diagnosis], wanted: frozenset[str]) -> dict[tuple[str, str], tuple[int, int]]:
    """By task: episodes with a critical fault of the agent among `wanted` that was looked for, and episodes."""
    counted: dict[tuple[str, str], tuple[int, int]] = {}
    for diagnosis in diagnoses:
        task = (diagnosis.episode.domain, diagnosis.episode.task)
        having, all_ = counted.get(task, (0, 0))
        counted[task] = having + bool(diagnosis.critical & wanted & diagnosis.looked), all_ + 1
    return counted


def _ratio(drawn: NDArray[np.float64]) -> NDArray[np.float64]:
    """Of (draws, tasks, 2) the first number's sum by the second's; undefined where that is 0."""
    having, all_ = drawn.sum(axis=-2).T
    return np.where(all_ > 0, having / np.maximum(all_, 1), np.nan)


def _counts(diagnoses: Iterable[Diagnosis]) -> list[dict[str, Any]]:
    """How often each fault occurs, by condition, source, severity and who found it."""
    counted = Counter(
        (diagnosis.episode.condition, category_of(f.type), f.type, f.source, f.severity, f.by)
        for diagnosis in diagnoses
        for f in diagnosis.faults
    )
    names = ("condition", "category", "type", "source", "severity", "by")
    return [{**dict(zip(names, key, strict=True)), "faults": n} for key, n in sorted(counted.items())]


def _share(share: Share) -> dict[str, Any]:
    return asdict(share) | {"share": share.share.record, "beside": share.beside.record}


def _notes(diagnoses: Sequence[Diagnosis]) -> list[str]:
    found = []
    if unknown := [d.episode for d in diagnoses if not d.referenced]:
        found.append(
            f"{len(unknown)} failed episodes keep no reference actions (the first: {unknown[0].cell}), so that rules "
            "can tell little but schema errors there; run them again with this version"
        )
    if unread := [d.episode for d in diagnoses if d.unread]:
        found.append(
            f"the judge's answer could not be read for {len(unread)} failed episodes (such as {unread[0].cell})"
        )
    return found
