"""`traitbasis bench`'s own driver of a harness, run by this environment's interpreter: it has no TraitBasis.

The protocol is described in traitbasis/harness/drivers/worker.py.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[2] / "traitbasis" / "harness"
_BOOT = "import runpy, sys; sys.path.append(sys.argv[1]); runpy.run_module(sys.argv[2], run_name='__main__')"


@dataclass
class Driven:
    process: subprocess.Popen[str]
    ready: dict[str, Any]

    def ask(self, what: dict[str, Any]) -> dict[str, Any]:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()
        found: dict[str, Any] = json.loads(self.process.stdout.readline())
        return found

    def play(
        self, domain: str, task: str, model: str = "steered-user@impatience-high", seed: int = 7
    ) -> dict[str, Any]:
        return self.ask({"cell": {"domain": domain, "task": task, "user": {"model": model, "seed": seed}}})


@contextmanager
def driven(driver: str, folder: Path, user_url: str, agent: dict[str, Any], **settings: Any) -> Iterator[Driven]:
    """agent: its kind, url and what else its settings have."""
    asking = {"retries": 1, "timeout": 300, "key_env": "NO_SUCH_VARIABLE"}
    command = [sys.executable, "-c", _BOOT, str(FOLDER), f"drivers.{driver}"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=folder) as process:
        try:
            found = Driven(process, {})
            user = {"url": f"{user_url}/v1", **asking}
            found.ready = found.ask({"agent": {**asking, **agent}, "user": user, **settings})["ready"]
            yield found
        finally:
            process.kill()
