"""Fixtures of the harness tests, which run in environments of their own against `traitbasis serve` (``run.py``)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

SERVED = os.environ.get("TRAITBASIS_SERVED", "")
if SERVED:
    from packaging.requirements import Requirement
    from wire import Recorder, ScriptedAgent, listening

    # No harness asks its maker for prices, tells it what it saw, or takes a proxy to this machine.
    os.environ.update(
        LITELLM_LOCAL_MODEL_COST_MAP="True",
        DEEPEVAL_TELEMETRY_OPT_OUT="YES",
        LANGSMITH_TRACING="false",
        SCENARIO_DISABLE_SIMULATION_REPORT_INFO="1",
        NO_PROXY="127.0.0.1",
        no_proxy="127.0.0.1",
        OPENAI_API_KEY="unused",
    )
else:  # an ordinary `pytest` in TraitBasis's own environment
    collect_ignore_glob = ["*/test_*.py"]

# What may be skipped, and why: everything else that was installed has to run.
LEFT_OUT = "cannot be installed on this Python"
NO_PROMPTFOO = "promptfoo is not on the PATH"


@pytest.fixture
def user() -> Iterator[Recorder]:
    """The served user, behind a recorder."""
    recorder = Recorder(SERVED)
    with listening(recorder):
        yield recorder


@pytest.fixture
def agent() -> Iterator[ScriptedAgent]:
    """A scripted agent behind the OpenAI protocol."""
    scripted = ScriptedAgent()
    with listening(scripted):
        yield scripted


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what is marked with a harness that requirements.in leaves out on this Python."""
    for mark in item.iter_markers("harness"):
        wanted = {one.name: one for one in _requirements(item.path.parent / "requirements.in")}
        for name in mark.args:
            marker = wanted[name].marker
            if marker and not marker.evaluate():
                pytest.skip(f"{name} {LEFT_OUT}")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail where something else was skipped, as a harness's own pytest plugin might."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    reasons = [str(report.longrepr) for report in reporter.stats.get("skipped", [])] if reporter else []
    if any(LEFT_OUT not in reason and NO_PROMPTFOO not in reason for reason in reasons):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _requirements(path: Path) -> list[Requirement]:
    lines = [line.partition("#")[0].strip() for line in path.read_text(encoding="utf-8").splitlines()]
    return [Requirement(line) for line in lines if line]
