"""The agent loops of ``examples/`` run as they stand, against a served user."""

from __future__ import annotations

import re
import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest
from samples import MILD_GUARDS, random_basis
from serving import serving
from tiny import tiny_model
from traitbasis.server import create_app

from traitbasis.engines.base import Sampling
from traitbasis.simulator import UserSimulator

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    lm = tiny_model()
    with (
        UserSimulator(
            lm, random_basis(lm, "impatience", dose=0.1), sampling=Sampling(max_tokens=6), guards=MILD_GUARDS
        ) as user,
        serving(create_app(user)) as url,
    ):
        yield f"{url}/v1"


@pytest.fixture
def played(url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> object:
    def play(name: str) -> str:
        monkeypatch.setenv("TRAITBASIS_URL", url)
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return play


def test_every_example_is_tested_here() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == {
        "emotion_condition.py", "tracked_state.py", "support_seeker.py",
    }  # fmt: skip


def test_a_user_in_a_condition_leaves_an_agent_that_asks_the_same(played: object) -> None:
    said = played("emotion_condition.py")  # type: ignore[operator]
    assert said.rstrip().splitlines()[-1].startswith("user:  ###UNSATISFIED###")


def test_a_tracked_user_is_scored(played: object) -> None:
    said = played("tracked_state.py")  # type: ignore[operator]
    score = re.search(r"r_out ([+-]\d\.\d\d), by turn \[", said)
    assert score and -1 <= float(score[1]) <= 1


def test_a_support_seeker_knows_what_tools_have_said(played: object) -> None:
    said = played("support_seeker.py")  # type: ignore[operator]
    groundings = re.findall(r"\{'units': .*", said)
    assert len(groundings) >= 14 and "'source': None" not in groundings[-1]
