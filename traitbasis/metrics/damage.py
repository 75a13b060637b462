"""Is a turn still language? Steering too hard ends in repetition long before it ends in noise.

A rule on the text alone, so that it can be read and argued with. Confusion is allowed to be confused: what counts is
punctuation that runs away, a phrase said over and over, or a vocabulary that has collapsed.
"""

from __future__ import annotations

import re

_RUNAWAY = re.compile(r"([^\w\s])\1{4,}|(?:[?!.,]\s*){6,}")
_WORDS = re.compile(r"[^\W_]+(?:['’][^\W_]+)*")


def is_broken(text: str) -> bool:
    """Whether a turn has runaway punctuation, one word five times or a phrase of 2 to 6 words three times in a row, or,
    beyond 20 words, fewer than half of them different. ("No, no, no!" is a person.)"""
    if _RUNAWAY.search(text):
        return True
    words = [word.casefold() for word in _WORDS.findall(text)]
    for size in range(1, 7):
        times = 5 if size == 1 else 3
        for start in range(len(words) - times * size + 1):
            if words[start : start + times * size] == words[start : start + size] * times:
                return True
    return len(words) > 20 and len(set(words)) < len(words) / 2
