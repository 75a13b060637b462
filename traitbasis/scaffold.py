"""A new trait's pair file as a template: contexts and facts are there, and a person writes two replies to each.

Whether the file is finished, ``pair_check.py`` says.
"""

from __future__ import annotations

import json
import re
import textwrap
from importlib import resources
from pathlib import Path

import yaml

from traitbasis.contexts import EvaluationContext, read_contexts
from traitbasis.errors import PairError
from traitbasis.pair_check import ENOUGH, SIDES, shipped_names
from traitbasis.pairs import LENGTH_RATIO, RESERVED, Pair, load_pairs

_NAME = re.compile(r"[a-z][a-z0-9_]*")
_WIDTH = 116


def write_scaffold(trait: str, path: Path, like: str | None = None) -> None:
    """Write the template of a new trait's pair file; see ``scaffold``. A file that exists is never touched.

    Raises PairError when `path` exists or is no .yaml file.
    """
    text = scaffold(trait, like)
    if path.suffix not in (".yaml", ".yml"):
        raise PairError(f"{path} must end in .yaml; pair files are known by it")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with path.open("x", encoding="utf-8") as file:  # and not a rename, which would replace a file
            file.write(text)
    except FileExistsError:
        raise PairError(f"{path} exists; look at it with --check, or give another file with --out") from None


def scaffold(trait: str, like: str | None = None) -> str:
    """The template as YAML: the contexts and facts of four default and eight held-out pairs, with no reply yet.

    like: a shipped trait or a pair file whose contexts are taken instead; its replies stand there as comments. Raises
    PairError for a name that cannot be a new trait's, and for an unknown `like`.
    """
    check_name(trait)
    if like is None:
        folder = resources.files("traitbasis.contrastive_pairs")
        contexts = read_contexts(str(folder / "contexts" / "scaffold.yaml"))
        uses = ["default"] * ENOUGH["default"] + ["heldout"] * ENOUGH["heldout"]
        pairs = [_pair(context, use) for context, use in zip(contexts, uses, strict=True)]
    else:
        model = load_pairs(like)
        pairs = [_pair(pair, pair.use, model.trait) for pair in model.select("default", "heldout")]
    return _HEAD.format(trait=trait, ratio=LENGTH_RATIO) + "\n".join(pairs)


def check_name(trait: str) -> None:
    """Raises PairError for a name that a new trait cannot have, and says why."""
    if not _NAME.fullmatch(trait):
        better = re.sub(r"\W+|_+", "_", trait.casefold()).strip("_0123456789")
        hint = f", such as {better!r}" if _NAME.fullmatch(better) else ""
        raise PairError(
            f"{trait!r} cannot name a trait; a name has lower-case letters, digits and _, a letter first{hint}"
        )
    if trait in RESERVED or yaml.safe_load(trait) != trait:
        raise PairError(
            f"{trait!r} cannot name a trait; it means something else in commands, trait specs, file names or YAML"
        )
    if owner := shipped_names().get(trait):
        what = "is a trait that ships" if owner == trait else f"is an alias of {owner!r}, a trait that ships"
        raise PairError(f"{trait!r} {what}; give yours another name (traitbasis extract --trait {owner} uses that one)")


_HEAD = """\
# Contrastive pairs of the trait {trait!r}: one context, two replies of the customer with the same facts and intent.
#   positive: the trait is clearly there.   negative: the opposite is.
# Write each reply on the empty line under its ">-", six spaces in; it may go on in further lines.
# - Both replies contain every one of the pair's `facts`, letter for letter (small or capital does not matter).
# - Both are about equally long: the longer has at most {ratio} times the words of the shorter.
# - No word or mark may give the sides away (always "please" here, always "!" there): vary how the trait is shown.
# - Contexts and facts may be changed; facts are what the customer has to say in just this turn.
# Check it while you write: traitbasis new-trait THIS_FILE --watch
trait: {trait}
# One sentence: what a customer with this trait does, concretely.
definition: >-

# The other pole, as the negative replies show it: one sentence, too.
opposite: >-

# Other names it may be asked for by.
aliases: []
# Words and marks that belong to the trait and are no give-away, such as [please] for politeness:
# markers: []
# For a trait that is a matter of length, such as terse:
# length_free: true
pairs:
"""


def _pair(context: EvaluationContext | Pair, use: str, trait: str = "") -> str:
    """One pair without replies, as YAML. Those of a pair of another `trait` stand there as comments."""
    lines = [f"  - id: {context.id}", f"    domain: {context.domain}", f"    use: {use}", "    context:"]
    for turn in context.context:
        lines += _text(f"      - {turn.speaker}:", turn.text, " " * 10)
    for side in SIDES if isinstance(context, Pair) else ():
        said = f"{trait}, {side}: {getattr(context, side)}"
        lines += textwrap.wrap(said, _WIDTH, initial_indent="    # ", subsequent_indent="    #   ")
    for side in SIDES:
        lines += [f"    {side}: >-", ""]
    lines.append(f"    facts: {json.dumps(list(context.facts), ensure_ascii=False)}")
    return "\n".join(lines) + "\n"


def _text(key: str, text: str, margin: str) -> list[str]:
    """A text under its key, so that YAML reads it back the same."""
    if "\n" in text:
        return [f"{key} {json.dumps(text, ensure_ascii=False)}"]
    if len(key) + len(text) < _WIDTH and ": " not in text and " #" not in text and text[:1].isalpha():
        return [f"{key} {text}"]
    wrapped = textwrap.wrap(
        text, _WIDTH, initial_indent=margin, subsequent_indent=margin, break_long_words=False, break_on_hyphens=False
    )
    return [f"{key} >-", *wrapped]
