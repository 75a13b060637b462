"""The figures and the report of a layer sweep, on cells made by hand."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from samples import sample_set, sample_vector

from traitbasis import plots
from traitbasis.basis import CurvePoint, build_basis
from traitbasis.calibrate import Levels
from traitbasis.contexts import contexts_hash, read_contexts
from traitbasis.errors import ReportError
from traitbasis.plots import alt_text, calibration_figure, likelihood_figure, screening_figure, svg, sweep_figure
from traitbasis.report import cell_rows, examples, rule_in_words, write_report
from traitbasis.select import RULE, Likely, Screening, Selection, choose
from traitbasis.sweep import Cell, Spec, SweptTurn

CONTEXTS = tuple(f"task-{i}" for i in range(6))
LAYERS, DOSES = (4, 8), (0.1, 0.2, 0.3)
DEPTH = 12


def made_cell(spec: Spec, gain: float, trait: str, *, seed: int = 0, text: str = "", **means: float) -> Cell:
    """A cell whose turns scatter around these means."""
    draw = torch.Generator().manual_seed(seed)
    usual = {"facts": 0.6, "broken": 0.0, "role_flip": 0.0, "surprise": 3.0, "relevance": 1.0, "words": 20.0} | means
    turns = []
    for i, context in enumerate(CONTEXTS):
        noise = torch.rand(4, generator=draw) - 0.5
        scores = {
            **usual,
            "surprise": usual["surprise"] + float(noise[0]),
            "facts": min(max(usual["facts"] + 0.4 * float(noise[1]), 0), 1),
            "broken": float(i < round(usual["broken"] * len(CONTEXTS))),
            f"probe:{trait}": gain + 0.3 * float(noise[2]),
            f"classifier:{trait}": 1.1 * gain + 0.3 * float(noise[2]) + 0.1 * float(noise[3]),
        }
        turns.append(SweptTurn(context, 100 + i, text or f"{spec.condition} {spec.layer} {spec.dose} {i}", scores))
    return Cell(spec.condition, spec.trait, spec.layer, spec.dose, tuple(turns))


def sweep(
    trait: str = "impatience", layers: Sequence[int] = LAYERS, doses: Sequence[float] = DOSES, auc: float = 0.9
) -> tuple[Selection, list[Cell], list[Cell]]:
    """A selection, the trait's cells, the baselines. The highest dose falls apart."""
    screening = Screening(
        agreement=tuple(0.1 + 0.02 * z for z in range(DEPTH)),
        auc=tuple(auc - 0.01 * abs(z - 6) for z in range(DEPTH)),
        cohens_d=tuple(1.0 + 0.1 * z for z in range(DEPTH)),
        probe_layer=6,
        probe_auc=0.9,
        classifier_layer=7,
        classifier_auc=0.95,
        surprise=(3.2, 0.4),
    )
    likely = [Likely(z, 0.2, 0.05 + 0.01 * z, 0.1 + 0.01 * z, 0.1) for z in range(2, DEPTH, 2)]
    likely += [Likely(z, dose, 0.1 * dose, 0.5 * dose, dose) for z in layers for dose in doses if dose != 0.2]
    likely = sorted({(at.layer, at.dose): at for at in likely}.values(), key=lambda at: (at.dose, at.layer))
    steered, random = [], []
    for i, (z, dose) in enumerate((z, dose) for z in layers for dose in doses):
        worst = dose >= 0.3
        steered.append(
            made_cell(
                Spec("steered", trait, z, dose), 2 * dose + 0.01 * z, trait, seed=i,
                facts=0.2 if worst else 0.6, broken=0.5 if worst else 0.0, surprise=5.0 if worst else 3.2,
            )
        )  # fmt: skip
        random.append(made_cell(Spec("random", None, z, dose), 0.02 * i, trait, seed=50 + i))
    prompted = made_cell(Spec("prompted", trait), 0.2, trait, seed=98, facts=0.5)
    plain = made_cell(Spec("unsteered"), 0.0, trait, seed=99)
    return (
        choose(trait, screening, likely, steered, prompted, plain, random),
        [*steered, prompted],
        [plain, *random],
    )


