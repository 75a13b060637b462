"""experiments/paper_table.py: what its summary says beside the figures, on figures made by hand."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import typer

sys.path.insert(0, str(Path(__file__).parents[1] / "experiments"))

import paper_table


def figures(calibrated: bool) -> dict[str, Any]:
    """Of one method, with nothing in it but what is asked about."""
    yardstick = {"trait": "impatience", "neutral": 6, "threshold": 0.5, "tolerance": 0.25, "calibrated": calibrated}
    return {
        "fidelity": {"rows": [{"method": "steered", "chance": 0.2}]},
        "composability": {"rows": [{"method": "steered", "chance_ranked": 1 / 6}]},
        "consistency": {"rows": [], "yardsticks": [yardstick], "comparisons": []},
        "realism": {"raters": {"model-free": {"methods": {}}}, "distance": {}},
        "conduct": {"groups": []},
    }


def test_the_summary_has_chance_levels_and_says_where_thresholds_are_not_measured() -> None:
    said = "\n".join(paper_table.summary(figures(calibrated=False)))
    assert "chance: fidelity 0.20, levels 0.50, mix ranked first 0.17" in said
    assert "6 long neutral dialogues are too few" in said and "by default 0.5 and 0.25" in said
    assert "too few" not in "\n".join(paper_table.summary(figures(calibrated=True)))


def test_a_run_without_mixes_is_refused_before_it_trains(tmp_path: Path) -> None:
    with pytest.raises(typer.BadParameter, match="composability is about mixes"):
        paper_table.main(
            model="m", traits="impatience", mixes="", tasks=2, trials=1, turns=10, max_tokens=8, train_samples=4,
            adapter_samples=4, seed=0, jobs=1, threads=1, serve_options="", concurrency=1, folder=tmp_path,
            out_file=tmp_path / "out.json",
        )  # fmt: skip
    assert not [*tmp_path.iterdir()]
