"""Hand-written or generated? A discriminator between turns of people and of methods, on the unsteered model's states.

Logistic regression on mean states at the middle layer. It is cross-fitted: tasks are dealt to folds, and so are the
hand-written turns, and a turn is scored by a discriminator that saw no task and no reference of its fold. All methods
count alike, and so do both sides.

Every turn is read in one and the same short context, because hand-written turns have no task of ours, and a context
would tell the two apart.

``distance`` of a method is the AUC of a discriminator between it alone and the reference: 1 when each of its turns is
told apart, 0.5 when it is indistinguishable.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from traitbasis.chat import As, Turn
from traitbasis.dialogues import Dialogue
from traitbasis.errors import ChatTemplateError, EvaluationError
from traitbasis.evaluation.judgments import player_of, side_of
from traitbasis.files import append_whole
from traitbasis.metrics.classifier import fit_logistic
from traitbasis.metrics.estimate import Estimate, mean, over_tasks
from traitbasis.model import LanguageModel
from traitbasis.pairs import PairSet
from traitbasis.reading import Reader

FOLDS = 5

_CONTEXT = (Turn("system", "You are a customer."), Turn("agent", "Hello! How can I help you today?"))
_GROUP = 48  # turns read before they are kept
Reference = Sequence[tuple[str, str]]  # name, text; texts of one name stay in one fold


@dataclass(frozen=True)
class Discrimination:
    """log_odds: of "written by a person", of every customer turn of every dialogue in order; nan for a turn that has no
    words to read, and with dialogues of one task alone. distance: by player. reference: how many turns people wrote."""

    log_odds: tuple[float, ...]
    distance: Mapping[str, Estimate]
    reference: int


def hand_written(pair_sets: Iterable[PairSet]) -> list[tuple[str, str]]:
    """Both responses of all pairs that no vector is made from by default, each under its pair's name."""
    return [
        (f"{pairs.trait} {pair.id}", text)
        for pairs in pair_sets
        for pair in pairs.select("extra", "heldout")
        for text in (pair.positive, pair.negative)
    ]


def read_reference(path: Path) -> list[tuple[str, str]]:
    """Turns of real customers, one a line. Raises EvaluationError for a file with fewer than ten different ones."""
    try:
        lines = [" ".join(line.split()) for line in path.read_text("utf-8").split("\n")]
    except (OSError, UnicodeDecodeError) as error:
        raise EvaluationError(f"cannot read reference turns from {path}: {error}") from error
    lines = list(dict.fromkeys(line for line in lines if line))
    if len(lines) < 10:
        raise EvaluationError(f"{path} has {len(lines)} different turns, one a line; a reference needs at least 10")
    return [(line, line) for line in lines]


def discriminate(
    lm: LanguageModel,
    dialogues: Sequence[Dialogue],
    reference: Reference,
    *,
    as_: As = "user",
    cache: Path | None = None,
    progress: Callable[[int], None] = lambda done: None,
    seed: int = 0,
) -> Discrimination:
    """Score all turns of the dialogues' customers against the reference.

    cache: a JSONL file of states, so that a run that was killed goes on. progress: told 1 for every turn that is read,
    the reference's too.
    """
    turns = [(n, text) for n, dialogue in enumerate(dialogues) for text in dialogue.said]
    texts = [text if _has_words(text, dialogues[n]) else "" for n, text in turns]
    states = read_turns(lm, [text for _, text in reference] + texts, as_=as_, cache=cache, progress=progress)
    known, features = states[: len(reference)], states[len(reference) :]
    tasks = sorted({dialogue.task for dialogue in dialogues})
    folds = min(FOLDS, len(tasks))
    of_reference = _folds([name for name, _ in reference], folds).masked_fill(known[:, 0].isnan(), -1)
    of_turn = _folds([dialogues[n].task for n, _ in turns], folds).masked_fill(features[:, 0].isnan(), -1)
    players = [player_of(side_of(dialogues[n])) for n, _ in turns]
    log_odds, _ = _cross_fit(known, features, of_reference, of_turn, players)
    distance = {}
    for player in sorted({*players}):
        own = [i for i, other in enumerate(players) if other == player]
        _, told_apart = _cross_fit(known, features[own], of_reference, of_turn[own], [player] * len(own))
        by_task: dict[str, list[float]] = defaultdict(list)
        for i, value in zip(own, told_apart.tolist(), strict=True):
            by_task[dialogues[turns[i][0]].task].append(value)
        distance[player] = over_tasks(mean, by_task, seed=seed)
    return Discrimination(tuple(log_odds.tolist()), distance, len(reference))