Sweep = tuple[Selection, list[Cell], list[Cell]]
HOSTILE = '</style></svg><script>hacked()</script><img src="https://x.example/y"> {{ 7 * 7 }} & "quoted"'
MADE_BY = {"model": "tiny-llama", "model_fingerprint": "46917d1a", "seed": 3, "temperature": 0.7, "torch_version": "2"}


@dataclass
class Element:
    tag: str
    attributes: dict[str, str | None]
    text: str = ""


@dataclass
class Page(HTMLParser):
    """Elements in order, each with all the text in it."""

    elements: list[Element] = field(default_factory=list)
    open: list[Element] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        element = Element(tag, dict(attributes))
        self.elements.append(element)
        if tag not in ("meta", "br", "img", "link", "input"):
            self.open.append(element)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append(Element(tag, dict(attributes)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop().tag == tag, f"</{tag}> closes nothing"

    def handle_data(self, data: str) -> None:
        for element in self.open:
            element.text += data

    def all(self, tag: str) -> list[Element]:
        return [element for element in self.elements if element.tag == tag]

    @property
    def tables(self) -> list[list[tuple[str | None, list[str]]]]:
        """Rows of each table: class, and texts of its cells."""
        found: list[list[tuple[str | None, list[str]]]] = []
        for element in self.elements:
            if element.tag == "table":
                found.append([])
            elif element.tag == "tr":
                found[-1].append((element.attributes.get("class"), []))
            elif element.tag in ("td", "th"):
                found[-1][-1][1].append(element)  # type: ignore[arg-type]
        return [[(kind, [" ".join(cell.text.split()) for cell in row]) for kind, row in table] for table in found]  # type: ignore[attr-defined]


def parse(path: Path) -> Page:
    page = Page()
    page.feed(path.read_text("utf-8"))
    page.close()
    assert not page.open, "something is never closed"
    return page


def report(path: Path, *sweeps: Sweep, **options: Any) -> Path:
    return write_report(
        path,
        [selection for selection, _, _ in sweeps],
        {selection.trait: cells for selection, cells, _ in sweeps},
        without_expression(sweeps[0][2]),
        {selection.trait: sample_set(4, selection.trait) for selection, _, _ in sweeps},
        options.pop("made_by", MADE_BY),
        **options,
    )


def without_expression(baselines: Sequence[Cell]) -> list[Cell]:
    """As ``baselines.jsonl`` has them: what all traits share has no trait's scores."""
    return [
        replace(
            cell,
            turns=tuple(
                replace(turn, scores={name: value for name, value in turn.scores.items() if ":" not in name})
                for turn in cell.turns
            ),
        )
        for cell in baselines
    ]


@pytest.fixture(scope="module")
def steerable() -> Sweep:
    return sweep()


@pytest.fixture(scope="module")
def unsteerable() -> Sweep:
    return sweep("angry", auc=0.6)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory, steerable: Sweep, unsteerable: Sweep) -> Path:
    """The report of two traits, of which one is steerable."""
    return report(tmp_path_factory.mktemp("report") / "new folder" / "out.html", steerable, unsteerable)


@pytest.fixture(scope="module")
def page(written: Path) -> Page:
    return parse(written)


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures are made, and not drawn, which takes most of the time."""
    monkeypatch.setattr(plots, "svg", lambda figure, name: f"<svg>{figure.get_suptitle()}</svg>")


# ---- The report


def test_the_report_is_one_file_that_fetches_nothing(written: Path, page: Page) -> None:
    text = written.read_text("utf-8")
    assert not [e for e in page.elements if e.tag in ("script", "link", "img", "iframe", "object", "image")]
    targets = [e.attributes[name] for e in page.elements for name in ("src", "href") if name in e.attributes]
    assert targets and all(target and target.startswith("#") for target in targets)
    assert not re.search(r"https?:|@import|url\((?!#)", text)
    (policy,) = [e for e in page.all("meta") if "http-equiv" in e.attributes]
    assert str(policy.attributes["content"]).startswith("default-src 'none'")


def test_ids_are_unique_and_whatever_is_pointed_at_is_there(written: Path, page: Page) -> None:
    """Six figures in one page, whose makers gave them the same ids."""
    text = written.read_text("utf-8")
    ids = [str(e.attributes["id"]) for e in page.elements if "id" in e.attributes]
    assert len(ids) == len(set(ids))
    wanted = {str(e.attributes["href"])[1:] for e in page.elements if "href" in e.attributes}
    wanted |= set(re.findall(r"url\(#([^)]*)\)", text))
    wanted |= {name for e in page.elements for name in str(e.attributes.get("aria-labelledby") or "").split()}
    assert len(wanted) > 20 and wanted <= set(ids)


def test_figures_are_text_with_a_description_in_the_colours_of_the_page(page: Page, steerable: Sweep) -> None:
    selection = steerable[0]
    figures = page.all("svg")
    assert len(figures) == 6 and all(figure.attributes["role"] == "img" for figure in figures)
    screening, likelihood, turns = (figure.text for figure in figures[:3])
    assert "agreement of pairs" in screening and "AUC," in screening and "Cohen's d," in screening
    assert "fact cost" in likelihood and "nats / fact token" in likelihood
    assert "prompt-only persona" in turns and "random direction, same dose" in turns and "layer 8" in turns
    chosen = next(s for s in selection.summaries if (s.layer, s.dose) == (selection.layer, selection.dose))
    assert f"layer {chosen.layer} at dose {chosen.dose:g}: expression {chosen.gain:+.2f}" in turns
    styles = " ".join(str(e.attributes.get("style")) for e in page.elements)
    assert "currentColor" in styles and "var(--steered" in styles and "#1d1c1a" not in styles


def test_the_table_has_every_cell_and_the_numbers_of_the_selection(page: Page, steerable: Sweep) -> None:
    selection, _, baselines = steerable
    (_, header), *rows = page.tables[1]
    table = [(kind, dict(zip(header, row, strict=True))) for kind, row in rows]
    assert [row["condition"] for _, row in table] == ["unsteered", "prompt-only", *["steered"] * 6]
    facts = np.mean([turn.scores["facts"] for turn in baselines[0].turns])
    assert table[0][1]["facts"] == f"{facts:.2f}" and table[0][1]["expression"] == "+0.00"
    assert table[1][1]["expression"] == f"{selection.prompted.gain:+.2f}"
    by_point = {(str(s.layer), f"{s.dose:g}"): s for s in selection.summaries}
    random = {(str(s.layer), f"{s.dose:g}"): s.gain for s in selection.random}
    for kind, row in table[2:]:
        point = row["layer"], row["dose"]
        summary = by_point.pop(point)
        assert row["expression"] == f"{summary.gain:+.2f}"
        assert row["95 %"] == f"{summary.low:+.2f} to {summary.high:+.2f}"
        assert row["probe"] == f"{summary.by_instrument['probe']:+.2f}"
        assert row["random direction"] == f"{random[point]:+.2f}"
        for name in ("facts", "broken", "surprise", "relevance"):
            assert row[name] == f"{getattr(summary, name):.2f}", name
        assert row["fact cost"] == f"{summary.fact_cost:.2f}"
        chosen = point == (str(selection.layer), f"{selection.dose:g}")
        assert kind == ("chosen" if chosen else "rejected" if summary.rejected else "kept")
        assert row["verdict"].startswith({"chosen": "chosen", "kept": "keeps", "rejected": "rejected: "}[kind])
    assert not by_point


def test_a_rejected_cell_says_why_with_the_floor(steerable: Sweep) -> None:
    selection, cells, baselines = steerable
    rows = {(row.summary.layer, row.summary.dose): row for row in cell_rows(selection, [*cells, *baselines])}
    summary = rows[8, 0.3].summary
    assert summary.rejected == ("facts", "broken", "surprise")
    change = [t.scores["facts"] - u.scores["facts"] for t, u in zip(cells[5].turns, baselines[0].turns, strict=True)]
    lost, kept = summary.facts_change
    assert lost < np.mean(change) < kept
    assert rows[8, 0.3].verdict == (
        f"rejected: facts {summary.facts:.2f}, surely below unsteered ({lost:+.2f} to {kept:+.2f}); "
        f"broken 0.50, at most {RULE.broken:.2f}; "
        f"surprise {summary.surprise:.2f}, at most {3.2 + RULE.surprise * 0.4:.2f}"
    )
    for name in ("expression", "facts", "fact_cost", "broken", "role_flip", "surprise", "relevance", "over_random"):
        only = replace(selection, layer=None, summaries=(replace(summary, rejected=(name,)),))
        verdict = cell_rows(only, baselines)[-1].verdict
        assert re.match(rf"rejected: {name.replace('_', ' ')}s? .*\d\.\d\d", verdict)


def test_the_rule_in_words_has_its_numbers() -> None:
    rule = replace(RULE, fact_cost=0.12, broken=0.13, role_flip=0.14, surprise=0.15, relevance=0.16)
    rule = replace(rule, over_random=0.17, auc=0.18, agreement=0.19)
    words = " ".join(rule_in_words(rule))
    assert all(f"0.{number}" in words for number in range(12, 20))


def test_the_summary_has_a_row_for_each_trait_and_says_which_is_not_steerable(
    page: Page, steerable: Sweep, unsteerable: Sweep
) -> None:
    good, bad = steerable, unsteerable
    assert good[0].steerable and not bad[0].steerable
    (_, header), first, second = page.tables[0]
    chosen = next(s for s in good[0].summaries if (s.layer, s.dose) == (good[0].layer, good[0].dose))
    row = dict(zip(header, first[1], strict=True))
    assert (row["trait"], row["layer"], row["dose"]) == ("impatience", str(good[0].layer), f"{good[0].dose:g}")
    assert row["expression above unsteered"] == f"{chosen.gain:+.2f} ({chosen.low:+.2f} to {chosen.high:+.2f})"
    assert row["facts"] == f"{chosen.facts:.2f}" and row["result"] == "steerable"
    row = dict(zip(header, second[1], strict=True))
    assert row["layer"] == row["facts"] == "–"
    assert row["result"] == f"not steerable on this model: {bad[0].reason}"
    sections = [e.text for e in page.all("section")]
    assert "Chosen: layer 8" in sections[1] and "Not steerable on this model: held-back pairs" in sections[2]
    assert "which was not chosen" in sections[2] and "the choice" not in page.all("svg")[5].text


def test_turns_of_one_context_and_seed_stand_side_by_side(page: Page, steerable: Sweep) -> None:
    selection, cells, baselines = steerable
    shown = examples(selection, [*cells, *baselines])
    assert [(example.context, example.seed) for example in shown] == [("task-0", 100), ("task-1", 101), ("task-2", 102)]
    assert shown[1].turns == {
        "steered": f"steered {selection.layer} {selection.dose} 1",
        "unsteered": "unsteered None 0.0 1",
        "prompted": "prompted None 0.0 1",
        "random": f"random {selection.layer} {selection.dose} 1",
    }
    texts = [" ".join(e.text.split()) for e in page.all("p")]
    for example in shown:
        for condition, text in example.turns.items():
            assert f"{'prompt-only' if condition == 'prompted' else condition}{text}" in texts


def test_the_context_of_an_example_is_shown_where_it_is_known(tmp_path: Path, undrawn: None) -> None:
    contexts = read_contexts()
    selection, cells, baselines = sweep()
    names = dict(zip(CONTEXTS, [context.id for context in contexts], strict=False))
    swap = lambda cell: replace(cell, turns=tuple(replace(t, context=names[t.context]) for t in cell.turns))  # noqa: E731
    known = selection, [swap(cell) for cell in cells], [swap(cell) for cell in baselines]
    said = contexts[1].turns[-1].text
    path = report(tmp_path / "a.html", known, made_by={**MADE_BY, "contexts_hash": contexts_hash(contexts)})
    assert said in " ".join(parse(path).all("main")[0].text.split())
    path = report(tmp_path / "b.html", known, made_by={**MADE_BY, "contexts_hash": "others"})
    assert said not in " ".join(parse(path).all("main")[0].text.split())


def test_what_a_model_wrote_cannot_change_the_page(tmp_path: Path, undrawn: None) -> None:
    selection, cells, baselines = sweep()
    cells = [replace(cell, turns=tuple(replace(turn, text=HOSTILE) for turn in cell.turns)) for cell in cells]
    pairs = sample_set(2)
    pairs = pairs.model_copy(update={"definition": HOSTILE})
    path = write_report(
        tmp_path / "out.html", [replace(selection, reason=HOSTILE)], {"impatience": cells}, baselines,
        {"impatience": pairs}, {**MADE_BY, "model": HOSTILE, "note": [HOSTILE]},
    )  # fmt: skip
    page = parse(path)
    assert not page.all("script") and not page.all("img")
    assert sum(HOSTILE in e.text for e in page.all("p")) >= 3 + 3 + 1  # three steered, three prompted, the definition
    assert HOSTILE in page.all("title")[0].text and HOSTILE in page.all("h1")[0].text


def test_instruments_agree_as_ranks_do(page: Page, steerable: Sweep) -> None:
    _, cells, baselines = steerable
    turns = [turn for cell in [*cells, *baselines] for turn in cell.turns]
    scores = np.array([[turn.scores[f"{name}:impatience"] for name in ("probe", "classifier")] for turn in turns])
    rho = np.corrcoef(scores.argsort(0).argsort(0).T)[0, 1]
    text = " ".join(page.all("section")[1].text.split())
    assert f"probe and classifier: Spearman's ρ {rho:.2f}" in text
    assert "layer 6, AUC 0.90" in text and "layer 7, AUC 0.95" in text
    (_, header), (_, row), _ = page.tables[0]
    assert dict(zip(header, row, strict=True))["instruments agree (ρ)"] == f"{rho:.2f}"


def test_the_report_says_what_made_it(tmp_path: Path, undrawn: None) -> None:
    page = parse(report(tmp_path / "out.html", sweep(), made_by={**MADE_BY, "doses": [0.1, 0.2], "note": None}))
    made = dict(zip([e.text for e in page.all("dt")], [e.text for e in page.all("dd")], strict=True))
    assert made["model fingerprint"] == "46917d1a" and made["seed"] == "3" and made["temperature"] == "0.7"
    assert made["torch version"] == "2" and made["doses"] == "[0.1, 0.2]" and made["note"] == "null"
    assert re.fullmatch("[0-9a-f]{16}", made["pairs of impatience"])


def test_a_calibrated_basis_adds_its_levels(tmp_path: Path, undrawn: None) -> None:
    path = report(tmp_path / "out.html", sweep(), basis=calibrated())
    assert "calibration by dose" in parse(path).all("svg")[3].text
    path = report(tmp_path / "out.html", sweep(), basis=build_basis([sample_vector()]))
    assert len(parse(path).all("svg")) == 3


def test_an_interrupted_write_leaves_what_was_there(
    tmp_path: Path, undrawn: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "out.html"
    path.write_text("before")

    def full(*_: Any) -> Any:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(Path, "replace", full)
        with pytest.raises(ReportError, match=r"out\.html: No space left"):
            report(path, sweep())
    assert path.read_text() == "before" and list(tmp_path.iterdir()) == [path]
    report(path, sweep())
    assert "Layer sweep" in path.read_text("utf-8") and list(tmp_path.iterdir()) == [path]


def test_what_is_not_given_is_named(tmp_path: Path, undrawn: None) -> None:
    selection, cells, baselines = sweep()
    pairs = {"impatience": sample_set()}
    with pytest.raises(ReportError, match="no selection"):
        write_report(tmp_path / "out.html", [], {}, [], {}, {})
    with pytest.raises(ReportError, match="no cells are given for impatience"):
        write_report(tmp_path / "out.html", [selection], {}, baselines, pairs, {})
    with pytest.raises(ReportError, match="no pairs are given for impatience"):
        write_report(tmp_path / "out.html", [selection], {"impatience": cells}, baselines, {}, {})
    with pytest.raises(ReportError, match="no unsteered cell"):
        write_report(tmp_path / "out.html", [selection], {"impatience": cells}, baselines[1:], pairs, {})
    assert not list(tmp_path.iterdir())


def test_thirty_one_traits_stay_small(written: Path) -> None:
    """Figures of three layers, as a sweep has them by default, are half as large again at most."""
    assert 31 * 1.5 * written.stat().st_size / 2 < 15e6


# ---- Figures


def lines(axis: Any, color: str) -> list[Any]:
    return [line for line in axis.get_lines() if line.get_color() == color]


def test_every_plot_of_the_sweep_has_both_baselines_and_the_curve() -> None:
    """Values are those of the selection; what the rule rejected is hollow; the choice alone is circled."""
    selection, cells, baselines = sweep()
    figure = sweep_figure(selection, [*cells, *baselines])
    axes = np.array(figure.axes).reshape(4, len(LAYERS))
    for name, row in zip(("gain", "facts", "broken", "surprise"), axes, strict=True):
        for z, axis in zip(LAYERS, row, strict=True):
            at = [s for s in selection.summaries if s.layer == z]
            curve, *dots = lines(axis, plots.STEERED)
            assert list(curve.get_xdata()) == list(DOSES)
            assert list(curve.get_ydata()) == [getattr(s, name) for s in at]
            hollow = {float(dot.get_xdata()[0]) for dot in dots if dot.get_markerfacecolor() != plots.STEERED}
            assert hollow == {s.dose for s in at if s.rejected} != set()
            (random,) = lines(axis, plots.RANDOM)
            assert list(random.get_ydata()) == [getattr(s, name) for s in selection.random if s.layer == z]
            (prompted,) = lines(axis, plots.PROMPTED)
            assert list(prompted.get_ydata()) == [getattr(selection.prompted, name)] * 2
            assert len(axis.collections) == 2 and axis.patches, "bands of steered, random; of the persona"
            circles = [line for line in axis.get_lines() if line.get_markersize() > 10]
            assert [float(c.get_xdata()[0]) for c in circles] == ([selection.dose] if z == selection.layer else [])
    low, high = axes[0, 0].collections[1].get_paths()[0].vertices[:, 1].min(), max(s.high for s in selection.summaries)
    assert low == pytest.approx(min(s.low for s in selection.summaries if s.layer == LAYERS[0])) and high > low


def test_many_layers_are_drawn_by_layer_with_a_column_for_each_dose() -> None:
    selection, cells, baselines = sweep(layers=range(DEPTH))
    figure = sweep_figure(selection, [*cells, *baselines])
    axes = np.array(figure.axes).reshape(4, len(DOSES))
    for dose, axis in zip(DOSES, axes[0], strict=True):
        assert axis.get_title() == f"dose {dose:g}"
        curve = lines(axis, plots.STEERED)[0]
        assert list(curve.get_xdata()) == list(range(DEPTH))
        assert list(curve.get_ydata()) == [s.gain for s in selection.summaries if s.dose == dose]


def test_a_point_that_stands_alone_has_a_bar() -> None:
    selection, *_ = sweep(layers=(4,), doses=(0.2,))
    axis = sweep_figure(selection).axes[0]
    (low, high) = axis.collections[1].get_segments()[0][:, 1]
    assert (low, high) == (pytest.approx(selection.summaries[0].low), pytest.approx(selection.summaries[0].high))


def test_screening_and_likelihood_draw_what_was_measured() -> None:
    selection, *_ = sweep()
    panels = zip(screening_figure(selection).axes, ("agreement", "auc", "cohens_d"), strict=True)
    for axis, name in panels:
        assert list(axis.get_lines()[0].get_ydata()) == list(getattr(selection.screening, name))
        assert [list(line.get_xdata()) for line in lines(axis, plots.PROMPTED)] == [[selection.layer] * 2]
    for axis, name in zip(likelihood_figure(selection).axes, ("preference", "fact_cost", "kl"), strict=True):
        for line, dose in zip(axis.get_lines(), DOSES, strict=False):
            expected = {at.layer: getattr(at, name) for at in selection.likelihood if at.dose == dose}
            assert dict(zip(line.get_xdata(), line.get_ydata(), strict=True)) == expected


def calibrated() -> Any:
    """A basis whose one trait has levels: medium is a dose of 0.2."""
    basis = build_basis([sample_vector()], layer=2, dose=0.2)
    curve = tuple(CurvePoint(dose, 3 * dose, 2 * dose, 4 * dose, 0.6 - dose, dose) for dose in (0.1, 0.2, 0.4))
    return replace(basis, columns=(replace(basis.columns[0], low=0.5, high=1.4, limit=0.35, curve=curve),))


def test_calibration_marks_the_levels_as_doses() -> None:
    """From a basis, where levels are intensities of a scaled direction, and from what calibration gives."""
    basis = calibrated()
    curve = basis.columns[0].curve
    levels = Levels(0.1, 0.2, 0.28, 0.35, curve, (0.1, 0.2, 0.4), capped=False)
    for figure, panels in ((calibration_figure(basis, "impatience"), 3), (calibration_figure(levels), 4)):
        assert len(figure.axes) == panels
        for axis in figure.axes:
            marks = [float(line.get_xdata()[0]) for line in axis.get_lines()[1:]]
            assert marks == pytest.approx([0.1, 0.2, 0.28, 0.35], abs=1e-4)
        assert list(figure.axes[0].get_lines()[0].get_ydata()) == [point.expression for point in curve]
        assert "medium 0.200" in alt_text(figure) and "limit 0.350" in alt_text(figure)
    with pytest.raises(ReportError, match="not calibrated"):
        calibration_figure(build_basis([sample_vector()]), "impatience")
    with pytest.raises(ReportError, match="no trait 'angry'"):
        calibration_figure(basis, "angry")


def test_the_same_figure_is_the_same_svg() -> None:
    selection, *_ = sweep()
    first, second = (svg(screening_figure(selection), "a") for _ in range(2))
    assert first == second and first.startswith("<svg viewBox=") and first.endswith("</svg>")
    assert "<metadata" not in first and "xlink" not in first and 'id="a-title"' in first


def test_drawing_leaves_pyplot_and_its_settings_alone() -> None:
    import matplotlib

    before = dict(matplotlib.rcParams)
    svg(screening_figure(sweep()[0]), "a")
    assert dict(matplotlib.rcParams) == before
    assert "matplotlib.pyplot" not in sys.modules or not matplotlib.pyplot.get_fignums()


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ReportError, match=r"pip install 'traitbasis\[plots\]'"):
        screening_figure(sweep()[0])


def test_nothing_measured_cannot_be_drawn() -> None:
    with pytest.raises(ReportError, match="no turns were measured for impatience"):
        sweep_figure(replace(sweep()[0], summaries=()))
