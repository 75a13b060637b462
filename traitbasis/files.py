"""Files are written whole or not at all; those that grow, line by line."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from traitbasis.errors import TraitBasisError


def write_whole(path: str | Path, content: bytes | str) -> Path:
    """Write under a temporary name in the same folder, which is made if need be, then rename: never half a file.

    Text becomes UTF-8; half of a surrogate pair becomes ``?``. Raises OSError, and leaves nothing behind.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content.encode("utf-8", "replace") if isinstance(content, str) else content)
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return path


def append_whole(path: Path, text: str) -> None:
    """Add text, some whole lines, to a file, and have it on disk when this returns: a kill cuts off its end at most.

    The folder is made if need be; characters become bytes as in ``write_whole``. Raises OSError.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        file.write(text.encode("utf-8", "replace"))
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def alone(path: Path, error: type[TraitBasisError]) -> Iterator[None]:
    """Whoever adds to a file does it alone: raises `error` at once when somebody else does, in whatever process.

    The system gives the lock back when its holder is killed; the file ``<path>.lock`` may stay and means nothing.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(f"{path}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise error(f"another run is writing {path}; wait for it, or write elsewhere with --out") from None
    try:
        yield
    finally:
        lock.release()
