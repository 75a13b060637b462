"""What the default dose does: each trait against the unsteered user, on tasks that are not in the pairs.

For every scenario and seed one turn is drawn unsteered, with each trait, and with a random direction of the same dose
at the same layer. Two measures, neither of which the vectors were made from:

expression: the turn is re-read by the unsteered model and projected on the direction of the held-out pairs (0: as the
held-out negatives, 1: as the held-out positives), at the layer where that direction ranks the other pairs best.
Differences are paired by scenario and seed, with 95 % bootstrap
intervals over scenarios. It judges the text, and is noisy.

preference: how much likelier, in nats per token, steering makes the held-out pairs' positive responses against their
negative ones. Nothing is sampled, so there is no noise; it judges the model and not the text.

    python experiments/default_dose.py            # the README's table; about 12 minutes on 2 cores
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
from common import over_tasks, write_json
from rich.progress import track

from traitbasis.basis import DEFAULT_DOSE, Basis, Column, build_basis, find_basis
from traitbasis.contexts import EvaluationContext, read_contexts
from traitbasis.engines.base import Failure
from traitbasis.engines.transformers import TransformersEngine
from traitbasis.extract import extract
from traitbasis.guards import GUARDS
from traitbasis.metrics.damage import is_broken
from traitbasis.metrics.fidelity import TraitProbe, auc, preference, score
from traitbasis.metrics.realism import is_role_flip
from traitbasis.model import load_model
from traitbasis.pairs import PAPER_TRAITS, load_pairs
from traitbasis.simulator import UserSimulator
from traitbasis.tries import UserTurn

# Only what is unusable is drawn again: guards that choose among good turns would hide what a dose does.
KEPT_OUT = tuple(guard for guard in GUARDS if guard.name in ("empty", "thought", "broken"))


def with_random_column(basis: Basis, seed: int) -> Basis:
    """The basis and one more column: a random direction at the first column's layer and dose."""
    first = basis.columns[0]
    direction = torch.randn(basis.matrix.shape[0], generator=torch.Generator().manual_seed(seed))
    direction *= basis.matrix[:, 0].norm() / direction.norm()
    column = Column("random", first.layer, first.scale, first.layer_norm, (), first.provenance)
    return Basis((*basis.columns, column), torch.cat([basis.matrix, direction[:, None]], dim=1))


