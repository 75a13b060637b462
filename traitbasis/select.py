"""Which layer, and about how much: chosen by measurement, on contexts that are in no pair.

Three sieves, each dearer than the one before. (1) *Screening*, no generation: do the pairs agree on a direction, and
does it tell apart pairs it was not made from? (2) *Likelihood*, nothing sampled: at each of some layers, what does one
dose do to the model's probabilities of held-back responses and of their facts? (3) *Turns*: at the best of those layers
and a few doses, turns are written and measured, beside an unsteered user, a user with the trait in its prompt, and a
random direction of the same dose.

The rule (``Rule``) first throws out what is damaged or loses facts, by floors fixed beforehand. Of what is left, all
that is within one standard error of the clearest expression counts as equally clear, and of those the one is taken that
costs the facts least. Where nothing is left, but something fails in nothing but facts, its layer is taken with the
dose that the facts bear: then the trait is there and weak. Confusion and incoherence look like the damage of an
overdose; what tells them apart is that the trait's own positive responses, written by people, set how surprising a turn
may be, and that a damaged turn loses its facts and has nothing to do with its instruction.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import combinations, groupby
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from torch import Tensor

from traitbasis.chat import As
from traitbasis.errors import SweepError
from traitbasis.extract import extract
from traitbasis.files import write_whole
from traitbasis.metrics.classifier import TraitClassifier, train_classifier
from traitbasis.metrics.fidelity import Sides, TraitProbe, auc, read_sides
from traitbasis.metrics.instruments import rank_correlation
from traitbasis.metrics.judge import Judge
from traitbasis.metrics.likelihood import PairLikelihood
from traitbasis.metrics.turns import INSTRUMENTS, Instruments, expression
from traitbasis.model import LanguageModel
from traitbasis.pairs import PAPER_TRAITS, PairSet, file_hash, load_pairs, pair_set_hash
from traitbasis.reading import Reader
from traitbasis.sweep import (
    BASELINES,
    UNSTEERED,
    Cell,
    Generator,
    Spec,
    Store,
    SweptTurn,
    persona_prompt,
    random_direction,
)
from traitbasis.trait_vector import TraitVector

logger = logging.getLogger("traitbasis.select")

# What a classifier learns to tell a trait from, whichever traits are asked for: results must not depend on company.
REFERENCE_TRAITS = PAPER_TRAITS
DOSES = (0.1, 0.2, 0.3)
LIKELIHOOD_DOSE = 0.2
_FREE = 0.01  # nats; a smaller fact cost counts as this
Progress = Callable[[int], None]


@dataclass(frozen=True)
class Screening:
    """What pairs alone say, by layer. agreement: mean cosine between single pairs' differences. auc, cohens_d: of pairs
    the vector was not made from, projected on it. probe_auc, classifier_auc: how well each instrument ranks pairs it
    was not made from. surprise: mean and standard deviation, nats per token, of the positive responses."""

    agreement: tuple[float, ...]
    auc: tuple[float, ...]
    cohens_d: tuple[float, ...]
    probe_layer: int
    probe_auc: float
    classifier_layer: int | None
    classifier_auc: float | None
    surprise: tuple[float, float]


@dataclass(frozen=True)
class Likely:
    """Sieve 2 at one layer: ``metrics/likelihood.py``, means over pairs; nats per token."""

    layer: int
    dose: float
    preference: float
    fact_cost: float
    kl: float


@dataclass(frozen=True)
class Summary:
    """A cell beside the unsteered one, turn by turn. gain: expression less the unsteered user's, mean of the
    instruments, with a 95 % bootstrap interval; over_random: less that of a random direction of this dose and layer.
    facts_change: 95 % interval of the share of facts stated less the unsteered user's. fact_cost, kl: of sieve 2."""

    layer: int | None
    dose: float
    gain: float
    low: float
    high: float
    by_instrument: Mapping[str, float]
    over_random: float | None
    facts: float
    facts_unsteered: float
    facts_change: tuple[float, float]
    fact_cost: float | None
    kl: float | None
    broken: float
    role_flip: float
    surprise: float
    relevance: float
    words: float
    rejected: tuple[str, ...] = ()


