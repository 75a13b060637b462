"""The training set of SFT and LoRA: customer replies with the trait they show, and where each comes from.

Two sources. ``pairs``: the replies that make the vectors, positives for their trait and negatives for a neutral
customer; never an extra or a held-out pair, since the instruments are made from those. Beyond the pairs' own number
they are repeated with other names, ids, dates and amounts. ``steered``: replies that the steered simulator gives on
training tasks. That is the method distilled into weights, and a baseline that has it is a copy: it says so wherever its
figures stand.

The instruction is written as it is (``plain``), or in the prompt that `traitbasis eval collect` asks its users with
(``dialogue``), stop token included.

A file is JSON lines: a header with what made it, then samples, in turns one of each trait and one neutral, so that any
beginning of the file is a smaller set of the same mixture.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any, Literal

from traitbasis.chat import Turn
from traitbasis.collect import dialogue_prompt
from traitbasis.errors import EvaluationError
from traitbasis.files import alone, append_whole, write_whole
from traitbasis.pairs import Pair, PairSet, file_hash, fold, pair_set_hash
from traitbasis.simulator import UserSimulator
from traitbasis.sweep import versions
from traitbasis.tries import UserTurn, digest_seed

from .tasks import names, training_task
from .users import LEVEL_WORDS, prompted_user
from .values import Slots, replace_all, taken

FORMAT = "traitbasis.baselines.data/1"
Prompt = Literal["plain", "dialogue"]
_TOGETHER = 16  # turns drawn at once
_REDRAWS = 3  # of a turn that no guard accepts
_ALIKE = 50  # draws that must be known before a pair is held to have no other variant


@dataclass(frozen=True)
class Sample:
    """One reply to learn from.

    trait, level: what the customer shows; both None for a neutral one. context: the conversation before it, an
    instruction without any word about traits first. persona: what a customer who is told its trait is told. facts: of
    the instruction, by name or in order. made_by: where it comes from.
    """

    id: str
    source: str
    trait: str | None
    level: str | None
    context: tuple[Turn, ...]
    reply: str
    persona: str
    facts: tuple[str, ...]
    made_by: Mapping[str, Any]

    def turns(self, told: bool) -> tuple[Turn, ...]:
        """The context, with the persona in its instruction as the simulator puts it there, if `told`."""
        if not (told and self.persona):
            return self.context
        return (Turn("system", f"{self.context[0].text}\n\n{self.persona}"), *self.context[1:])


class SampleFile:
    """Samples on disk. An existing file of the same header is gone on with; one of another is refused."""

    def __init__(self, path: Path, header: Mapping[str, Any]) -> None:
        self.path, self.header = path, {"format": FORMAT, **header}
        self.samples: list[Sample] = []
        if path.is_file():
            found, self.samples, whole = _read(path)
            if different := sorted(k for k in found.keys() | self.header.keys() if found.get(k) != self.header.get(k)):
                raise EvaluationError(
                    f"{path} holds samples that were made with other settings ({', '.join(different)}); delete it, or "
                    "write elsewhere with --out"
                )
            if whole < path.stat().st_size:  # a line that a kill cut off
                os.truncate(path, whole)
        else:
            write_whole(path, json.dumps(self.header, ensure_ascii=False) + "\n")
        self._size = path.stat().st_size

    def append(self, samples: Sequence[Sample]) -> None:
        """Add samples and have them on disk. Raises EvaluationError when another run has added some meanwhile."""
        with alone(self.path, EvaluationError):
            if self.path.stat().st_size != self._size:
                raise EvaluationError(f"another run is writing {self.path}; wait for it, and run this again")
            append_whole(self.path, "".join(json.dumps(_line(sample), ensure_ascii=False) + "\n" for sample in samples))
            self._size = self.path.stat().st_size
        self.samples += samples


def read_samples(path: str | Path) -> tuple[dict[str, Any], list[Sample]]:
    """Header and samples. Raises EvaluationError for a file that is missing, damaged or empty."""
    path = Path(path)
    if not path.is_file():
        raise EvaluationError(f"no training set at {path}; make one with: python -m experiments.baselines data")
    header, samples, _ = _read(path)
    if not samples:
        raise EvaluationError(f"there is no sample in {path}; make it again")
    return header, samples


def data_hash(samples: Sequence[Sample]) -> str:
    """Identifies samples in their order (16 hex digits)."""
    return hashlib.sha256("\n".join(json.dumps(_line(sample)) for sample in samples).encode()).hexdigest()[:16]


def pair_samples(
    pair_sets: Mapping[str, PairSet], samples: int, path: Path, *, prompt: Prompt = "plain", seed: int = 0
) -> SampleFile:
    """Write `samples` replies of the default pairs to `path`.

    The pairs' own texts come first, then variants of them. A positive is labelled high and medium in turn: written
    pairs show a trait or do not, so a low one is not among them.
    Raises EvaluationError when the pairs have no more variants.
    """
    header = {
        "source": "pairs",
        "traits": list(pair_sets),
        "prompt": prompt,
        "seed": seed,
        "pair_files": {trait: file_hash(pair_set)[:16] for trait, pair_set in pair_sets.items()},
        "evaluation_values": _taken_hash(),
        **versions(),
    }
    file = SampleFile(path, header)
    for pair_set in pair_sets.values():
        pair_set.for_extraction()  # complains when there is no default pair
    positives = {trait: _variants([(trait, p) for p in s.select("default")], seed) for trait, s in pair_sets.items()}
    every = [(trait, pair) for trait, pair_set in pair_sets.items() for pair in pair_set.select("default")]
    streams = [
        *(_replies("positive", stream, pair_sets, prompt) for stream in positives.values()),
        _replies("negative", _variants(every, seed), pair_sets, prompt),
    ]
    made = list(islice((sample for round_ in zip(*streams, strict=False) for sample in round_), samples))
    if len(made) < samples:
        raise EvaluationError(
            f"the default pairs of {', '.join(pair_sets)} give no more than {len(made)} different samples, not "
            f"{samples}; ask for fewer, or for --source steered"
        )
    file.append(made[len(file.samples) :])
    return file


def steered_samples(
    simulator: UserSimulator,
    pair_sets: Mapping[str, PairSet],
    samples: int,
    path: Path,
    *,
    prompt: Prompt = "plain",
    seed: int = 0,
    best_of: int = 1,
    max_tokens: int = 60,
    temperature: float = 0.7,
    done: Callable[[int], None] = lambda samples: None,
) -> SampleFile:
    """Write `samples` turns of the steered simulator on training tasks to `path`; goes on where a killed run was.

    Traits take turns, and each trait's levels; every task is used once. best_of: turns drawn for each sample; the one
    that states most of the facts that were asked for is kept, the first of equals. A turn that no guard accepts is
    drawn again three times and then kept, marked ``failed_guard``.
    """
    header = {
        "source": "steered",
        "traits": list(pair_sets),
        "prompt": prompt,
        "seed": seed,
        "best_of": best_of,
        "max_tokens": max_tokens,
        "temperature": temperature,
        "guards": [guard.name for guard in simulator.guards],
        "pair_files": {trait: file_hash(pair_set)[:16] for trait, pair_set in pair_sets.items()},  # their definitions
        "evaluation_values": _taken_hash(),
        **simulator.provenance,
    }
    file = SampleFile(path, header)
    levels = {trait: cycle(LEVEL_WORDS) for trait in pair_sets}
    conditions: list[dict[str, str]] = []
    for trait in islice(cycle([*pair_sets, None]), samples):
        conditions.append({trait: next(levels[trait])} if trait else {})

    def draw(number: int) -> Sample:
        traits, task = conditions[number], training_task(number, seed)
        context = _prompted(task.context, prompt)
        messages = [
            {"role": {"system": "system", "agent": "user"}.get(turn.speaker, "assistant"), "content": turn.text}
            for turn in context
        ]
        drawn: list[tuple[int, UserTurn]] = []
        for attempt in range(best_of + _REDRAWS):
            turn_seed = digest_seed([seed, number, attempt]) % 2**32
            turn = simulator.reply(messages, traits, seed=turn_seed, max_tokens=max_tokens, temperature=temperature)
            if turn.failed_guard is None or attempt + 1 == best_of + _REDRAWS:
                drawn.append((turn_seed, turn))
            if attempt + 1 >= best_of and drawn:
                break
        asked = [fold(task.facts[name]) for name in task.asked]
        turn_seed, turn = max(drawn, key=lambda found: sum(fact in fold(found[1].text) for fact in asked))
        trait, level = next(iter(traits.items()), (None, None))
        return Sample(
            id=f"steered-{seed}-{number}",
            source="steered",
            trait=trait,
            level=level,
            context=context,
            reply=turn.text,
            persona=prompted_user(traits, pair_sets).about,
            facts=tuple(task.facts.values()),
            made_by={
                "task": task.id,
                "domain": task.domain,
                "basis": simulator.basis.fingerprint,
                "model_fingerprint": simulator.lm.fingerprint,
                "traits": turn.intensities,
                "dose": round(turn.dose, 6),
                "seed": turn_seed,
                "tries": turn.tries,
                "failed_guard": turn.failed_guard,
                "best_of": best_of,
                "temperature": temperature,
                "max_tokens": max_tokens,
            },
        )

    done(len(file.samples))
    with ThreadPoolExecutor(_TOGETHER) as pool:
        while len(file.samples) < samples:
            begin = len(file.samples)
            group = list(pool.map(draw, range(begin, min(begin + _TOGETHER, samples))))
            file.append(group)
            done(len(group))
    return file


def _variants(pairs: Sequence[tuple[str, Pair]], seed: int) -> Iterator[tuple[str, Pair, int, dict[str, str]]]:
    """Pairs in turns, as they are and then with other values: trait, pair, number of the variant, replacements."""
    live = [(trait, pair, Slots(_texts(pair)), set[str]()) for trait, pair in pairs]
    for variant in range(10**9):
        for entry in list(live):
            trait, pair, slots, seen = entry
            new: dict[str, str] = {}
            if variant:
                found = _unseen(slots, seen, random.Random(f"{seed} {trait} {pair.id} {variant}"))
                if found is None:
                    live.remove(entry)
                    continue
                new = found
            yield trait, pair, variant, new
        if not live:
            return


def _unseen(slots: Slots, seen: set[str], rng: random.Random) -> dict[str, str] | None:
    for _ in range(_ALIKE if slots else 0):
        new = slots.draw(names(), rng)
        if (key := json.dumps(new)) not in seen:
            seen.add(key)
            return new
    return None


def _replies(
    side: str,
    variants: Iterator[tuple[str, Pair, int, dict[str, str]]],
    pair_sets: Mapping[str, PairSet],
    prompt: Prompt,
) -> Iterator[Sample]:
    for trait, pair, variant, new in variants:
        level = ("high", "medium")[variant % 2] if side == "positive" else None
        traits = {trait: level} if level else {}
        reply = replace_all(getattr(pair, side), new)
        facts = tuple(replace_all(fact, new) for fact in pair.facts)
        if lost := [fact for fact in facts if fold(fact) not in fold(reply)]:
            raise EvaluationError(f"{trait}, pair {pair.id!r}: {lost[0]!r} is lost when {', '.join(new)} are replaced")
        yield Sample(
            id=f"{trait}-{pair.id}-{side}-{variant}",
            source="pairs",
            trait=trait if level else None,
            level=level,
            context=_prompted([Turn(turn.speaker, replace_all(turn.text, new)) for turn in pair.context], prompt),
            reply=reply,
            persona=prompted_user(traits, pair_sets).about,
            facts=facts,
            made_by={
                "pair": pair.id,
                "pair_trait": trait,
                "side": side,
                "use": pair.use,
                "pair_hash": pair_set_hash([pair])[:16],
                "variant": variant,
                "replaced": new,
            },
        )


def _prompted(context: Sequence[Turn], prompt: Prompt) -> tuple[Turn, ...]:
    """A context whose instruction, which all of them begin with, stands in the prompt."""
    if context[0].speaker != "system":
        raise EvaluationError(f"a context begins with {context[0].text[:40]!r}, and must with an instruction")
    text = context[0].text if prompt == "plain" else dialogue_prompt(context[0].text)
    return (Turn("system", text), *context[1:])


def _texts(pair: Pair) -> list[str]:
    return [*(turn.text for turn in pair.context), pair.positive, pair.negative, *pair.facts]


def _taken_hash() -> str:
    """Of the values that are kept away from: with others, other values are drawn."""
    return hashlib.sha256("\n".join(sorted(taken())).encode()).hexdigest()[:16]


def _line(sample: Sample) -> dict[str, Any]:
    return {**asdict(sample), "context": [{turn.speaker: turn.text} for turn in sample.context]}


def _read(path: Path) -> tuple[dict[str, Any], list[Sample], int]:
    """Header, samples, and how many bytes the whole lines take."""
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    try:
        header, *lines = [json.loads(line) for line in data[:whole].decode("utf-8").split("\n")[:-1]]
        if header["format"] != FORMAT:
            raise EvaluationError(f"{path} is no training set of this version (its format is {header['format']!r})")
        return header, [_sample(line) for line in lines], whole
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise EvaluationError(f"{path} is no training set, or is damaged: {error}") from error


def _sample(line: Mapping[str, Any]) -> Sample:
    context = tuple(Turn(speaker, text) for turn in line["context"] for speaker, text in turn.items())
    return Sample(**{**line, "context": context, "facts": tuple(line["facts"])})