def draw(
    simulator: UserSimulator, scenarios: list[EvaluationContext], seeds: int, trait: str | None, level: str
) -> list[UserTurn]:
    """One turn per scenario and seed, all submitted at once."""
    queue: SimpleQueue[tuple[int, object]] = SimpleQueue()
    cases = [(scenario, seed) for seed in range(seeds) for scenario in scenarios]
    for i, (scenario, seed) in enumerate(cases):
        prepared = simulator.prepare(scenario.messages, {trait: level} if trait else None, seed=1000 + seed)
        simulator.submit(prepared, partial(lambda i, item: queue.put((i, item)), i))
    turns: dict[int, UserTurn] = {}
    while len(turns) < len(cases):
        i, item = queue.get()
        if isinstance(item, Failure):
            raise item.error
        if isinstance(item, UserTurn):
            turns[i] = item
    return [turns[i] for i in range(len(cases))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--scenarios", type=Path, default=Path(__file__).with_name("scenarios.yaml"))
    parser.add_argument("--seeds", type=int, default=4, help="turns drawn per scenario and condition")
    parser.add_argument("--level", default="medium")
    parser.add_argument("--dose", type=float, help="try another dose than the basis has")
    parser.add_argument("--layer", type=int, help="try another layer than the basis has")
    parser.add_argument("--as", dest="as_", choices=["user", "assistant"], help="try another header")
    parser.add_argument("--out", type=Path, help="write the turns and figures as JSON")
    arguments = parser.parse_args()

    lm = load_model(arguments.model, dtype=arguments.dtype)
    pair_sets = {trait: load_pairs(trait) for trait in PAPER_TRAITS}
    if (arguments.dose, arguments.layer, arguments.as_) == (None, None, None):
        basis = find_basis(lm)
    else:
        vectors = [extract(lm, pair_set, as_=arguments.as_ or "user") for pair_set in pair_sets.values()]
        dose = DEFAULT_DOSE if arguments.dose is None else arguments.dose
        basis = build_basis(vectors, layer=arguments.layer, dose=dose)
    basis = with_random_column(basis, seed=0)
    probes = [TraitProbe.from_held_out(lm, pairs, as_=basis.as_) for pairs in pair_sets.values()]
    scenarios = read_contexts(arguments.scenarios)
    contexts = [scenario for _ in range(arguments.seeds) for scenario in scenarios]

    conditions: list[str | None] = [None, *pair_sets, "random"]
    turns, scores, preferences = {}, {}, {}
    with UserSimulator(lm, basis, engine=TransformersEngine(lm, max_batch=48), guards=KEPT_OUT) as simulator:
        for condition in track(conditions, "measuring"):
            drawn = draw(simulator, scenarios, arguments.seeds, condition, arguments.level)
            turns[condition] = drawn
            scores[condition] = score(probes, lm, [(c.context, t.text) for c, t in zip(contexts, drawn, strict=True)])
            additions = basis.additions(drawn[0].intensities)
            preferences[condition] = {
                trait: float(preference(lm, pairs.select("heldout"), additions, basis.as_).mean())
                for trait, pairs in pair_sets.items()
            }
        made_by = simulator.provenance

    def compared(condition: str | None, trait: str, baseline: str | None) -> dict[str, Any]:
        own, base = scores[condition][trait], scores[baseline][trait]
        interval = over_tasks(own - base, arguments.seeds)
        return {
            "difference": interval.mean,
            "interval": (interval.low, interval.high),
            "auc": auc(own, base),
        }

    rows: list[dict[str, Any]] = []
    for condition in conditions:
        drawn, texts = turns[condition], [turn.text for turn in turns[condition]]
        stated = [sum(f.casefold() in t.casefold() for f in c.facts) for c, t in zip(contexts, texts, strict=True)]
        rows.append(
            {
                "condition": condition or "unsteered",
                "turns": len(drawn),
                "dose": drawn[0].dose,
                "customer_like": sum(not is_role_flip(t) and not is_broken(t) for t in texts) / len(texts),
                "draws_rejected": sum(t.tries - 1 for t in drawn) / sum(t.tries for t in drawn),
                "facts_per_turn": sum(stated) / len(stated),
                "words": sum(len(t.split()) for t in texts) / len(texts),
                "expression": {probe.trait: float(scores[condition][probe.trait].mean()) for probe in probes},
                "against_unsteered": {p.trait: compared(condition, p.trait, None) for p in probes if condition},
                "against_random": {p.trait: compared(condition, p.trait, "random") for p in probes}
                if condition
                else {},
                "preference_shift": {t: preferences[condition][t] - preferences[None][t] for t in pair_sets},
            }
        )
    show(rows, probes, f"{lm.name}, basis {basis.fingerprint}, level {arguments.level}, as {basis.as_}")
    if arguments.out:
        record = {
            "made_by": made_by,
            "level": arguments.level,
            "probes": {p.trait: {"layer": p.layer, "auc": p.auc} for p in probes},
            "results": rows,
            "turns": [
                {"condition": condition or "unsteered", "scenario": c.id, "seed": t.seed, "text": t.text}
                for condition, drawn in turns.items()
                for c, t in zip(contexts, drawn, strict=True)
            ],
        }
        write_json(arguments.out, record)


def show(rows: list[dict[str, Any]], probes: list[TraitProbe], title: str) -> None:
    """Print the tables as Markdown, ready for the README."""

    def signed(cell: dict[str, Any]) -> str:
        low, high = cell["interval"]
        return f"{cell['difference']:+.2f} [{low:+.2f}, {high:+.2f}]"

    print(f"{title}; {rows[0]['turns']} turns a condition")
    print("probes: " + "; ".join(f"{p.trait} at layer {p.layer}, AUC {p.auc:.2f}" for p in probes) + "\n")
    print("| condition | dose | customer-like | draws rejected | facts a turn | words | own expression |")
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        own = row["against_unsteered"].get(row["condition"])
        print(
            f"| {row['condition']} | {row['dose']:.2f} | {row['customer_like']:.0%} | {row['draws_rejected']:.0%} "
            f"| {row['facts_per_turn']:.2f} | {row['words']:.0f} | {signed(own) if own else ''} |"
        )
    tables: dict[str, Callable[[dict[str, Any], str], str]] = {
        "expression against unsteered": lambda row, trait: signed(row["against_unsteered"][trait]),
        "expression against the random direction": lambda row, trait: signed(row["against_random"][trait]),
        "preference shift, nats per token": lambda row, trait: f"{row['preference_shift'][trait]:+.3f}",
    }
    for name, value in tables.items():
        print(f"\n| {name} | " + " | ".join(p.trait for p in probes) + " |")
        print("|---" * (len(probes) + 1) + "|")
        for row in rows[1:-1] if "random" in name else rows[1:]:
            print(f"| {row['condition']} | " + " | ".join(value(row, p.trait) for p in probes) + " |")


if __name__ == "__main__":
    main()
