"""`make test-harnesses`: start `traitbasis serve`, then run each group of harnesses in its own environment.

    python tests/harnesses/run.py FOLDER [pytest's arguments]

FOLDER has an environment for each group (openai1, openai3): their openai packages exclude each other. None of them
needs torch; the harnesses meet TraitBasis over HTTP alone.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

HERE = Path(__file__).parent.absolute()
GROUPS = ("openai1", "openai3")
START_SECONDS = 300  # the first start fetches the embedded model


def main(environments: str, *arguments: str) -> int:
    """Exit status: 0 when every group passed."""
    failed = []
    # Harnesses write into the folder they run in and into their home.
    with served() as url, tempfile.TemporaryDirectory() as folder:
        for group in GROUPS:
            print(f"--- {group}", flush=True)
            python = Path(environments, group, "bin", "python").absolute()
            ran = subprocess.run(
                [python, "-m", "pytest", "-c", HERE / "pytest.ini", "-p", "no:cacheprovider", HERE / group, *arguments],
                cwd=folder,
                env={**os.environ, "TRAITBASIS_SERVED": url, "HOME": folder},
            )
            if ran.returncode:
                failed.append(group)
    if failed:
        print(f"failed: {', '.join(failed)}")
    return len(failed)


@contextmanager
def served() -> Iterator[str]:
    """`traitbasis serve` on a free port, with the users of users.yaml; its log is shown when it does not start."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    command = [Path(sys.executable).with_name("traitbasis"), "serve", "--port", port, "--users", HERE / "users.yaml"]
    with tempfile.TemporaryFile() as log:
        server = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            url = f"http://127.0.0.1:{port}"
            if not _ready(f"{url}/ready", server):
                sys.exit(f"traitbasis serve did not start:\n{_end(log)}")
            yield url
            if server.poll() is not None:
                sys.exit(f"traitbasis serve ended by itself:\n{_end(log)}")
        finally:
            server.terminate()
            server.wait(60)


def _end(log: IO[bytes]) -> str:
    log.seek(0)
    return log.read().decode(errors="replace")[-4000:]


def _ready(url: str, server: subprocess.Popen[bytes]) -> bool:
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    deadline = time.monotonic() + START_SECONDS
    while server.poll() is None and time.monotonic() < deadline:
        try:
            with direct.open(url, timeout=5):
                return True
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    return False


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
