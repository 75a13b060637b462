"""What the default dose does: each trait against the unsteered user, on tasks that are not in the pairs.

For every scenario and seed one turn is drawn unsteered, with each trait, and with a random direction of the same dose
at the same layer. Each turn is re-read by the unsteered model; its expression is the projection on the direction
of held-out pairs (0: as the held-out negatives, 1: as the held-out positives). Differences are paired by scenario and
seed, with 95 % bootstrap intervals over scenarios.

    python experiments/default_dose.py            # the README's table; about 10 minutes on 2 cores
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
import yaml
from rich.console import Console
from rich.progress import track
from rich.table import Table

from traitbasis.basis import Basis, Column, build_basis, find_basis
from traitbasis.chat import Turn
from traitbasis.engines.base import Failure
from traitbasis.engines.transformers import TransformersEngine
from traitbasis.extract import extract
from traitbasis.metrics.damage import is_broken
from traitbasis.metrics.fidelity import TraitProbe, auc, score
from traitbasis.metrics.realism import is_role_flip
from traitbasis.model import load_model
from traitbasis.pairs import load_pairs
from traitbasis.simulator import UserSimulator, UserTurn

WIRE = {"system": "system", "agent": "user", "customer": "assistant"}


@dataclass(frozen=True)
class Scenario:
    id: str
    context: tuple[Turn, ...]
    facts: tuple[str, ...]

    @property
    def messages(self) -> list[dict[str, str]]:
        return [{"role": WIRE[turn.speaker], "content": turn.text} for turn in self.context]


def read_scenarios(path: Path) -> list[Scenario]:
    document = yaml.safe_load(path.read_text(encoding="utf-8"))
    return [
        Scenario(
            entry["id"],
            tuple(Turn(speaker, text) for turn in entry["context"] for speaker, text in turn.items()),
            tuple(entry["facts"]),
        )
        for entry in document["scenarios"]
    ]


def with_random_column(basis: Basis, seed: int) -> Basis:
    """The basis and one more column: a random direction at the first column's layer and dose."""
    first = basis.columns[0]
    direction = torch.randn(basis.matrix.shape[0], generator=torch.Generator().manual_seed(seed))
    direction *= basis.matrix[:, 0].norm() / direction.norm()
    column = Column("random", first.layer, first.scale, first.layer_norm, (), first.provenance)
    return Basis((*basis.columns, column), torch.cat([basis.matrix, direction[:, None]], dim=1))


