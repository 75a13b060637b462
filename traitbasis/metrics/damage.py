"""Is a turn still language? Steering too hard ends in repetition long before it ends in noise.

Rules on the text alone, so that they can be read and argued with. Confusion is allowed to be confused: what counts is
punctuation that runs away, a phrase said over and over, or a vocabulary that has collapsed.
"""

from __future__ import annotations

import re

_RUNAWAY = re.compile(r"([^\w\s])\1{4,}|(?:[?!.,]\s*){6,}")
_MARKS = re.compile(r"[^\w\s]")
_WORDS = re.compile(r"[^\W_]+(?:['’][^\W_]+)*")


def has_runaway_punctuation(text: str) -> bool:
    """Whether one mark stands five times in a row, sentence marks six times, or more than half of a text with a dozen
    marks or more is marks. (``What?!`` and ``Hm... well...`` are a person.)"""
    marks = len(_MARKS.findall(text))
    return bool(_RUNAWAY.search(text)) or (marks >= 12 and marks > len("".join(text.split())) / 2)


def is_broken(text: str) -> bool:
    """Whether a turn has runaway punctuation, one word five times or a phrase of 2 to 6 words three times in a row, or,
    beyond 20 words, fewer than half of them different. ("No, no, no!" is a person.)"""
    if has_runaway_punctuation(text):
        return True
    words = [word.casefold() for word in _WORDS.findall(text)]
    for size in range(1, 7):
        # A phrase stands three times in a row where every word of two phrases equals the one a phrase before it.
        needed, run = (4 if size == 1 else 2 * size), 0
        for word, earlier in zip(words[size:], words, strict=False):
            run = run + 1 if word == earlier else 0
            if run == needed:
                return True
    return len(words) > 20 and len(set(words)) < len(words) / 2
