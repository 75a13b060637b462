"""Commands of the emotion conditions: what there are, what they say, which is nearest to a feeling in free words."""

from __future__ import annotations

import json
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.table import Table

from traitbasis.cli.common import Device, Dtype, Model, Threads, app, load_lm, out, progress
from traitbasis.embedded import DEFAULT_MODEL

if TYPE_CHECKING:
    from traitbasis.reactive.conditions import Condition
    from traitbasis.reactive.mapper import Mapper

emotions_app = typer.Typer(no_args_is_help=True, help="The 594 emotion conditions of a simulated customer.")
app.add_typer(emotions_app, name="emotions")

PartsFile = Annotated[Path | None, typer.Option("--file", help="Sentences of your own; by default those that ship.")]


@emotions_app.command("list")
def emotions_list(
    only: Annotated[
        str, typer.Option(help="Those of these families, emotions and levels, such as fear.cold or pride.warm.high.")
    ] = "",
    names: Annotated[bool, typer.Option("--names", help="One name a line, and nothing else.")] = False,
) -> None:
    """List the conditions: all 594, or those of a family, an emotion or a level.

    Example: traitbasis emotions list --only fear.cold --names
    """
    from traitbasis.reactive.conditions import DIMENSIONS, FAMILIES

    found = _chosen(only)
    if names:
        print("\n".join(condition.name for condition in found))
        return
    table = Table("family", "emotion", *DIMENSIONS, "conditions", title=f"{len(found)} conditions")
    for family, emotions in FAMILIES.items():
        for emotion in emotions:
            own = [condition for condition in found if condition.emotion == emotion]
            if own:
                levels = [
                    ", ".join(level for level in of if any(getattr(condition, dimension) == level for condition in own))
                    for dimension, of in DIMENSIONS.items()
                ]
                table.add_row(family, emotion, *levels, f"{len(own)}")
    out.print(table)


@emotions_app.command("show")
def emotions_show(
    condition: Annotated[str, typer.Argument(help="Such as frustration.cold.high.skeptical; levels may be left out.")],
    seed: Annotated[int | None, typer.Option(help="Only the instruction that this seed draws.")] = None,
    file: PartsFile = None,
) -> None:
    """Show what a condition tells the simulated customer, and the trait spec that is the same as vectors.

    Examples: traitbasis emotions show dread.cold.high; traitbasis emotions show pride --seed 3
    """
    from traitbasis.reactive.conditions import Condition, read_parts
    from traitbasis.spec import format_traits

    found, parts = Condition.parse(condition), read_parts(file)
    if seed is not None:
        print(found.instruction(seed, parts))
        return
    out.print(f"{found.name} ({found.family})\ntraits: {format_traits(found.traits())}", highlight=False)
    for number, text in enumerate(found.anchors(parts), 1):
        out.print(f"{number:2}. {text}", markup=False, highlight=False, soft_wrap=True)


@emotions_app.command("check")
def emotions_check(
    condition: Annotated[str, typer.Argument(help="Check one text against this condition's labels instead.")] = "",
    text: Annotated[str, typer.Argument(help="The text.")] = "",
    file: PartsFile = None,
) -> None:
    """Check that all conditions render, that no two are alike and that none contradicts its labels. Else status 1.

    Examples: traitbasis emotions check --file own.yaml; traitbasis emotions check dread.warm "Be curt."
    """
    from traitbasis.reactive.conditions import Condition, all_conditions, check_conditions, contradictions, read_parts

    if bool(condition) != bool(text):
        raise typer.BadParameter("give a condition and a text, or neither")
    parts = read_parts(file)
    problems = contradictions(text, Condition.parse(condition), parts) if condition else check_conditions(parts)
    for problem in problems:
        out.print(problem, markup=False, highlight=False, soft_wrap=True)
    if problems:
        raise typer.Exit(1)
    what = "the text contradicts no label" if condition else f"{len(all_conditions())} conditions, no problem"
    out.print(f"[green]{what}[/green]", highlight=False)


def _chosen(only: str) -> list[Condition]:
    """Conditions that have one of the families or emotions named, and of each dimension one of the levels named."""
    from traitbasis.errors import ReactionError
    from traitbasis.reactive.conditions import DIMENSIONS, EMOTIONS, FAMILIES, all_conditions

    words = set(only.casefold().replace(",", ".").split(".")) - {""}
    known = {*FAMILIES, *EMOTIONS, *(level for levels in DIMENSIONS.values() for level in levels)}
    if unknown := sorted(words - known):
        raise ReactionError(f"unknown family, emotion or level {unknown[0]!r}; known: {', '.join(sorted(known))}")
    emotions = {emotion for word in words for emotion in FAMILIES.get(word, (word,)) if emotion in EMOTIONS}
    wanted = [(of, words.intersection(levels) or set(levels)) for of, levels in DIMENSIONS.items()]
    return [
        condition
        for condition in all_conditions()
        if (not emotions or condition.emotion in emotions)
        and all(getattr(condition, of) in any_ for of, any_ in wanted)
    ]