@dataclass(frozen=True)
class Rule:
    """Floors a cell must keep. Its expression must surely (95 % interval) be above the unsteered user's.

    The share of the facts that are stated must not surely be below the unsteered user's. fact_cost: nats per fact token
    (sieve 2); 0.25 makes each a fifth less likely, and is seen where ten turns would not show it.
    broken, role_flip: how much larger a share of turns may be. surprise: standard deviations above the mean of the
    trait's own positive responses, or of the unsteered turns if that is higher, in nats per token. relevance: share of
    the unsteered turns' that must be left. over_random: least lead over a random direction of the same dose.
    auc, agreement: screening.
    """

    fact_cost: float = 0.25
    broken: float = 0.1
    role_flip: float = 0.1
    surprise: float = 1.0
    relevance: float = 0.5
    over_random: float = 0.0
    auc: float = 0.75
    agreement: float = 0.05


RULE = Rule()


@dataclass(frozen=True)
class Selection:
    """What was measured for a trait, and what the rule chose; layer and dose are None when nothing passed.

    agreement: Spearman's rank correlation of each two instruments over all turns, such as ``probe~classifier``."""

    trait: str
    layer: int | None
    dose: float | None
    reason: str
    screening: Screening
    likelihood: tuple[Likely, ...]
    summaries: tuple[Summary, ...]
    prompted: Summary
    random: tuple[Summary, ...] = ()
    agreement: Mapping[str, float] = field(default_factory=dict)

    @property
    def steerable(self) -> bool:
        return self.layer is not None


