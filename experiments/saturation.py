"""How many pairs make a vector? The paper says that the effect saturates at four (section 4).

For each trait and n = 1, 2, 4, 8, 16, vectors are made of random subsets of the 16 pairs that are not held out. Each is
added at the trait's layer in the same dose, and measured on what no subset holds:

agreement: mean cosine between the differences of the subset's pairs. It does not grow with n: more pairs only make it
less noisy. cosine with all: with the vector of all 16, of which the subset is a part. cosine with held-out: with the
direction of the 8 held-out pairs, of which no subset holds any. AUC: how well the vector ranks held-out responses.
preference, fact cost: nats per token, by ``metrics/likelihood.py``, on the held-out pairs; nothing is sampled.
expression: turns on contexts that are in no pair, read by the probe, which the held-out pairs make, less the unsteered
turn to the same context. (The classifier is trained on pairs that are in the vectors here, and is left out.)

Bands are 95 % bootstrap intervals over subsets and, within them, over held-out pairs or turns. There is one subset of
16, so its band is over pairs or turns alone.

The rule, stated before anything was measured, of AUC, preference, fact cost and expression:
  within: the smallest n from which on every mean lies in the band of n = 16. Wide bands make that easy.
  no different: the smallest n from which on the band of the difference to n = 16, pair by pair and turn by turn, holds
  0. That is the stricter one.
  share: the mean at n = 4 over the mean at n = 16 (of AUC: above 0.5).
Where the band of n = 16 holds "no effect" (an AUC of 0.5, otherwise 0), there is nothing to saturate.

    python experiments/saturation.py              # about 8 minutes on 2 cores
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import comb
from pathlib import Path
from typing import Any

import torch
from common import Interval, own_basis, progress, run, table, versions, write_json
from torch import Tensor
from torch.nn.functional import cosine_similarity, normalize

from traitbasis.basis import DEFAULT_DOSE
from traitbasis.chat import As
from traitbasis.contexts import read_contexts
from traitbasis.errors import PairError, SweepError
from traitbasis.extract import mean_cosine
from traitbasis.metrics.fidelity import Sides, TraitProbe
from traitbasis.metrics.likelihood import PairLikelihood
from traitbasis.model import load_model
from traitbasis.pairs import PAPER_TRAITS, Pair, PairSet, load_pairs, pair_set_hash
from traitbasis.reading import Reader
from traitbasis.sweep import Generator, Spec, Store

SIZES = (1, 2, 4, 8, 16)
FULL = SIZES[-1]
# What is measured of a vector: one value for each held-out pair or turn, or one for the vector. Title and format.
MEASURES = {
    "agreement": ("agreement", ".2f"),
    "cosine_all": ("cosine with all", ".2f"),
    "cosine_heldout": ("cosine with held-out", ".2f"),
    "auc": ("AUC", ".2f"),
    "preference": ("preference", "+.3f"),
    "fact_cost": ("fact cost", "+.3f"),
    "expression": ("expression", "+.2f"),
}
RULED = {"auc": 0.5, "preference": 0.0, "fact_cost": 0.0, "expression": 0.0}  # and what they are without an effect

Vector = dict[str, Any]  # a measured vector: n, number, pairs, and lists of values by name


@dataclass(frozen=True)
class Point:
    """A measure at one n: its mean over subsets with its band, and the difference to n = 16, where there is one."""

    n: int
    subsets: int
    value: Interval
    difference: Interval | None


@dataclass(frozen=True)
class Saturation:
    """What the rule says: n, or None where not even n = 8 passes. effect: whether the band of n = 16 is apart from no
    effect; else there is nothing to saturate, and the others are None. share: what n = 4 has of the effect."""

    effect: bool
    within: int | None
    no_different: int | None
    share: float | None


class Pairs:
    """A trait's pairs, read once: vectors of subsets are means of differences.

    differences: ``(16, d_model)`` at `layer`, positive minus negative. unit: length of dose 1, the mean norm of a
    response token there.
    """

    def __init__(self, reader: Reader, pair_set: PairSet, layer: int) -> None:
        self.pairs, self.heldout = pair_set.select("default", "extra"), pair_set.select("heldout")
        if len(self.pairs) < FULL or not self.heldout:
            raise PairError(
                f"{pair_set.trait}: this experiment takes {FULL} pairs that are not held out, and some that are; there "
                f"are {len(self.pairs)} and {len(self.heldout)}"
            )
        self.pairs = self.pairs[:FULL]
        positive, negative, norms = _read(reader, self.pairs)
        held_positive, held_negative, _ = _read(reader, self.heldout)
        self.layer, self.unit = layer, float(norms[layer])
        self.differences = (positive - negative)[:, layer]
        self.held_positive, self.held_negative = held_positive[:, layer], held_negative[:, layer]
        # The probe is made of the held-out pairs; the others only choose the layer where it reads.
        none = positive[:0]
        sides = Sides(
            {"default": positive, "extra": none, "heldout": held_positive},
            {"default": negative, "extra": none, "heldout": held_negative},
        )
        self.probe = TraitProbe.from_sides(pair_set.trait, sides, reader.as_)

    def addition(self, subset: Sequence[int], dose: float) -> dict[int, Tensor]:
        """The subset's vector, as long as `dose` says."""
        return {self.layer: normalize(self.differences[list(subset)].mean(0), dim=0) * dose * self.unit}

    def compare(self, subset: Sequence[int]) -> dict[str, list[float]]:
        """What the hidden states of pairs say about a subset's vector."""
        chosen = self.differences[list(subset)]
        vector = chosen.mean(0)
        held = self.held_positive.mean(0) - self.held_negative.mean(0)
        high, low = self.held_positive @ vector, self.held_negative @ vector
        # A positive's share of the negatives that it outranks; the mean over positives is the AUC.
        above = ((high[:, None] > low) + 0.5 * (high[:, None] == low)).mean(1)
        found = {
            "cosine_all": [float(cosine_similarity(vector, self.differences.mean(0), dim=0))],
            "cosine_heldout": [float(cosine_similarity(vector, held, dim=0))],
            "auc": above.tolist(),
        }
        if len(subset) > 1:
            found["agreement"] = [float(mean_cosine(chosen[:, None])[0])]
        return {name: [round(value, 4) for value in values] for name, values in found.items()}


