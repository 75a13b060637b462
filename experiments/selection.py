"""Is the chosen layer and dose any good? Measured on tasks that the choice never saw (experiments/scenarios.yaml).

For each trait, on the same tasks and seeds, without guards: *unsteered*; *prompted*, the trait's definition in the
instruction; *chosen*, the layer of ``traitbasis select`` with the calibrated medium, or with the selected dose where
the basis is not calibrated at that layer; *high* where it is; *middle*, the default before there was a choice: the
middle layer with a dose of 0.2; *middle, same dose* as chosen; *random*, a random direction at the chosen layer and
dose.

Expression is the mean of the instruments (the probe and the classifier, neither made from the vector's pairs, and a
judge where one is given), less the unsteered turn to the same task and seed. Facts: the share of a task's facts that
the turn states. Intervals are 95 % bootstrap intervals over tasks. The verdicts' rules, stated beforehand:

  above unsteered, above prompt-only, above random, beats the middle layer: the interval of the paired difference in
    expression lies above 0.
  facts not fewer than prompt-only's: the mean difference in facts is not below 0.
  random shows no trait: the interval of the random direction's expression does not lie above 0.

    python experiments/selection.py                              # about 12 minutes on 2 cores
    python experiments/selection.py --sheet sheet.csv --key key.json     # then: turns for a reader to rate, blind
    python experiments/selection.py --rated sheet.csv --key key.json     # what the ratings say of the instruments
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from common import Interval, over_tasks, own_basis, progress, run, table, versions, write_json
from ratings import read_ratings, show_ratings, write_sheet

from traitbasis.basis import DEFAULT_DOSE, Basis
from traitbasis.contexts import read_contexts
from traitbasis.errors import SweepError
from traitbasis.metrics.judge import Judge
from traitbasis.model import load_model
from traitbasis.pairs import PAPER_TRAITS, PairSet, load_pairs
from traitbasis.select import Selector, agreement, along, gains, judge_cells, mean_gain, read_selections
from traitbasis.sweep import UNSTEERED, Cell, Generator, Spec, Store, persona_prompt

COUNTED = ("broken", "role_flip", "surprise", "relevance", "words")  # plain means
Cells = Mapping[str, Cell]  # by the condition's name


@dataclass(frozen=True)
class Verdict:
    """A claim, whether it holds by its rule, and the paired difference that says so."""

    claim: str
    holds: bool
    difference: Interval

    def __str__(self) -> str:
        return f"{self.claim}: {'yes' if self.holds else 'no'}, {self.difference}"


def conditions(
    trait: str, choice: Mapping[str, Any], basis: Basis | None, depth: int
) -> tuple[dict[str, Spec], str | None]:
    """What is measured of a trait, by name, and a remark. choice: its entry of ``selection.json``; without a layer
    there (the trait did not screen) only what needs no choice is measured."""
    middle = depth // 2
    found = {
        "unsteered": UNSTEERED,
        "prompted": Spec("prompted", trait),
        "middle": Spec("steered", trait, middle, DEFAULT_DOSE),
    }
    layer, dose, high, remark = choice["layer"], choice["dose"], None, "the selected dose; the basis is not calibrated"
    if layer is None:
        return found, f"no layer and dose was chosen: {choice['reason']}"
    column = next((column for column in basis.columns if column.trait == trait), None) if basis else None
    if basis and column and column.layer == layer and column.limit is not None:
        dose, high = (round(basis.dose({trait: x}), 4) for x in (1.0, column.high))
        remark = "" if column.steerable else "served only when forced"
    found["chosen"] = Spec("steered", trait, layer, dose)
    if high is not None:
        found["high"] = Spec("steered", trait, layer, high)
    if layer != middle:
        found["middle, same dose"] = Spec("steered", trait, middle, dose)
    found["random"] = Spec("random", None, layer, dose)
    return found, remark or None


def measure(selector: Selector, pair_set: PairSet, specs: Mapping[str, Spec], done: Callable[[int], None]) -> Cells:
    """Cells of all conditions, by name. Goes on where an earlier call ended. done: told how many are measured."""
    trait, vector, instruments = pair_set.trait, selector.vector(pair_set), selector.instruments(pair_set)
    header = {**selector.generator.settings, "trait": trait, "pairs": vector.provenance.pair_set_hash}
    store = Store(selector.folder / f"{trait}.jsonl", header)

    shared = [spec for spec in specs.values() if spec.trait is None]
    found = dict(zip(shared, selector.baselines(shared, instruments), strict=True))
    done(len(shared))
    # One by one: conditions may be the same point.
    for spec in dict.fromkeys(spec for spec in specs.values() if spec.trait):
        (found[spec],) = selector.generator.cells([spec], store, along(vector), instruments, persona_prompt(pair_set))
        done(1)
    return {name: found[spec] for name, spec in specs.items()}


def judged(judge: Judge, pair_set: PairSet, generator: Generator, cells: Cells) -> Cells:
    """The cells with the judge's scores, nan where its answer could not be read."""
    turns = sum(len(cell.turns) for cell in cells.values())
    with progress(f"asking the judge about {pair_set.trait}", turns) as advance:
        return dict(zip(cells, judge_cells(judge, pair_set, generator, [*cells.values()], advance), strict=True))


