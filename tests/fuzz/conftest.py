"""The fuzz run, `make fuzz`: thousands of requests that nobody thought of, none of which may fail the server.

It is the same run every time. `--hypothesis-seed=N` makes it another one, `--times=N` makes it N times as long.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from hypothesis import HealthCheck, Phase, settings
from served import WORLDS, Tally, Wire, world

EXAMPLES = 150  # of a test; each is a burst of requests
_TALLY = pytest.StashKey[Tally]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--times", type=int, default=1, help="how many times as long the run is")
    parser.addoption("--least", type=int, default=0, help="requests of a whole run; fewer fail it")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_TALLY] = Tally()
    settings.register_profile(
        "fuzz",
        max_examples=EXAMPLES * config.getoption("--times"),
        derandomize=config.getoption("--hypothesis-seed") is None,
        deadline=None,
        database=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    settings.load_profile("fuzz")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    terminalreporter.section("what was sent")
    for line in config.stash[_TALLY].lines():
        terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def tally(pytestconfig: pytest.Config) -> Tally:
    """Of everything that this run sent."""
    return pytestconfig.stash[_TALLY]


@pytest.fixture(scope="session")
def wires(tally: Tally) -> Iterator[dict[str, Wire]]:
    """A running server for each kind of model, and a client of each."""
    with ExitStack() as stack:
        yield {name: stack.enter_context(world(name, tally)) for name in WORLDS}
