"""Is a turn still language? Steering too hard ends in repetition long before it ends in noise.

A rule on the text alone, so that it can be read and argued with. Confusion is allowed to be confused: what counts is
punctuation that runs away, a phrase said over and over, or a vocabulary that has collapsed.
"""

from __future__ import annotations

import re

_RUNAWAY = re.compile(r"([^\w\s])\1{4,}|(?:[?!.,]\s*){6,}")
_WORDS = re.compile(r"[^\W_]+(?:['’][^\W_]+)*")


def is_broken(text: str) -> bool:
    """Whether a turn has runaway punctuation, a phrase of 1 to 6 words repeated three times in a row, or, beyond 20
    words, fewer than half of them different."""
    if _RUNAWAY.search(text):
        return True
    words = [word.casefold() for word in _WORDS.findall(text)]
    for size in range(1, 7):
        for start in range(len(words) - 3 * size + 1):
            phrase = words[start : start + size]
            if words[start + size : start + 2 * size] == phrase == words[start + 2 * size : start + 3 * size]:
                return True
    return len(words) > 20 and len(set(words)) < len(words) / 2