def summarize(trait: str, cells: Cells, seeds: int) -> dict[str, dict[str, Any]]:
    """Figures by condition: expression of each instrument and facts, against the unsteered turns; plain means."""
    plain = cells["unsteered"]
    found: dict[str, dict[str, Any]] = {}
    for name, cell in cells.items():
        gained = gains(cell, trait, plain)
        found[name] = {
            "layer": cell.layer,
            "dose": cell.dose,
            "turns": len(cell.turns),
            "expression": over_tasks(mean_gain(gained), seeds).record,
            "by_instrument": {instrument: over_tasks(gain, seeds).record for instrument, gain in gained.items()},
            "facts": round(float(cell.scores("facts").mean()), 4),
            "facts_lost": over_tasks(plain.scores("facts") - cell.scores("facts"), seeds).record,
            **{of: round(float(cell.scores(of).mean()), 4) for of in COUNTED},
        }
    return found


def differences(trait: str, cells: Cells, seeds: int) -> dict[str, Interval]:
    """The paired differences that verdicts are read off; those of the conditions that were measured."""

    def gain(one: str, other: str) -> Interval:
        return over_tasks(mean_gain(gains(cells[one], trait, cells[other])), seeds)

    found = {"prompted": gain("prompted", "unsteered"), "middle": gain("middle", "unsteered")}
    if "chosen" in cells:
        found |= {f"chosen - {name}": gain("chosen", name) for name in cells if name not in ("chosen", "high")}
        found["random"] = gain("random", "unsteered")
        facts = cells["chosen"].scores("facts") - cells["prompted"].scores("facts")
        found["facts: chosen - prompted"] = over_tasks(facts, seeds)
    return found


def verdicts(found: Mapping[str, Interval]) -> list[Verdict]:
    """The rules above, on ``differences``; none where nothing was chosen."""
    if "chosen - unsteered" not in found:
        return []

    def above(claim: str, name: str) -> Verdict:
        return Verdict(claim, found[name].low > 0, found[name])

    facts, random, same_dose = found["facts: chosen - prompted"], found["random"], "chosen - middle, same dose"
    return [
        above("above unsteered", "chosen - unsteered"),
        above("above prompt-only", "chosen - prompted"),
        Verdict("facts not fewer than prompt-only's", facts.mean >= 0, facts),
        Verdict("random shows no trait", random.low <= 0, random),
        above("above random", "chosen - random"),
        above("beats the middle-layer default", "chosen - middle"),
        *([above("beats the middle layer at the same dose", same_dose)] if same_dose in found else []),
    ]


def show(results: Mapping[str, Mapping[str, Any]], title: str) -> None:
    """Print tables and verdicts as Markdown."""
    print(title)
    for trait, found in results.items():
        by_condition = found["conditions"]
        names = list(by_condition["unsteered"]["by_instrument"])
        rows = []
        for name, row in by_condition.items():
            point = "" if row["layer"] is None else f"{row['layer']}, {row['dose']:g}"
            gains = [row["expression"], *row["by_instrument"].values()]
            cells = ["" if name == "unsteered" else _interval(gain) for gain in gains]
            lost = "" if name == "unsteered" else _interval(row["facts_lost"])
            shares = [f"{row[of]:.0%}" for of in ("broken", "role_flip")]
            means = [f"{row['surprise']:.2f}", f"{row['relevance']:.2f}", f"{row['words']:.0f}"]
            rows.append([name, point, *cells, f"{row['facts']:.2f}", lost, *shares, *means])
        header = ["condition", "layer, dose", "expression", *names, "facts", "facts lost", "broken", "role flips"]
        print(f"\n## {trait}\n" + (f"{found['remark']}\n" if found["remark"] else ""))
        print(table([*header, "surprise", "relevance", "words"], rows) + "\n")
        told = [f"{pair} {'undefined' if rho is None else f'{rho:.2f}'}" for pair, rho in found["agreement"].items()]
        print("agreement of instruments (Spearman): " + ("; ".join(told) or "there is only one"))
        for verdict in found["verdicts"]:
            answer = "yes" if verdict["holds"] else "no"
            print(f"- {trait}: {verdict['claim']}: {answer}, {_interval(verdict['difference'])}")
        if not found["verdicts"]:
            print(f"- {trait}: {found['remark']}")


def _interval(values: Mapping[str, float | None]) -> str:
    return "" if values["mean"] is None else str(Interval(**values))  # type: ignore[arg-type]


def as_turns(trait: str, cells: Cells) -> list[dict[str, Any]]:
    """All turns, with the scores of this trait; a score that an instrument could not give is None."""
    return [
        {"trait": trait, "condition": name, **asdict(turn), "scores": without_nan(turn.scores)}
        for name, cell in cells.items()
        for turn in cell.turns
    ]


