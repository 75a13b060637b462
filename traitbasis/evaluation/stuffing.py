"""Turns that hold a trait's words without showing the trait: what an instrument must not be fooled by.

Each is a neutral turn, or no turn at all, with the trait's name, words of its definition and words that only its own
responses use dropped in. Some forms train the namer, to whom they are "none"; other forms, with words of other pairs,
check what it learnt. A customer who says "impatient, hurry, deadline" is not thereby impatient.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence

from traitbasis.chat import Turn
from traitbasis.pairs import PairSet, Use, fold, words

Form = Callable[[str, str, Sequence[str]], str]  # neutral text, the trait's name, words
_WORDS = 8
_SHORTEST = 4  # letters; what is shorter is seldom a word of one trait
# Words of definitions and responses that say nothing of a trait.
_PLAIN = frozenset(
    fold(
        """about after agent another because been before being customer does done down each even every from have just
        know last like made make matter message messages more most much need needs next once only other over request
        same says should since some something still such sure take tell than that their them then there they thing
        things this those through together took under until upon very want wants were what when where which while
        will with without would your"""
    ).split(" ")
)


def stuffed_turns(
    pair_set: PairSet, forms: Mapping[str, Form], *uses: Use, each: int = 2
) -> list[tuple[tuple[Turn, ...], str]]:
    """(context, text), for each pair with one of `uses` `each` of the forms in turn; the same at every call."""
    rng = random.Random(f"{pair_set.trait} {' '.join(forms)} {' '.join(uses)}")
    names = [name.replace("_", " ") for name in (pair_set.trait, *pair_set.aliases)]
    defined, own = _definition_words(pair_set), _own_words(pair_set, *uses)
    form, found = itertools.cycle(forms.values()), []
    for pair in pair_set.select(*uses):
        for _ in range(each):
            pool = defined if rng.random() < 0.5 else [*defined, *own]
            chosen = rng.sample(pool, min(_WORDS, len(pool)))
            found.append((pair.context, next(form)(pair.negative, rng.choice(names), chosen)))
    return found


def _inserted(text: str, name: str, chosen: Sequence[str]) -> str:
    """The words at even distances in the text."""
    parts, added = text.split(), [name, *chosen[:6]]
    step = max(1, len(parts) // (len(added) + 1)) + 1
    for i, word in enumerate(added, start=1):
        parts.insert(i * step - 1, word)
    return " ".join(parts)


TRAINING: Mapping[str, Form] = {
    "after": lambda text, name, chosen: f"{text} I am so {name}: {', '.join(chosen[:6])}.",
    "shouted": lambda text, name, chosen: f"{'! '.join(word.capitalize() for word in chosen[:5])}! {text}",
    "listed": lambda text, name, chosen: f"{name.capitalize()}, {', '.join(chosen)}.",
    "inserted": _inserted,
}
CHECKING: Mapping[str, Form] = {
    "before": lambda text, name, chosen: f"I feel very {name} today. {' '.join(chosen[:6])}. {text}",
    "in brackets": lambda text, name, chosen: f"{text} ({' / '.join(chosen[:5])} - {name}!)",
    "bare": lambda text, name, chosen: " ".join([*chosen, name]),
}


def _definition_words(pair_set: PairSet) -> list[str]:
    return [word for word in dict.fromkeys(words(pair_set.definition.lower())) if _tells(word)]


def _own_words(pair_set: PairSet, *uses: Use) -> list[str]:
    """Words of the positive responses that no negative one has."""
    pairs = pair_set.select(*uses)
    positive, negative = ({w for p in pairs for w in words(getattr(p, side).lower())} for side in _SIDES)
    return sorted(word for word in positive - negative if _tells(word))


_SIDES = ("positive", "negative")


def _tells(word: str) -> bool:
    return len(word) >= _SHORTEST and word.isalpha() and word not in _PLAIN
