"""The copy-paste blocks of docs/harnesses.md: a test runs what a reader would, with another address."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from types import ModuleType
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "harnesses.md"
USER = "http://127.0.0.1:8000"  # where the page's blocks expect the served user
AGENT = "https://api.openai.com/v1"  # and the model of the agent under test


def block(harness: str, language: str = "python", number: int = 0) -> str:
    """The `number`-th block of `language` under the heading of `harness`."""
    page = PAGE.read_text(encoding="utf-8")
    section = re.search(rf"^## {re.escape(harness)}\n(.*?)(?=^## |\Z)", page, re.DOTALL | re.MULTILINE)
    assert section, f"{PAGE.name} has no heading '## {harness}'"
    blocks = re.findall(rf"^```{language}\n(.*?)^```", section[1], re.DOTALL | re.MULTILINE)
    assert len(blocks) > number, f"'## {harness}' has {len(blocks)} blocks of {language}"
    return str(blocks[number])


def run_python(code: str, user_url: str, agent_url: str = "") -> dict[str, Any]:
    """Run a Python block in this process; returns its names."""
    module = ModuleType("block")
    sys.modules[module.__name__] = module  # pydantic looks its classes' modules up
    exec(compile(_addressed(code, user_url, agent_url), f"<{PAGE.name}>", "exec"), module.__dict__)
    return vars(module)


def run_shell(code: str, user_url: str, folder: Path, **environment: str) -> str:
    """Run a shell block in `folder`, with this environment's programs; returns its output. Fails where it fails."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    ran = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", _addressed(code, user_url, "")],
        cwd=folder,
        env={**os.environ, "PATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=840,
    )
    output = ran.stdout + ran.stderr
    assert ran.returncode == 0, textwrap.indent(output[-6000:], "  ")
    return output


def _addressed(code: str, user_url: str, agent_url: str) -> str:
    assert USER in code, f"the block does not say {USER}"
    return code.replace(USER, user_url).replace(AGENT, f"{agent_url}/v1" if agent_url else AGENT)