def _read(reader: Reader, pairs: Sequence[Pair]) -> tuple[Tensor, Tensor, Tensor]:
    """Mean states of positives and negatives, ``(pairs, layers, d_model)``, and mean norms ``(layers,)`` of both."""
    readings = reader.read([(p.context, text) for p in pairs for text in (p.positive, p.negative)], states=True)
    states = torch.stack([reading.states for reading in readings if reading.states is not None])
    norms = torch.stack([reading.norms for reading in readings if reading.norms is not None])
    return states[0::2], states[1::2], norms.mean(0)


def draw_subsets(trait: str, n: int, count: int, seed: int = 0) -> list[tuple[int, ...]]:
    """`count` different subsets of n of the 16 pairs, fewer where there are no more; the first are the same for any
    count."""
    rng = random.Random(f"{seed} {trait} {n}")
    found: dict[tuple[int, ...], None] = {}
    while len(found) < min(count, comb(FULL, n)):
        found[tuple(sorted(rng.sample(range(FULL), n)))] = None
    return list(found)


def measure_trait(
    generator: Generator,
    pair_set: PairSet,
    layer: int,
    dose: float,
    folder: Path,
    *,
    subsets: int,
    written: int,
    advance: Callable[[int], None] = lambda done: None,
) -> dict[str, Any]:
    """All vectors of a trait, measured. Goes on where an earlier call ended. written: subsets of each n of which turns
    are generated. advance: told the share of the trait's work, in vectors, that is done."""
    trait, seed = pair_set.trait, generator.settings["seed"]
    reader = Reader(generator.lm, generator.as_)  # of pairs; the generator's keeps the contexts
    pairs = Pairs(reader, pair_set, layer)
    header = {
        **generator.settings,
        "trait": trait,
        "layer": layer,
        "dose": dose,
        "pairs": pair_set_hash((*pairs.pairs, *pairs.heldout)),
    }
    store = Store(folder / f"{trait}.jsonl", header)
    wanted = [(n, i, subset) for n in SIZES for i, subset in enumerate(draw_subsets(trait, n, subsets, seed))]

    likely = {(line["n"], line["number"]): line for line in store.lines if line.get("kind") == "vector"}
    advance(sum((n, i) in likely for n, i, _ in wanted))
    if missing := [(n, i, subset) for n, i, subset in wanted if (n, i) not in likely]:
        heldout = PairLikelihood(reader, pairs.heldout)
        for n, i, subset in missing:
            measured = heldout.measure(pairs.addition(subset, dose))
            line = {
                "kind": "vector",
                "n": n,
                "number": i,
                "pairs": [pairs.pairs[k].id for k in subset],
                **pairs.compare(subset),
                "preference": _rounded(measured.preference),
                "fact_cost": _rounded(measured.fact_cost),
            }
            store.append(line)
            likely[n, i] = line
            advance(1)

    shown = {(row["n"], row["number"]): row for line in store.lines for row in line.get("turns", ())}
    cells = [(0, 0, ()), *((n, i, subset) for n, i, subset in wanted if i < written)]
    if missing := [(n, i, subset) for n, i, subset in cells if (n, i) not in shown]:
        additions = [pairs.addition(subset, dose) if n else {} for n, _, subset in missing]
        texts = generator.draw(additions, [""] * len(missing))
        specs = [Spec("steered", trait, layer, dose) if n else Spec("unsteered") for n, _, _ in missing]
        drawn = generator.measure(specs, texts, {trait: (pairs.probe, None)})
        rows = [
            {"n": n, "number": i, "turns": [asdict(turn) for turn in cell.turns]}
            for (n, i, _), cell in zip(missing, drawn, strict=True)
        ]
        store.append({"kind": "turns", "turns": rows})  # in one line: what was drawn together is kept together
        shown |= {(row["n"], row["number"]): row for row in rows}
    advance(len(cells))

    def expression(n: int, number: int) -> list[float]:
        return [turn["scores"][f"probe:{trait}"] for turn in shown[n, number]["turns"]]

    vectors = []
    for n, i, _ in wanted:
        vector = {name: value for name, value in likely[n, i].items() if name != "kind"}
        if i < written:
            own, plain = expression(n, i), expression(0, 0)
            vector["expression"] = [round(a - b, 4) for a, b in zip(own, plain, strict=True)]
        vectors.append(vector)
    return {
        "layer": layer,
        "dose": dose,
        "layer_norm": round(pairs.unit, 4),
        "probe": {"layer": pairs.probe.layer, "auc": round(pairs.probe.auc, 4)},
        "vectors": vectors,
        "turns": [shown[n, i] for n, i, _ in cells],
    }


