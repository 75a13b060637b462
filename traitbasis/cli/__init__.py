"""The ``traitbasis`` command. Each command does its imports itself, so that help appears at once."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.markup import escape

from traitbasis.cli import (  # noqa: F401  (they add their commands)
    annotate,
    checks,
    emotions,
    eval_collect,
    eval_long,
    eval_realism,
    eval_traits,
    evaluate,
    rephrase,
    report,
    scenarios,
    select,
    support,
    traits,
    users,
    vectors,
)
from traitbasis.cli.common import app, err, out
from traitbasis.errors import TraitBasisError


@app.callback(invoke_without_command=True)
def top(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        from traitbasis import __version__

        out.print(__version__)
        raise typer.Exit


def main() -> None:
    """Entry point: a known error is one line on stderr and exit status 1, without a traceback."""
    try:
        app()
    except (TraitBasisError, OSError) as error:  # OSError names the file itself
        err.print(f"[red]error:[/red] {escape(str(error))}", highlight=False, soft_wrap=True)
        raise SystemExit(1) from None