def without_nan(values: Mapping[str, float]) -> dict[str, float | None]:
    """For JSON, which has no nan."""
    return {name: None if math.isnan(value) else round(value, 4) for name, value in values.items()}


def parse(arguments: Iterable[str] | None = None) -> argparse.Namespace:
    here = Path(__file__).parent
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--traits", default=",".join(PAPER_TRAITS), help="any that ship, with commas")
    parser.add_argument("--selection", type=Path, help="by default vectors/<model>/selection.json")
    parser.add_argument("--basis", type=Path, help="by default the model's own")
    parser.add_argument("--contexts", type=Path, default=here / "scenarios.yaml", help="tasks the choice never saw")
    parser.add_argument("--seeds", type=int, default=4, help="turns of each task and condition")
    parser.add_argument("--seed", type=int, default=0, help="another sample of turns")
    parser.add_argument("--max-tokens", type=int, default=64, help="longest turn")
    parser.add_argument("--judge-url", help="a third instrument, at any OpenAI-compatible URL")
    parser.add_argument("--judge-model")
    parser.add_argument("--judge-key", help="sent to the judge; nothing is read from the environment")
    parser.add_argument("--out", type=Path, default=here / "results" / "selection.json")
    parser.add_argument("--sheet", type=Path, help="write turns of --out to be rated, and measure nothing")
    parser.add_argument("--rated", type=Path, help="read such a sheet with its ratings, and measure nothing")
    parser.add_argument("--key", type=Path, help="what the sheet hides: written with --sheet, read with --rated")
    parser.add_argument("--items", type=int, default=160, help="turns on the sheet")
    options = parser.parse_args(None if arguments is None else list(arguments))
    if (options.sheet or options.rated) and not options.key:
        parser.error("--sheet and --rated need --key")
    if bool(options.judge_url) != bool(options.judge_model):
        parser.error("a judge needs --judge-url and --judge-model")
    if options.seeds < 1:
        parser.error("--seeds must be at least 1")
    return options


def main(arguments: Iterable[str] | None = None) -> None:
    options = parse(arguments)
    if options.sheet:
        write_sheet(options.out, options.contexts, options.sheet, options.key, options.items, options.seed)
        print(f"saved: {options.sheet}; keep {options.key} from whoever rates it")
    elif options.rated:
        show_ratings(read_ratings(options.rated, options.key))
    else:
        measure_all(options)


def measure_all(options: argparse.Namespace) -> None:
    pair_sets = [load_pairs(name.strip()) for name in options.traits.split(",")]
    contexts = read_contexts(options.contexts)
    lm = load_model(options.model, dtype=options.dtype)
    path = options.selection or Path("vectors") / lm.slug / "selection.json"
    choices, basis = read_selections(path), own_basis(lm, options.basis)
    if missing := [pair_set.trait for pair_set in pair_sets if pair_set.trait not in choices]:
        name = ",".join(missing)
        raise SweepError(f"{path} has no choice for {name}; make it with: traitbasis select --trait {name}")
    judge = None
    home = options.out.with_suffix("")
    if options.judge_url:
        judge = Judge(options.judge_url, options.judge_model, options.judge_key, cache=home / "judge.jsonl")
    planned = {p.trait: conditions(p.trait, choices[p.trait], basis, len(lm.layers)) for p in pair_sets}
    steps = sum(len(set(specs.values())) for specs, _ in planned.values())
    sizes = {"turns": options.seeds * len(contexts), "seed": options.seed, "max_tokens": options.max_tokens}
    measured: dict[str, Cells] = {}
    with Generator(lm, contexts, as_=basis.as_ if basis else "user", **sizes) as generator:
        selector = Selector(generator, home)
        with progress("measuring", steps) as advance:
            for pair_set in pair_sets:
                measured[pair_set.trait] = measure(selector, pair_set, planned[pair_set.trait][0], advance)
        if judge:
            for pair_set in pair_sets:
                measured[pair_set.trait] = judged(judge, pair_set, generator, measured[pair_set.trait])
    results = {}
    for trait, cells in measured.items():
        found = differences(trait, cells, options.seeds)
        results[trait] = {
            "remark": planned[trait][1],
            "conditions": summarize(trait, cells, options.seeds),
            "differences": {name: interval.record for name, interval in found.items()},
            "verdicts": [asdict(verdict) for verdict in verdicts(found)],
            "agreement": without_nan(agreement(list(cells.values()), trait)),
        }
    show(results, f"{lm.name}, {lm.dtype_name}, {sizes['turns']} turns a condition on {len(contexts)} tasks")
    made_by = {
        **generator.settings,
        "basis": basis.fingerprint if basis else None,
        "judge": {"url": options.judge_url, "model": options.judge_model} if judge else None,
        "versions": versions(),
    }
    turns = [turn for trait, cells in measured.items() for turn in as_turns(trait, cells)]
    write_json(options.out, {"made_by": made_by, "traits": results, "turns": turns})
    print("\nsaved:", options.out)


if __name__ == "__main__":
    run(main)