@emotions_app.command("map")
def emotions_map(
    texts: Annotated[list[str] | None, typer.Argument(help="Feelings in free words.")] = None,
    reader: Annotated[
        Literal["model", "embeddings", "words"] | None,
        typer.Option(
            help="model, the default: the language model's own states. embeddings: an embedding model, by the extra "
            "`emotions`. words: bags of words. --measure takes all there are, or the one named, and words."
        ),
    ] = None,
    embeddings: Annotated[str, typer.Option(help="The embedding model: a hub id or a folder.")] = "",
    top: Annotated[int, typer.Option(min=1, max=594, help="How many conditions to show.")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="One line of JSON for each text.")] = False,
    measure: Annotated[
        bool,
        typer.Option("--measure", help="Measure on the held-out phrasings instead, beside bags of words and chance."),
    ] = False,
    out_file: Annotated[Path | None, typer.Option("--out", help="Write what was measured as JSON, too.")] = None,
    model: Model = DEFAULT_MODEL,
    device: Device = "auto",
    dtype: Dtype = "auto",
    threads: Threads = None,
) -> None:
    """Find the conditions nearest to a feeling in free words.

    The first use of a language model reads 990 short texts, minutes on a CPU, and keeps what it learns in the cache.

    Examples: traitbasis emotions map "He is sick of waiting and snaps at everyone"; traitbasis emotions map --measure
    """
    if bool(texts) == measure:
        raise typer.BadParameter("give texts, or --measure")
    if out_file is not None and not measure:
        raise typer.BadParameter("--out is of --measure")
    installed = embeddings or find_spec("sentence_transformers") is not None
    readers = [reader] if reader else ["model", "embeddings"] if measure and installed else ["model"]
    made_by: dict[str, Any] = {}

    def fitted(reader: str) -> Mapper:
        from traitbasis.reactive import mapper as mapping

        if reader == "words":
            return mapping.fit_words()
        if reader == "embeddings":
            return mapping.fit_embeddings(mapping.EmbeddingReader(embeddings or mapping.EMBEDDING_MODEL))
        lm = load_lm(model, device, dtype, threads=threads)
        made_by.update(model=lm.name, model_fingerprint=lm.fingerprint, dtype=lm.dtype_name)
        with progress("reading the conditions", len(mapping.fitting_anchors())) as step:
            return mapping.model_mapper(lm, step=step)

    if measure:
        _measure([fitted(one) for one in dict.fromkeys([*readers, "words"])], made_by, out_file)
        return
    for text, mapped in zip(texts or [], fitted(readers[0]).map(texts or []), strict=True):
        if as_json:
            print(json.dumps({"text": text, **mapped.record}, ensure_ascii=False))
            continue
        out.print(text, style="bold", markup=False, highlight=False, soft_wrap=True)
        for condition, probability in mapped.ranked[:top]:
            out.print(f"  {probability:6.1%}  {condition.name}", highlight=False)


def _measure(mappers: list[Mapper], made_by: dict[str, Any], out_file: Path | None) -> None:
    """Measure mappers on the held-out phrasings: a table, and JSON where a file is given."""
    from traitbasis.files import write_whole
    from traitbasis.reactive.mapper import CHANCE, measure, phrasings_hash

    measured = [measure(mapper) for mapper in mappers]
    table = Table("", *(one.reader for one in measured), "chance", title=f"{measured[0].n} held-out phrasings")
    for name, chance in CHANCE.items():
        table.add_row(name, *(f"{one.figures[name]:.1%}" for one in measured), f"{chance:.1%}")
    out.print(table)
    if out_file is not None:
        packages = [
            name
            for name in ("traitbasis", "numpy", "torch", "transformers", "sentence-transformers")
            if find_spec(name.replace("-", "_")) is not None
        ]
        made_by = {**made_by, "versions": {name: version(name) for name in packages}, "phrasings": phrasings_hash()}
        readers = [{**one.record, "ridge": mapper.ridge} for one, mapper in zip(measured, mappers, strict=True)]
        chances = {name: round(chance, 4) for name, chance in CHANCE.items()}
        write_whole(out_file, json.dumps({"made_by": made_by, "chance": chances, "readers": readers}, indent=1) + "\n")
        out.print("saved:", out_file, soft_wrap=True, markup=False)
