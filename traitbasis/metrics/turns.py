"""Everything that is measured of one generated turn, by reading it again with the unsteered model.

surprise: nats per token given its own context; text that fell apart is far above what people write, loops far below.
relevance: surprise in another conversation minus surprise in its own, nats per token: how much the turn owes to this
instruction; 0 means it could stand anywhere. facts: share of the context's facts that it states. broken, role_flip:
0 or 1, by rules on the text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, stack

from traitbasis.contexts import EvaluationContext
from traitbasis.metrics.classifier import TraitClassifier
from traitbasis.metrics.damage import is_broken
from traitbasis.metrics.fidelity import TraitProbe
from traitbasis.metrics.realism import is_role_flip
from traitbasis.pairs import fold
from traitbasis.reading import Reader

Instruments = Mapping[str, tuple[TraitProbe, TraitClassifier | None]]
INSTRUMENTS = ("probe", "classifier", "judge")


def measure_turns(
    reader: Reader,
    contexts: Sequence[EvaluationContext],
    turns: Sequence[tuple[int, str]],
    instruments: Instruments,
) -> tuple[list[dict[str, float]], Tensor]:
    """Scores of (number of the context, text), and mean states ``(n, layers, d_model)`` to measure expression by later.

    Expression is under ``probe:<trait>`` and ``classifier:<trait>``."""
    own = reader.read([(contexts[i].turns, text) for i, text in turns], states=True)
    other = reader.read([(contexts[(i + 1) % len(contexts)].turns, text) for i, text in turns])
    states = stack([reading.states for reading in own if reading.states is not None])
    shown = expression(states, instruments)
    scores = [
        {
            "surprise": own[n].surprise,
            "relevance": other[n].surprise - own[n].surprise,
            "facts": stated_facts(text, contexts[i].facts),
            "broken": float(is_broken(text)),
            "role_flip": float(is_role_flip(text)),
            "words": float(len(text.split())),
            **{name: float(values[n]) for name, values in shown.items()},
        }
        for n, (i, text) in enumerate(turns)
    ]
    return scores, states


def stated_facts(text: str, facts: Sequence[str]) -> float:
    """Share of `facts` that occur in `text`; case and white space do not matter. 1 when there are none."""
    folded = fold(text)
    return sum(fold(fact) in folded for fact in facts) / len(facts) if facts else 1.0


def expression(states: Tensor, instruments: Instruments) -> dict[str, Tensor]:
    """Scores ``(n,)`` by name, of mean states ``(n, layers, d_model)``."""
    found: dict[str, Tensor] = {}
    for trait, (probe, classifier) in instruments.items():
        found[f"probe:{trait}"] = states[:, probe.layer] @ probe.direction - probe.offset
        if classifier:
            found[f"classifier:{trait}"] = classifier.score(states)
    return found
