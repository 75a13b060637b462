"""Files are written whole or not at all; those that grow, line by line."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


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