def draw(
    simulator: UserSimulator, scenarios: list[Scenario], seeds: int, trait: str | None, level: str
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


def bootstrap(differences: torch.Tensor, seeds: int, repeats: int = 2000) -> tuple[float, float]:
    """95 % interval of the mean, resampling scenarios (turns of one scenario stay together)."""
    by_scenario = differences.reshape(seeds, -1).mean(0)
    generator = torch.Generator().manual_seed(0)
    picks = torch.randint(len(by_scenario), (repeats, len(by_scenario)), generator=generator)
    low, high = torch.quantile(by_scenario[picks].mean(1), torch.tensor([0.025, 0.975])).tolist()
    return low, high


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--scenarios", type=Path, default=Path(__file__).with_name("scenarios.yaml"))
    parser.add_argument("--seeds", type=int, default=2, help="turns drawn per scenario and condition")
    parser.add_argument("--level", default="medium")
    parser.add_argument("--dose", type=float, help="try another dose than the basis has")
    parser.add_argument("--layer", type=int, help="try another layer than the basis has")
    parser.add_argument("--as", dest="as_", choices=["user", "assistant"], default="user")
    parser.add_argument("--out", type=Path, help="write the turns and figures as JSON")
    arguments = parser.parse_args()

    lm = load_model(arguments.model)
    pair_sets = {trait: load_pairs(trait) for trait in ("impatience", "confusion", "skeptical", "incoherence")}
    if arguments.dose or arguments.layer or arguments.as_ != "user":
        vectors = [extract(lm, pair_set, as_=arguments.as_) for pair_set in pair_sets.values()]
        options = {"dose": arguments.dose} if arguments.dose else {}
        basis = build_basis(vectors, layer=arguments.layer, **options)
    else:
        basis = find_basis(lm)
    basis = with_random_column(basis, seed=0)
    layers = {column.trait: column.layer for column in basis.columns}
    probes = [TraitProbe.from_held_out(lm, pairs, layers[trait], basis.as_) for trait, pairs in pair_sets.items()]
    scenarios = read_scenarios(arguments.scenarios)

    simulator = UserSimulator(lm, basis, engine=TransformersEngine(lm, max_batch=48))
    conditions: list[str | None] = [None, *pair_sets, "random"]
    turns = {
        condition: draw(simulator, scenarios, arguments.seeds, condition, arguments.level)
        for condition in track(conditions, "drawing turns")
    }
    contexts = [scenario for _ in range(arguments.seeds) for scenario in scenarios]
    scores = {
        condition: score(probes, lm, [(c.context, t.text) for c, t in zip(contexts, drawn, strict=True)])
        for condition, drawn in turns.items()
    }

    results = []
    for condition in conditions:
        texts = [turn.text for turn in turns[condition]]
        kept = [sum(f.casefold() in t.casefold() for f in c.facts) for c, t in zip(contexts, texts, strict=True)]
        row: dict[str, Any] = {
            "condition": condition or "unsteered",
            "turns": len(texts),
            "customer_like": sum(not is_role_flip(t) and not is_broken(t) for t in texts) / len(texts),
            "broken": sum(map(is_broken, texts)) / len(texts),
            "facts_per_turn": sum(kept) / len(kept),
            "tries": sum(turn.tries for turn in turns[condition]) / len(texts),
            "words": sum(len(t.split()) for t in texts) / len(texts),
            "dose": turns[condition][0].dose,
            "expression": {},
        }
        for probe in probes:
            own, base = scores[condition][probe.trait], scores[None][probe.trait]
            row["expression"][probe.trait] = {
                "mean": float(own.mean()),
                "difference": float((own - base).mean()),
                "interval": bootstrap(own - base, arguments.seeds),
                "auc": auc(own, base),
            }
        results.append(row)

    table = Table(title=f"{lm.name}, basis {basis.fingerprint}, level {arguments.level}, as {basis.as_}")
    for heading in ("condition", "dose", "customer-like", "broken", "tries", "facts/turn", "words"):
        table.add_column(heading)
    for probe in probes:
        table.add_column(f"{probe.trait}\n(probe AUC {probe.auc:.2f})")
    for row in results:
        cells = [row["condition"], f"{row['dose']:.2f}", f"{row['customer_like']:.0%}", f"{row['broken']:.0%}"]
        cells += [f"{row['tries']:.2f}", f"{row['facts_per_turn']:.2f}", f"{row['words']:.0f}"]
        for probe in probes:
            e = row["expression"][probe.trait]
            low, high = e["interval"]
            baseline = row["condition"] == "unsteered"
            text = (
                f"{e['mean']:.2f}"
                if baseline
                else f"{e['difference']:+.2f} [{low:+.2f}, {high:+.2f}] AUC {e['auc']:.2f}"
            )
            cells.append(f"[bold]{text}[/bold]" if row["condition"] == probe.trait else text)
        table.add_row(*cells)
    Console(width=200).print(table)
    if arguments.out:
        record = {
            "made_by": simulator.provenance,
            "level": arguments.level,
            "probes": {p.trait: {"layer": p.layer, "auc": p.auc} for p in probes},
            "results": results,
            "turns": [
                {"condition": condition or "unsteered", "scenario": c.id, "seed": t.seed, "text": t.text}
                for condition, drawn in turns.items()
                for c, t in zip(contexts, drawn, strict=True)
            ],
        }
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(record, indent=1, ensure_ascii=False), encoding="utf-8")


if __name__ == "__main__":
    main()
