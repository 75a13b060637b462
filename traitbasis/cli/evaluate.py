"""`traitbasis eval`: is the simulated user real, does it show what was asked for, and does that last?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from traitbasis.cli.common import app

eval_app = typer.Typer(no_args_is_help=True, help="Measure simulated users: dialogues first, then what they show.")
app.add_typer(eval_app, name="eval")

Dialogues = Annotated[list[Path], typer.Argument(help="Files of dialogues (traitbasis eval collect), one a method.")]
Out = Annotated[Path | None, typer.Option("--out", help="Write every figure as JSON, with what made it.")]
JudgeUrl = Annotated[
    list[str] | None,
    typer.Option(
        help="An OpenAI-compatible judge as URL#MODEL, such as http://localhost:9000/v1#MODEL; several for several."
    ),
]
JudgeKey = Annotated[
    str, typer.Option(help="The judges' API key, if they want one.", envvar="TRAITBASIS_JUDGE_KEY", show_envvar=True)
]
