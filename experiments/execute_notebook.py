"""Execute the notebook of this folder, and store with its outputs what made them: a test compares that with its code.

    python experiments/execute_notebook.py    # a few minutes on 2 cores; then commit layer_sweep.ipynb

Settings come from the environment, as the notebook says; a run that is committed has none.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).with_name("layer_sweep.ipynb")
PREFIX = "TRAITBASIS_NOTEBOOK_"


def code_hash(notebook: Any) -> str:
    """Identifies the code cells, in order (16 hex digits)."""
    sources = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    return hashlib.sha256(json.dumps(sources).encode()).hexdigest()[:16]


def execute(source: Path, out: Path, timeout: int = 3600) -> Any:
    """Run all cells in the folder of `source` and write the notebook to `out`, under a temporary name first.

    Raises nbclient's CellExecutionError, and writes nothing, when a cell fails.
    """
    notebook: Any = nbformat.read(source, as_version=4)
    NotebookClient(
        notebook, timeout=timeout, resources={"metadata": {"path": str(source.parent)}}, record_timing=False
    ).execute()
    settings = {name: value for name, value in sorted(os.environ.items()) if name.startswith(PREFIX)}
    notebook.metadata["traitbasis"] = {"code": code_hash(notebook), "settings": settings}
    temporary = out.with_name(out.name + ".part")
    nbformat.write(notebook, temporary)
    temporary.replace(out)
    return notebook


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=NOTEBOOK, help="where to; by default into the notebook itself")
    out = parser.parse_args().out
    execute(NOTEBOOK, out)
    print(f"executed: {out}")


if __name__ == "__main__":
    main()
