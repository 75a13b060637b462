"""Is this a usable user turn? Guards reject a text; they never edit it (contract 8).

The simulator discards a rejected turn and generates another, a bounded number of times. When tries run out it sends the
best candidate, marked with the guard's name; texts that fail a guard with ``sendable=False`` are no candidates. More
guards belong in ``GUARDS``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from traitbasis.metrics.damage import is_broken


@dataclass(frozen=True)
class Guard:
    """A named check. passes: is a text fine? sendable: may a text that fails go out as a last resort?"""

    name: str
    passes: Callable[[str], bool]
    sendable: bool = True


_THOUGHT = re.compile(r"</?think(ing)?\b", re.IGNORECASE)

GUARDS: tuple[Guard, ...] = (
    # A harness shows an empty turn to the agent, or loses the episode.
    Guard("empty", lambda text: bool(text.strip()), sendable=False),
    # A reasoning model's thoughts, closed, unclosed or cut off, are not for the agent.
    Guard("thought", lambda text: not _THOUGHT.search(text), sendable=False),
    # Small models loop, and steered ones sooner; another draw usually does not.
    Guard("broken", lambda text: not is_broken(text)),
)


def failed_guard(text: str, guards: Sequence[Guard]) -> Guard | None:
    """The first guard that rejects `text`, or None when it can be used."""
    return next((guard for guard in guards if not guard.passes(text)), None)