def curve(vectors: Sequence[Vector], measure: str) -> list[Point]:
    """A measure by n, over the vectors that have it."""
    by_size = {
        n: torch.tensor(rows) for n in SIZES if (rows := [v[measure] for v in vectors if v["n"] == n and measure in v])
    }
    full = by_size.get(FULL)
    points = []
    for n, values in by_size.items():
        paired = full is not None and n != FULL and values.shape[1] > 1
        points.append(
            Point(n, len(values), band(values), band(values - full[0]) if paired and full is not None else None)
        )
    return points


def band(values: Tensor, repeats: int = 2000) -> Interval:
    """Mean of ``(subsets, units)`` values; subsets and units (pairs, turns) are both resampled."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(len(values), (repeats, len(values)), generator=generator)
    columns = torch.randint(values.shape[1], (repeats, values.shape[1]), generator=generator)
    means = values[rows[:, :, None], columns[:, None, :]].mean((1, 2))
    low, high = torch.quantile(means, torch.tensor([0.025, 0.975])).tolist()
    return Interval(*(round(value, 4) for value in (float(values.mean()), low, high)))


def saturation(points: Sequence[Point], nothing: float = 0.0) -> Saturation:
    """The rule (see above) on one measure's curve, which must reach n = 16. nothing: its value without any effect."""
    at = {point.n: point for point in points}
    full = at[FULL].value
    if full.low <= nothing <= full.high:
        return Saturation(False, None, None, None)

    def from_which(passes: Callable[[Point], bool]) -> int | None:
        found = None
        for point in sorted(points, key=lambda point: -point.n):
            if point.n == FULL:
                continue
            if not passes(point):
                break
            found = point.n
        return found

    return Saturation(
        True,
        from_which(lambda point: full.low <= point.value.mean <= full.high),
        from_which(lambda point: point.difference is not None and point.difference.low <= 0 <= point.difference.high),
        round((at[4].value.mean - nothing) / (full.mean - nothing), 3) if 4 in at else None,
    )


