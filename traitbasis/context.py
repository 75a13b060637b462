"""A conversation that is too long for the model, cut so that it fits (harness contract 1.5.13)."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from traitbasis.chat import Turn

# Of the context, kept free for the reply when a conversation is cut to fit.
_REPLY_SHARE = 4


def fit(
    turns: Sequence[Turn], prompt: Callable[[Sequence[Turn]], tuple[int, ...]], limit: int | None, reply: int
) -> tuple[tuple[int, ...], dict[str, int]]:
    """The prompt of as much of a conversation as fits, and how many turns were left out for that, by speaker.

    prompt: renders turns as token ids. limit: tokens of the context, None when nothing limits it. reply: tokens that
    should be left for the reply; at most a quarter of the context is kept for it.

    The system text and the last turn stay. The agent's turns go first, oldest first: what the customer has said
    itself it must not contradict. A conversation that cannot be made to fit is returned as short as it gets.
    """
    ids = prompt(turns)
    if limit is None:
        return ids, {}
    room = min(reply, limit // _REPLY_SHARE)
    if len(ids) + room <= limit:
        return ids, {}
    order = _droppable(turns)

    def without(count: int) -> tuple[int, ...]:
        gone = {i for group in order[:count] for i in group}
        return prompt(_joined(turn for i, turn in enumerate(turns) if i not in gone))

    counts = range(1, len(order))  # all of them, when fewer do not do
    count = 1 + bisect_left(counts, True, key=lambda count: len(without(count)) + room <= limit)
    gone = Counter[str](turns[i].speaker for group in order[:count] for i in group)
    return without(count), dict(gone)


def _droppable(turns: Sequence[Turn]) -> list[list[int]]:
    """Turns that may be left out, in the order in which they go; a tool's results go with the call."""
    groups: list[list[int]] = []
    for i, turn in enumerate(turns[:-1]):
        if turn.speaker == "tool" and groups:
            groups[-1].append(i)
        elif turn.speaker != "system":
            groups.append([i])
    if groups and turns[-1].speaker == "tool":
        groups.pop()  # the call that the last turn answers
    return sorted(groups, key=lambda group: turns[group[0]].speaker != "agent")


def _joined(turns: Iterable[Turn]) -> list[Turn]:
    """Neighbours of one speaker as one turn, as in a conversation that was read so."""
    joined: list[Turn] = []
    for turn in turns:
        last = joined[-1] if joined else None
        if last and last.speaker == turn.speaker != "tool" and not last.calls and not turn.calls:
            joined[-1] = replace(last, text=f"{last.text}\n\n{turn.text}")
        else:
            joined.append(turn)
    return joined