class Selector:
    """Selects layers and doses for one trait after the other, on one model.

    home: folder of the model's vectors; the sweep's files go to `folder` in it, and a vector that is not there, or was
    made from other pairs, is extracted. layers: where turns are generated; None leaves it to sieve 2, which takes
    the `candidates` best of about ten. doses: tried at each of them. judge: a third instrument. progress: told how many
    of ``steps`` are done.
    """

    def __init__(
        self,
        generator: Generator,
        home: Path,
        *,
        folder: str = "selection",
        layers: Sequence[int] | None = None,
        candidates: int = 3,
        doses: Sequence[float] = DOSES,
        rule: Rule = RULE,
        judge: Judge | None = None,
        progress: Progress = lambda done: None,
    ) -> None:
        depth = len(generator.lm.layers)
        if layers is not None and (not layers or not all(0 <= z < depth for z in layers)):
            raise SweepError(f"layers {list(layers)} do not all exist; {generator.lm.name} has layers 0 to {depth - 1}")
        if not doses or not all(0 < dose <= 10 for dose in doses):
            raise SweepError(f"doses {list(doses)} must be above 0 and at most 10")
        self.generator, self.rule, self.progress = generator, rule, progress
        self.home, self.folder = home, home / folder
        self._layers, self._candidates = None if layers is None else sorted(set(layers)), candidates
        self._doses = tuple(sorted(set(doses)))
        self._judge = judge
        self._vectors: dict[str, TraitVector] = {}
        self._sides: dict[str, Sides] = {}
        self.pair_reader = Reader(generator.lm, generator.as_)  # of pairs; the generator's keeps the contexts
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"{BASELINES}.jsonl"
        with FileLock(f"{path}.lock"):
            self._baselines = Store(path, generator.settings)
        self._norms: Tensor | None = None
        self._pairs: tuple[str, PairLikelihood] | None = None

    @property
    def grid(self) -> list[int]:
        """Layers of sieve 2: those asked for, else every tenth of the depth, the middle among them."""
        if self._layers is not None:
            return self._layers
        depth = len(self.generator.lm.layers)
        step = max(1, depth // 10)
        return sorted({depth // 2, *range(step, depth - 1, step)} & set(range(depth)))

    @property
    def steps(self) -> int:
        """Steps of one trait: points of sieve 2, cells of sieve 3."""
        layers = len(self.grid) if self._layers is not None else min(self._candidates, len(self.grid))
        more = len([dose for dose in self._doses if dose != LIKELIHOOD_DOSE])
        return len(self.grid) + layers * (more + len(self._doses)) + 1

    def vector(self, pair_set: PairSet) -> TraitVector:
        """The trait's vector on this model."""
        lm, as_, path = self.generator.lm, self.generator.as_, self.home / f"{pair_set.trait}.safetensors"
        if pair_set.trait not in self._vectors:
            found = TraitVector.load(path) if path.is_file() else None
            if found is None or not _made_from(found, lm, pair_set, as_):
                if found is not None:
                    logger.warning("%s was made from other pairs or on another model; it is extracted again", path)
                found = extract(lm, pair_set, as_=as_)
                found.save(path)
            self._vectors[pair_set.trait] = found
        return self._vectors[pair_set.trait]

    def select(self, pair_set: PairSet) -> Selection:
        """Measure and choose. Goes on where an earlier call with the same settings ended; a trait that is done is read.

        Raises PairError when no pair is held out, SweepError when the files hold a sweep with other settings.
        """
        with FileLock(self.folder / f"{pair_set.trait}.lock"):  # whoever comes second finds the work done
            return self._select(pair_set)

    def _select(self, pair_set: PairSet) -> Selection:
        vector = self.vector(pair_set)
        header = {**self.generator.settings, "trait": pair_set.trait, "pairs": file_hash(pair_set)}
        store = Store(self.folder / f"{pair_set.trait}.jsonl", header)
        done = store.find("selection")
        wanted: dict[str, Any] = {"layers": self._layers, "doses": list(self._doses), "rule": asdict(self.rule)}
        if self._layers is None:
            wanted["candidates"] = self._candidates
        if self._judge:
            wanted["judge"] = [self._judge.url, self._judge.model]
        if done is not None and done.get("wanted") == wanted:
            with suppress(SweepError):  # an earlier version's: its cells are good all the same
                found = read_selection(done.get("selection", {}))
                self.progress(self.steps)
                return found
        sides, instruments = self._read(pair_set)
        screening = self._screening(vector, sides, *instruments[pair_set.trait])
        likelihood = self._likelihood(store, pair_set, vector, [(z, LIKELIHOOD_DOSE) for z in self.grid])
        layers = self._layers or best_layers(likelihood, self._candidates, self.rule)
        points = [(z, dose) for z in layers for dose in self._doses]
        likelihood += self._likelihood(store, pair_set, vector, [p for p in points if p[1] != LIKELIHOOD_DOSE])
        specs = [*(Spec("steered", pair_set.trait, *point) for point in points), Spec("prompted", pair_set.trait)]
        cells = self.generator.cells(specs, store, along(vector), instruments, persona_prompt(pair_set), self.progress)
        randoms = [Spec("random", None, *point) for point in points]
        plain, *control = self.baselines([UNSTEERED, *randoms], instruments)
        if self._judge:
            plain, *rest = judge_cells(self._judge, pair_set, self.generator, [plain, *control, *cells])
            control, cells = rest[: len(control)], rest[len(control) :]
        selection = choose(pair_set.trait, screening, likelihood, cells[:-1], cells[-1], plain, control, self.rule)
        store.append({"kind": "selection", "wanted": wanted, "selection": asdict(selection)})
        return selection

    def baselines(self, specs: Sequence[Spec], instruments: Instruments) -> list[Cell]:
        """Cells that all traits share, with these instruments' scores."""
        generator = self.generator
        (plain,) = self._shared([UNSTEERED], lambda spec: {})
        if self._norms is None:
            read = generator.reader.read(_turns(generator, plain), states=True)
            self._norms = torch.stack([reading.norms for reading in read if reading.norms is not None]).mean(0)
        norms = self._norms

        def addition(spec: Spec) -> dict[int, Tensor]:
            if spec.layer is None:
                return {}
            direction = random_direction(generator.lm.width, spec.layer, generator.settings["seed"])
            return {spec.layer: spec.dose * norms[spec.layer] * direction}

        # What is drawn together must not depend on what was asked for before: a layer's cells are one batch.
        groups = [list(group) for _, group in groupby(specs, key=lambda spec: spec.layer)]
        cells = [cell for group in groups for cell in self._shared(group, addition)]
        return [self.scored(cell, instruments) for cell in cells]

    def _shared(self, specs: Sequence[Spec], addition: Callable[[Spec], dict[int, Tensor]]) -> list[Cell]:
        """Cells that several processes may want at the same time: the first draws them, the others read them."""
        with FileLock(f"{self._baselines.path}.lock"):
            self._baselines.reload()
            return self.generator.cells(specs, self._baselines, addition, {})

    def scored(self, cell: Cell, instruments: Instruments) -> Cell:
        """A cell with these instruments' scores beside its own, by reading its turns again if need be."""
        states = self.generator.states
        if cell.spec not in states:  # it was drawn by an earlier run
            read = self.generator.reader.read(_turns(self.generator, cell), states=True)
            states[cell.spec] = torch.stack([reading.states for reading in read if reading.states is not None])
        shown = expression(states[cell.spec], instruments)
        turns = [
            replace(turn, scores={**turn.scores, **{name: float(values[i]) for name, values in shown.items()}})
            for i, turn in enumerate(cell.turns)
        ]
        return replace(cell, turns=tuple(turns))

    def instruments(self, pair_set: PairSet) -> Instruments:
        """What measures a trait's expression: made from pairs that its vector is not made from, each from others."""
        return self._read(pair_set)[1]

    def _read(self, pair_set: PairSet) -> tuple[Sides, Instruments]:
        trait, reader = pair_set.trait, self.pair_reader
        for name in REFERENCE_TRAITS:
            if name not in self._sides:
                reader.forget()
                self._sides[name] = read_sides(reader, load_pairs(name))
        shipped = trait in REFERENCE_TRAITS and pair_set.pairs == load_pairs(trait).pairs
        reader.forget()
        sides = self._sides[trait] if shipped else read_sides(reader, pair_set)
        probe = TraitProbe.from_sides(trait, sides, self.generator.as_)
        classifier = None
        if len(sides.positive["extra"]):
            known = dict(sorted({**self._sides, trait: sides}.items()))
            depth = len(self.generator.lm.layers)
            layers = sorted({depth // 2, *range(depth // 3, depth - 1, max(1, depth // 10))})
            classifier = train_classifier(trait, known, layers)
        return sides, {trait: (probe, classifier)}

    def _screening(
        self,
        vector: TraitVector,
        sides: Sides,
        probe: TraitProbe,
        classifier: TraitClassifier | None,
    ) -> Screening:
        positive, negative = (
            torch.einsum("nld,ld->nl", side, torch.nn.functional.normalize(vector.vector, dim=-1))
            for side in sides.of("extra", "heldout")
        )
        spread = ((positive.var(0) + negative.var(0)) / 2).sqrt()
        distance = (positive.mean(0) - negative.mean(0)) / spread
        surprise = sides.surprise
        return Screening(
            agreement=_rounded(vector.agreement),
            auc=tuple(round(auc(p, n), 4) for p, n in zip(positive.T, negative.T, strict=True)),
            cohens_d=_rounded(distance),
            probe_layer=probe.layer,
            probe_auc=round(probe.auc, 4),
            classifier_layer=classifier.layer if classifier else None,
            classifier_auc=round(classifier.auc, 4) if classifier else None,
            surprise=(round(float(surprise.mean()), 4), round(float(surprise.std()), 4)),
        )

    def likelihood(self, pair_set: PairSet) -> PairLikelihood:
        """Sieve 2's pairs: such as neither the vector nor the probe is made from, where there are some."""
        key = file_hash(pair_set)
        if self._pairs is None or self._pairs[0] != key:  # the trait at hand is asked again and again
            chosen = pair_set.select("extra") or pair_set.select("heldout")
            self._pairs = key, PairLikelihood(self.pair_reader, chosen)
        return self._pairs[1]

    def _likelihood(
        self, store: Store, pair_set: PairSet, vector: TraitVector, points: Sequence[tuple[int, float]]
    ) -> tuple[Likely, ...]:
        """Sieve 2 at these layers and doses; what the store has is not measured again."""
        stored = [Likely(**line["likely"]) for line in store.lines if line.get("kind") == "likelihood"]
        known = {(likely.layer, likely.dose): likely for likely in stored}
        if missing := [point for point in points if point not in known]:
            measured = self.likelihood(pair_set).measure_all([{z: vector.at_dose(z, dose)} for z, dose in missing])
            for (z, dose), found in zip(missing, measured, strict=True):
                values = (found.preference, found.fact_cost, found.kl)
                likely = known[z, dose] = Likely(z, dose, *(round(float(value.mean()), 4) for value in values))
                store.append({"kind": "likelihood", "likely": asdict(likely)})
        self.progress(len(points))
        return tuple(known[point] for point in points)


def best_layers(likelihood: Sequence[Likely], n: int, rule: Rule = RULE) -> list[int]:
    """The `n` layers, in order, where the preference rises most by a dose that the facts bear.

    That is the dose tried where it costs no more than the rule allows, else so much less in proportion."""
    alike = [at for at in likelihood if at.dose == LIKELIHOOD_DOSE]
    order = sorted(alike, key=lambda at: -at.preference * min(1.0, rule.fact_cost / max(at.fact_cost, _FREE)))
    return sorted(at.layer for at in order[:n])


def choose(
    trait: str,
    screening: Screening,
    likelihood: Sequence[Likely],
    cells: Sequence[Cell],
    prompted: Cell,
    unsteered: Cell,
    control: Sequence[Cell],
    rule: Rule = RULE,
) -> Selection:
    """Apply the rule to measured cells. control: cells of random directions at the layers and doses of `cells`."""
    at = {(cell.layer, cell.dose): summarize(cell, trait, unsteered) for cell in control}
    likely = {(found.layer, found.dose): found for found in likelihood}
    summaries = []
    for cell in cells:
        summary = summarize(cell, trait, unsteered)
        if (cell.layer, cell.dose) in at:
            summary = replace(summary, over_random=round(summary.gain - at[cell.layer, cell.dose].gain, 4))
        if found := likely.get((cell.layer, cell.dose)):  # type: ignore[arg-type]
            summary = replace(summary, fact_cost=found.fact_cost, kl=found.kl)
        summaries.append(replace(summary, rejected=_rejected(summary, unsteered, screening, rule)))
    best = clearest([summary for summary in summaries if not summary.rejected])
    dose, reason, failure = best.dose if best else None, "the clearest expression of what keeps the floors", ""
    if best is None and (costly := _costly(summaries)):
        best, dose = costly, _bearable(costly, summaries, rule)
        reason = (
            f"shows only at the cost of facts ({costly.gain:+.2f} at layer {costly.layer}, dose {costly.dose:g}, which "
            f"fails in {', '.join(costly.rejected)}); a dose of {dose:g} is what the facts bear there"
        )
    peak = max(screening.auc)
    if peak < rule.auc:
        failure = f"held-back pairs are not told apart at any layer (AUC {peak:.2f}, at least {rule.auc})"
    elif not max(screening.agreement) >= rule.agreement:  # one pair: nan
        failure = f"the pairs do not agree on a direction (mean cosine {max(screening.agreement):.2f})"
    elif best is None:
        most = max(summaries, key=lambda summary: summary.gain)
        failure = (
            f"no layer and dose keeps the floors; the clearest expression ({most.gain:+.2f}, layer {most.layer}, dose "
            f"{most.dose:g}) fails in {', '.join(most.rejected)}"
        )
    return Selection(
        trait,
        best.layer if best and not failure else None,
        dose if best and not failure else None,
        failure or reason,
        screening,
        tuple(likelihood),
        tuple(summaries),
        summarize(prompted, trait, unsteered),
        tuple(at.values()),
        agreement([unsteered, *control, *cells, prompted], trait),
    )


def _costly(summaries: Sequence[Summary]) -> Summary | None:
    """Of the cells that fail in nothing but facts, the one with the most expression for what it costs them."""
    only = [s for s in summaries if s.fact_cost is not None and set(s.rejected) <= {"facts", "fact_cost"}]
    return max(only, key=lambda s: s.gain / max(s.fact_cost or 0.0, _FREE), default=None)


def _bearable(costly: Summary, summaries: Sequence[Summary], rule: Rule) -> float:
    """A dose at a costly cell's layer that keeps the facts.

    Where turns lost facts, the largest smaller one that was seen to keep them, or half the smallest that was tried; and
    at most the one at which the fact cost would be the rule's, if it grew in proportion.
    """
    dose = costly.dose * min(1.0, rule.fact_cost / max(costly.fact_cost or 0.0, _FREE))
    if "facts" in costly.rejected:
        below = [s for s in summaries if s.layer == costly.layer and s.dose <= costly.dose]
        kept = [s.dose for s in below if not {"facts", "fact_cost"} & set(s.rejected)]
        dose = min(dose, max(kept, default=min(s.dose for s in below) / 2))
    return round(dose, 3)


def clearest(summaries: Sequence[Summary]) -> Summary | None:
    """Of all within one standard error of the clearest expression, the one that costs the facts least."""
    top = max(summaries, key=lambda summary: summary.gain, default=None)
    if top is None:
        return None
    error = (top.high - top.low) / (2 * 1.96)
    equal = [summary for summary in summaries if summary.gain >= top.gain - error]
    return min(equal, key=lambda summary: (summary.fact_cost or 0.0, -summary.gain))


def summarize(cell: Cell, trait: str, unsteered: Cell) -> Summary:
    """A cell beside the unsteered one; turns are compared context by context."""
    differences = gains(cell, trait, unsteered)
    gain = mean_gain(differences)
    low, high = bootstrap(gain)
    lost, kept = bootstrap(cell.scores("facts") - unsteered.scores("facts"))
    means: dict[str, Any] = {
        name: round(float(cell.scores(name).mean()), 4)
        for name in ("facts", "broken", "role_flip", "surprise", "relevance", "words")
    }
    return Summary(
        layer=cell.layer,
        dose=cell.dose,
        gain=round(float(gain.mean()), 4),
        low=round(low, 4),
        high=round(high, 4),
        by_instrument={name: round(float(value.nanmean()), 4) for name, value in differences.items()},
        over_random=None,
        facts_unsteered=round(float(unsteered.scores("facts").mean()), 4),
        facts_change=(round(lost, 4), round(kept, 4)),
        fact_cost=None,
        kl=None,
        **means,
    )


def along(vector: TraitVector) -> Callable[[Spec], dict[int, Tensor]]:
    """What a spec's layer and dose add, along a trait's vector."""
    return lambda spec: {} if spec.layer is None else {spec.layer: vector.at_dose(spec.layer, spec.dose)}


def judge_cells(
    judge: Judge,
    pair_set: PairSet,
    generator: Generator,
    cells: Sequence[Cell],
    progress: Progress | None = None,
) -> list[Cell]:
    """Cells with a judge's scores beside the others'; what it gave no readable answer to has none (nan). progress: told
    how many turns were judged."""
    items = [item for cell in cells for item in _turns(generator, cell)]
    scores = iter(judge.score(pair_set.definition, pair_set.opposite, pair_set.trait, items, progress=progress))

    def scored(turn: SweptTurn) -> SweptTurn:
        score = next(scores)
        return replace(
            turn, scores={**turn.scores, f"judge:{pair_set.trait}": float("nan") if score is None else score}
        )

    return [replace(cell, turns=tuple(map(scored, cell.turns))) for cell in cells]


def gains(cell: Cell, trait: str, unsteered: Cell) -> dict[str, Tensor]:
    """Expression above the unsteered turn to the same context, ``(turns,)``, by instrument."""
    measured = [name for name in INSTRUMENTS if f"{name}:{trait}" in cell.turns[0].scores]
    return {name: cell.scores(f"{name}:{trait}") - unsteered.scores(f"{name}:{trait}") for name in measured}


def mean_gain(by_instrument: Mapping[str, Tensor]) -> Tensor:
    """Mean of the instruments, ``(turns,)``; one that says nothing of a turn is left out there."""
    return torch.stack(list(by_instrument.values())).nanmean(0)


def agreement(cells: Sequence[Cell], trait: str) -> dict[str, float]:
    """Spearman's rank correlation between instruments over all turns of `cells`."""
    scores = {
        name: [turn.scores[f"{name}:{trait}"] for cell in cells for turn in cell.turns]
        for name in INSTRUMENTS
        if all(f"{name}:{trait}" in cell.turns[0].scores for cell in cells)
    }
    found = {f"{a}~{b}": rank_correlation(scores[a], scores[b]) for a, b in combinations(scores, 2)}
    return {pair: round(value, 4) for pair, value in found.items() if value == value}  # nan: all alike


def bootstrap(values: Tensor, repeats: int = 2000) -> tuple[float, float]:
    """95 % percentile interval of the mean of ``(n,)`` values; the same for the same values."""
    picks = torch.randint(len(values), (repeats, len(values)), generator=torch.Generator().manual_seed(0))
    low, high = torch.quantile(values[picks].mean(1), torch.tensor([0.025, 0.975])).tolist()
    return low, high


def _rejected(summary: Summary, unsteered: Cell, screening: Screening, rule: Rule) -> tuple[str, ...]:
    """Which floors a cell falls below."""

    def plain(name: str) -> float:
        return float(unsteered.scores(name).mean())

    ceiling = max(screening.surprise[0] + rule.surprise * screening.surprise[1], plain("surprise"))
    kept = {  # what is not a number keeps no floor
        "expression": summary.low > 0,
        "facts": summary.facts_change[1] >= 0,
        "fact_cost": summary.fact_cost is None or summary.fact_cost <= rule.fact_cost,
        "broken": summary.broken <= plain("broken") + rule.broken,
        "role_flip": summary.role_flip <= plain("role_flip") + rule.role_flip,
        "surprise": summary.surprise <= ceiling,
        "relevance": summary.relevance >= rule.relevance * plain("relevance"),
        "over_random": summary.over_random is None or summary.over_random > rule.over_random,
    }
    return tuple(name for name, good in kept.items() if not good)


def read_selection(values: Mapping[str, Any]) -> Selection:
    """A Selection out of a file. Raises SweepError when it is none of this version."""
    try:
        return _selection(values)
    except (KeyError, TypeError, AttributeError) as error:
        raise SweepError(f"a selection cannot be read ({error}); run `traitbasis select` again") from error


def _selection(values: Mapping[str, Any]) -> Selection:
    def frozen(value: Any) -> Any:
        return tuple(value) if isinstance(value, list) else value

    screening: dict[str, Any] = {name: frozen(value) for name, value in values["screening"].items()}
    return Selection(
        **{
            **{name: value for name, value in values.items() if name != "made_by"},
            "screening": Screening(**screening),
            "likelihood": tuple(Likely(**likely) for likely in values["likelihood"]),
            "summaries": tuple(_summary(summary) for summary in values["summaries"]),
            "prompted": _summary(values["prompted"]),
            "random": tuple(_summary(summary) for summary in values["random"]),
        }
    )


def save_selections(
    selections: Sequence[Selection], path: str | Path, made_by: Mapping[str, Mapping[str, Any]]
) -> Path:
    """Write choices as JSON, beside those of other traits that are there already. made_by: of each trait, what it was
    measured with."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_name(f".{path.name}.lock")):
        traits = read_selections(path) if path.is_file() else {}
        for selection in selections:
            traits[selection.trait] = {**asdict(selection), "made_by": dict(made_by[selection.trait])}
        content = {"format": "traitbasis.selection/1", "traits": dict(sorted(traits.items()))}
        write_whole(path, json.dumps(content, indent=1) + "\n")
    return path


def read_selections(path: str | Path) -> dict[str, dict[str, Any]]:
    """What ``save_selections`` wrote, by trait. Raises SweepError when it is none."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        if content["format"] != "traitbasis.selection/1":
            raise SweepError(f"{path} is no selection of this version; delete it and run `traitbasis select` again")
        traits: dict[str, dict[str, Any]] = content["traits"]
        if not isinstance(traits, dict) or not all(isinstance(values, dict) for values in traits.values()):
            raise TypeError("its traits are no objects")
    except FileNotFoundError as error:
        raise SweepError(f"no selection at {path}; make it with: traitbasis select") from error
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise SweepError(f"{path} is damaged ({error}); delete it and run `traitbasis select` again") from error
    return traits


def _summary(values: Mapping[str, Any]) -> Summary:
    return Summary(**{**values, "rejected": tuple(values["rejected"]), "facts_change": tuple(values["facts_change"])})


def _made_from(vector: TraitVector, lm: LanguageModel, pair_set: PairSet, as_: As) -> bool:
    """Whether a vector was made on this model from pairs of this set that are not held out, however many."""
    made = vector.provenance
    pairs = {pair.id: pair for pair in pair_set.select("default", "extra")}
    known = [pairs[name] for name in made.pair_ids if name in pairs]
    return (made.model_fingerprint, made.template_hash, made.as_, made.pair_set_hash) == (
        lm.fingerprint,
        lm.template_hash,
        as_,
        pair_set_hash(known),
    )


def _turns(generator: Generator, cell: Cell) -> list[tuple[Any, str]]:
    return [
        (generator.contexts[number].turns, turn.text)
        for (number, _), turn in zip(generator.cases, cell.turns, strict=True)
    ]


def _rounded(values: Tensor) -> tuple[float, ...]:
    return tuple(round(value, 4) for value in values.tolist())