def expected_cosine(agreement: float, n: int) -> float:
    """Cosine of a mean of n differences with the mean of endlessly many, if single ones agree by `agreement`:
    ``sqrt(n a / (1 + (n - 1) a))`` (Spearman 1910, Brown 1910). 0 when they do not agree."""
    return float(max(n * agreement / (1 + (n - 1) * agreement), 0.0) ** 0.5) if agreement > 0 else 0.0


def show(found: Mapping[str, Mapping[str, Any]], title: str) -> None:
    """Print the tables as Markdown."""
    print(title + "\n")
    curves = {trait: {name: curve(of["vectors"], name) for name in MEASURES} for trait, of in found.items()}
    rows = []
    for trait, of in curves.items():
        at = {name: {point.n: point for point in points} for name, points in of.items()}
        agreement = at["agreement"][FULL].value.mean
        for n in SIZES:
            cells = [format(at[name][n].value, form) if n in at[name] else "" for name, (_, form) in MEASURES.items()]
            rows.append([trait, str(n), str(at["auc"][n].subsets), *cells, f"{expected_cosine(agreement, n):.2f}"])
    print(table(["trait", "n", "subsets", *(title for title, _ in MEASURES.values()), "expected cosine"], rows))
    print(
        "\nexpected cosine: with the vector of endlessly many such pairs, if pairs agree as these 16 do "
        "(sqrt(n a / (1 + (n - 1) a))).\n"
    )
    rows, at_four = [], []
    for name, nothing in RULED.items():
        told = {trait: saturation(of[name], nothing) for trait, of in curves.items()}
        for trait, said in told.items():
            share = "" if said.share is None else f"{said.share:.0%}"
            answers = [_from(said.within), _from(said.no_different)] if said.effect else ["no effect at 16", ""]
            rows.append([MEASURES[name][0], trait, *answers, share])
        effects = [said for said in told.values() if said.effect]
        count = sum(said.within is not None and said.within <= 4 for said in effects)
        of_those = f"{count} of the {len(effects)} traits with an effect"
        at_four.append(f"{MEASURES[name][0]}: n = 4 is within the band of n = 16 for {of_those}")
    print(table(["measure", "trait", "within the band of 16", "no different from 16", "n = 4 has of 16"], rows))
    print("\n" + "\n".join(at_four))


def _from(n: int | None) -> str:
    return "not at 8" if n is None else f"from n = {n}"


def _rounded(values: Tensor) -> list[float]:
    return [round(value, 4) for value in values.tolist()]