def read_turns(
    lm: LanguageModel,
    texts: Sequence[str],
    *,
    as_: As = "user",
    cache: Path | None = None,
    progress: Callable[[int], None] = lambda done: None,
) -> Tensor:
    """Mean states of texts at the middle layer ``(n, d_model)`` float32, each read as a reply in one short context;
    nan for an empty text and for what the template cannot hold."""
    layer = len(lm.layers) // 2
    made_with = json.dumps([lm.fingerprint, lm.template_hash, as_, layer, [turn.text for turn in _CONTEXT]])
    keys = {text: hashlib.sha256(f"{made_with}\n{text}".encode("utf-8", "surrogatepass")).hexdigest() for text in texts}
    nothing = torch.full((lm.width,), math.nan)
    kept = {keys[""]: nothing} if "" in keys else {}
    kept.update(_read_states(cache, lm.width))
    repeats = Counter(texts)
    missing = [text for text, key in keys.items() if key not in kept]
    progress(len(texts) - sum(repeats[text] for text in missing))
    reader = Reader(lm, as_)

    def read(some: Sequence[str]) -> list[Tensor]:
        try:
            readings = reader.read([(_CONTEXT, text) for text in some], states=True)
        except ChatTemplateError:
            return [nothing] if len(some) == 1 else [row for text in some for row in read([text])]
        return [reading.states[layer] for reading in readings if reading.states is not None]

    for start in range(0, len(missing), _GROUP):
        group = missing[start : start + _GROUP]
        found = {keys[text]: row for text, row in zip(group, read(group), strict=True)}
        kept.update(found)
        if cache is not None:
            append_whole(cache, "".join(_packed(key, row) for key, row in found.items()))
        progress(sum(repeats[text] for text in group))
    return torch.stack([kept[keys[text]] for text in texts]) if texts else torch.zeros(0, lm.width)


# ---- Fitting


def _has_words(text: str, dialogue: Dialogue) -> bool:
    return bool(text.strip()) and text.strip() not in {token.strip() for token in dialogue.stop_tokens}


def _folds(names: Sequence[str], folds: int) -> Tensor:
    """The fold of each name ``(n,)``, by the order of names."""
    number = {name: i % max(folds, 1) for i, name in enumerate(sorted({*names}))}
    return torch.tensor([number[name] for name in names], dtype=torch.long)


def _cross_fit(
    reference: Tensor, turns: Tensor, of_reference: Tensor, of_turn: Tensor, players: Sequence[str]
) -> tuple[Tensor, Tensor]:
    """For each turn ``(n,)`` its log-odds of "written by a person", and the share of its fold's reference turns that
    have higher ones, ties counted half: the turn's part of the AUC. nan where nothing can be said; fold -1 is left out.
    """
    log_odds, told_apart = torch.full((2, len(turns)), math.nan)
    for fold in sorted({*of_turn.tolist()} - {-1}):
        seen_reference = (of_reference != fold) & (of_reference >= 0)
        seen = (of_turn != fold) & (of_turn >= 0)
        held_out, scored = of_reference == fold, of_turn == fold
        if not (seen_reference.any() and seen.any() and held_out.any()):
            continue
        owners = [players[i] for i in seen.nonzero()[:, 0].tolist()]
        turns_of = Counter(owners)
        people = int(seen_reference.sum())
        importance = [0.5 / people] * people + [0.5 / len(turns_of) / turns_of[owner] for owner in owners]
        labels = torch.cat([torch.ones(people), torch.zeros(len(owners))])
        features = torch.cat([reference[seen_reference], turns[seen]])
        weights, bias = fit_logistic(features, labels, torch.tensor(importance))
        own, theirs = turns[scored] @ weights + bias, reference[held_out] @ weights + bias
        log_odds[scored] = own
        told_apart[scored] = ((theirs > own[:, None]).float() + 0.5 * (theirs == own[:, None]).float()).mean(1)
    return log_odds, told_apart


# ---- States on disk


def _packed(key: str, row: Tensor) -> str:
    state = base64.b64encode(row.numpy().astype("<f4").tobytes()).decode()
    return json.dumps({"key": key, "state": state}) + "\n"


def _read_states(cache: Path | None, width: int) -> dict[str, Tensor]:
    """States by key. A line that a killed run left half-written is skipped, and closed."""
    kept: dict[str, Tensor] = {}
    if cache is None or not cache.is_file():
        return kept
    text = cache.read_text("utf-8", errors="replace")
    for line in text.split("\n"):
        try:
            record = json.loads(line)
            row = np.frombuffer(base64.b64decode(record["state"], validate=True), "<f4")
        except (ValueError, TypeError, LookupError):
            continue
        if len(row) == width:
            kept[str(record["key"])] = torch.tensor(row)
    if text and not text.endswith("\n"):
        with cache.open("a", encoding="utf-8") as file:
            file.write("\n")
    return kept