def plot(found: Mapping[str, Mapping[str, Any]], path: Path) -> bool:
    """Draw the curves with their bands; False, and nothing drawn, without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams["svg.hashsalt"] = "saturation"  # the same figures draw the same file
    names = [name for name in MEASURES if name != "cosine_all"]
    figure, panels = pyplot.subplots(2, 3, figsize=(11, 6), layout="constrained", sharex=True)
    for axes, name in zip(panels.flat, names, strict=True):
        for trait, of in found.items():
            points = curve(of["vectors"], name)
            sizes = [point.n for point in points]
            (line,) = axes.plot(sizes, [point.value.mean for point in points], "o-", markersize=3, label=trait)
            low, high = [p.value.low for p in points], [p.value.high for p in points]
            axes.fill_between(sizes, low, high, color=line.get_color(), alpha=0.12, linewidth=0)
        axes.axvline(4, color="gray", linewidth=0.8, linestyle=":")
        axes.set_title(MEASURES[name][0], fontsize=10)
        axes.set_xscale("log", base=2)
        axes.set_xticks(SIZES, [str(n) for n in SIZES])
    for axes in panels[1]:
        axes.set_xlabel("pairs in the vector")
    panels[0, 0].legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
    return True


def parse(arguments: Iterable[str] | None = None) -> argparse.Namespace:
    here = Path(__file__).parent
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument(
        "--traits", default=",".join(PAPER_TRAITS), help="with commas; each needs 16 pairs and held-out"
    )
    parser.add_argument("--layer", type=int, help="for all traits; by default each trait's in the model's basis")
    parser.add_argument("--dose", type=float, default=DEFAULT_DOSE)
    parser.add_argument("--subsets", type=int, default=8, help="random subsets of each n below 16")
    parser.add_argument("--written", type=int, default=3, help="of how many of them turns are generated")
    parser.add_argument("--turns", type=int, default=10, help="turns of each")
    parser.add_argument("--max-tokens", type=int, default=40, help="longest turn")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--contexts", type=Path, help="evaluation contexts; by default those of the layer sweep")
    parser.add_argument("--out", type=Path, default=here / "results" / "saturation.json")
    options = parser.parse_args(None if arguments is None else list(arguments))
    if options.subsets < 1 or options.written < 1 or not options.dose > 0:
        parser.error("--subsets, --written and --dose must be above 0")
    return options


def main(arguments: Iterable[str] | None = None) -> None:
    options = parse(arguments)
    pair_sets = [load_pairs(name.strip()) for name in options.traits.split(",")]
    contexts = read_contexts(options.contexts)
    lm = load_model(options.model, dtype=options.dtype)
    basis = own_basis(lm)
    layers = {column.trait: column.layer for column in basis.columns} if basis else {}
    as_: As = basis.as_ if basis else "user"
    sizes = {"turns": options.turns, "seed": options.seed, "max_tokens": options.max_tokens}
    vectors = [min(options.subsets, comb(FULL, n)) for n in SIZES]
    steps = sum(vectors) + sum(min(options.written, count) for count in vectors) + 1
    layers |= {} if options.layer is None else {pair_set.trait: options.layer for pair_set in pair_sets}
    if not all(0 <= layer < len(lm.layers) for layer in layers.values()):
        raise SweepError(f"layer {options.layer} does not exist; {lm.name} has layers 0 to {len(lm.layers) - 1}")
    found = {}
    with (
        Generator(lm, contexts, as_=as_, **sizes) as generator,
        progress("measuring", steps * len(pair_sets)) as advance,
    ):
        for pair_set in pair_sets:
            found[pair_set.trait] = measure_trait(
                generator,
                pair_set,
                layers.get(pair_set.trait, len(lm.layers) // 2),
                options.dose,
                options.out.with_suffix(""),
                subsets=options.subsets,
                written=min(options.written, options.subsets),
                advance=advance,
            )
    for of in found.values():
        curves = {name: curve(of["vectors"], name) for name in MEASURES}
        of["curves"] = {name: [asdict(point) for point in points] for name, points in curves.items()}
        of["saturation"] = {name: asdict(saturation(curves[name], nothing)) for name, nothing in RULED.items()}
    show(found, f"{lm.name}, {lm.dtype_name}, dose {options.dose:g}, {options.turns} turns a vector, as {as_}")
    made_by = {**generator.settings, "basis": basis.fingerprint if basis else None, "versions": versions()}
    write_json(options.out, {"made_by": made_by, "sizes": SIZES, "traits": found})
    drawn = options.out.with_suffix(".svg")
    print("\nsaved:", options.out)
    print(f"saved: {drawn}" if plot(found, drawn) else "no plot: that needs pip install 'traitbasis[plots]'")


if __name__ == "__main__":
    run(main)
