"""Composition: orthogonal columns against numpy, leakage against a hand computation, and the commands for both."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import block_outputs, blocks_of
from safetensors import safe_open
from safetensors.torch import save_file
from samples import sample_document, sample_pair, sample_vector
from tiny import LAYERS, save_folder, tiny_model
from typer.testing import CliRunner, Result

from traitbasis import cli
from traitbasis.basis import DEFAULT_DOSE, Basis, CurvePoint, Orthogonalized, build_basis
from traitbasis.chat import tokenize_reply
from traitbasis.cli.heatmap import Grid, cosine_grid, leakage_grid, lines, short
from traitbasis.composition import (
    Leakage,
    LeakageRow,
    compose,
    leakage_steps,
    measure_leakage,
    orthogonalize,
    preference_cost,
)
from traitbasis.contexts import read_contexts
from traitbasis.errors import ArtifactError, PairError, SweepError
from traitbasis.extract import extract
from traitbasis.metrics.fidelity import preference
from traitbasis.model import LanguageModel
from traitbasis.pairs import PairSet, load_pairs
from traitbasis.reading import Reader
from traitbasis.select import Selector
from traitbasis.sweep import Generator, read_cells

A, B, C, D = (sample_vector(name, seed, layers=4, width=24) for seed, name in enumerate("abcd"))
BASIS = build_basis([A, B, C, D], layer={"c": 1})  # a, b and d at layer 2


def columns_at(basis: Basis, layer: int) -> np.ndarray:
    at = [i for i, column in enumerate(basis.columns) if column.layer == layer]
    return basis.matrix[:, at].numpy().astype(np.float64)


def lengths(matrix: np.ndarray) -> np.ndarray:
    return np.linalg.norm(matrix, axis=0)


# --- orthogonal columns -----------------------------------------------------------------------------------------------


def test_symmetric_is_the_polar_factor_of_the_unit_columns_at_their_old_lengths() -> None:
    """Loewdin's set is U V^T of the singular value decomposition: the orthonormal set nearest to the unit columns."""
    own = columns_at(BASIS, 2)
    u, _, vt = np.linalg.svd(own / lengths(own), full_matrices=False)
    np.testing.assert_allclose(columns_at(orthogonalize(BASIS), 2), u @ vt * lengths(own), atol=1e-6)


def test_ordered_is_gram_schmidt_and_leaves_the_first_trait_as_it_is() -> None:
    own, made = columns_at(BASIS, 2), []
    for column in own.T:
        rest = column.copy()
        for before in made:
            rest -= (rest @ before) * before
        made.append(rest / np.linalg.norm(rest))
    ordered = orthogonalize(BASIS, "ordered")
    np.testing.assert_allclose(columns_at(ordered, 2), np.stack(made, 1) * lengths(own), atol=1e-6)
    assert torch.equal(ordered.matrix[:, 0], BASIS.matrix[:, 0]) and ordered.columns[0] == BASIS.columns[0]


@pytest.mark.parametrize("how", ["symmetric", "ordered"])
def test_a_column_says_against_which_traits_and_what_is_left_of_it(how: Any) -> None:
    after = orthogonalize(BASIS, how)
    against = {
        "symmetric": {"a": ("b", "d"), "b": ("a", "d"), "d": ("a", "b")},
        "ordered": {"b": ("a",), "d": ("a", "b")},
    }
    for i, column in enumerate(after.columns):
        if column.trait not in against[how]:
            assert column.orthogonalized is None and torch.equal(after.matrix[:, i], BASIS.matrix[:, i])
            continue
        one, other = BASIS.matrix[:, i].double().numpy(), after.matrix[:, i].double().numpy()
        kept = one @ other / np.linalg.norm(one) / np.linalg.norm(other)
        note = column.orthogonalized
        assert note and (note.how, note.against) == (how, against[how][column.trait])
        assert note.kept == pytest.approx(kept, abs=1e-6)
        assert kept < 0.999
        assert replace(column, orthogonalized=None) == BASIS.columns[i]


@given(st.integers(0, 10**6), st.lists(st.integers(0, 2), min_size=1, max_size=7), st.floats(0, 3))
@settings(max_examples=60, deadline=None)
@pytest.mark.parametrize("how", ["symmetric", "ordered"])
def test_layers_become_orthogonal_lengths_stay_and_twice_is_once(
    how: Any, seed: int, layers: list[int], shared: float
) -> None:
    generator = np.random.default_rng(seed)
    common = shared * generator.standard_normal(24)
    matrix = (generator.standard_normal((24, len(layers))) + common[:, None]) * generator.uniform(0.1, 50, len(layers))
    columns = [replace(BASIS.columns[0], trait=f"t{i}", aliases=(), layer=z) for i, z in enumerate(layers)]
    before = Basis(tuple(columns), torch.tensor(matrix, dtype=torch.float32))
    after = orthogonalize(before, how)
    for layer in set(layers):
        unit = columns_at(after, layer) / lengths(columns_at(after, layer))
        np.testing.assert_allclose(unit.T @ unit, np.eye(unit.shape[1]), atol=2e-6)
        assert layers.count(layer) > 1 or np.array_equal(columns_at(after, layer), columns_at(before, layer))
    np.testing.assert_allclose(lengths(after.matrix.numpy()), lengths(before.matrix.numpy()), rtol=1e-6)
    for trait in before.traits:
        assert after.dose({trait: 1.0}) == pytest.approx(before.dose({trait: 1.0}), rel=1e-5)
    assert orthogonalize(after, how).fingerprint == after.fingerprint
    if how == "symmetric":
        order = generator.permutation(len(layers)).tolist()
        turned = orthogonalize(Basis(tuple(columns[i] for i in order), before.matrix[:, order]))
        scale = float(before.matrix.abs().max())
        np.testing.assert_allclose(turned.matrix, after.matrix[:, order], atol=1e-6 * scale)


def test_a_basis_that_is_orthogonal_already_keeps_its_fingerprint() -> None:
    alone = build_basis([A, B, C], layer={"a": 0, "b": 1, "c": 2})
    assert orthogonalize(alone).fingerprint == alone.fingerprint
    made = Basis(BASIS.columns[:2], torch.eye(24)[:, :2].contiguous())
    assert orthogonalize(made, "ordered").fingerprint == made.fingerprint
    assert orthogonalize(BASIS).fingerprint != BASIS.fingerprint != orthogonalize(BASIS, "ordered").fingerprint


def test_linearly_dependent_columns_are_refused_by_name() -> None:
    copy = replace(B, trait="copy", aliases=(), vector=-3 * A.vector + 1e-6 * B.vector)
    with pytest.raises(ArtifactError, match=r"^a and copy are linearly dependent at layer 2; leave one"):
        orthogonalize(build_basis([A, D, copy]))
    plane = replace(C, trait="plane", aliases=(), vector=A.vector + B.vector)
    for how in ("symmetric", "ordered"):
        with pytest.raises(ArtifactError, match="a and b and plane are linearly dependent at layer 2"):
            orthogonalize(build_basis([D, A, B, plane]), how)  # type: ignore[arg-type]
    many = [sample_vector(f"t{i}", i, layers=4, width=3) for i in range(4)]
    with pytest.raises(ArtifactError, match="linearly dependent"):
        orthogonalize(build_basis(many))
    assert orthogonalize(build_basis([A, copy], layer={"copy": 1})).traits == ("a", "copy"), "layers are left alone"


def test_what_was_changed_before_is_not_changed_again_beside_a_new_trait() -> None:
    changed = orthogonalize(BASIS)
    mixed = Basis((*changed.columns[:2], BASIS.columns[3]), torch.cat([changed.matrix[:, :2], BASIS.matrix[:, 3:]], 1))
    with pytest.raises(ArtifactError, match=r"column 'a' was made orthogonal to b, d before; build the basis again"):
        orthogonalize(mixed)
    with pytest.raises(ArtifactError, match="'qr'; known: symmetric, ordered"):
        orthogonalize(BASIS, "qr")  # type: ignore[arg-type]


def test_an_orthogonal_basis_comes_back_from_its_file(tmp_path: Path) -> None:
    for name, basis in (("plain", BASIS), ("made", orthogonalize(BASIS))):
        path = basis.save(tmp_path / f"{name}.safetensors")
        loaded = Basis.load(path)
        assert loaded.columns == basis.columns and loaded.fingerprint == basis.fingerprint
        with safe_open(path, framework="pt") as file:
            columns = json.loads(file.metadata()["traitbasis"])["columns"]
        assert ["orthogonalized" in column for column in columns] == [
            c.orthogonalized is not None for c in basis.columns
        ]
        assert ("orthogonalized" in str(columns)) == (name == "made"), "contract 11: old fingerprints stay"


@pytest.mark.parametrize(
    ("note", "words"),
    [
        (("qr", ("b",), 0.9), "'qr'; known: symmetric"),
        (("symmetric", (), 0.9), "against"),
        (("symmetric", (3,), 0.9), "against"),
        (("ordered", ("b",), 0.0), "kept 0.0"),
        (("ordered", ("b",), 1.1), "kept 1.1"),
        (("ordered", ("b",), "x"), "kept 'x'"),
        (("ordered", ("b",), float("nan")), "kept nan"),
    ],
)
def test_a_note_that_cannot_be_is_refused(note: Any, words: str) -> None:
    with pytest.raises(ArtifactError, match=words):
        Orthogonalized(*note)


# --- a basis of what is known -----------------------------------------------------------------------------------------

LIKELY = [
    {"layer": z, "dose": 0.2, "preference": p, "fact_cost": c, "kl": 0.1}
    for z, p, c in ((0, 0.9, 2.0), (1, 0.5, 0.1), (3, 0.7, 0.1))
]
SELECTED: dict[str, Any] = {
    "a": {"layer": 3, "dose": 0.1, "likelihood": LIKELY},
    "b": {"layer": None, "dose": None, "likelihood": LIKELY},
    "c": {"layer": None, "dose": None},
}


def test_layers_and_doses_are_the_selected_ones_and_each_says_where_it_is_from() -> None:
    basis, sources = compose([A, B, C, D], selections=SELECTED)
    assert [column.layer for column in basis.columns] == [3, 3, 2, 2]  # b: most preference of those that keep facts
    assert [column.steerable for column in basis.columns] == [True, False, False, True]
    doses = [basis.dose({trait: 1.0}) for trait in "abcd"]
    assert doses == pytest.approx([0.1, DEFAULT_DOSE, DEFAULT_DOSE, DEFAULT_DOSE], rel=1e-5)
    assert sources == {
        "a": "layer selected, dose selected",
        "b": "layer likeliest of a trait that is not steerable, dose default",
        "c": "layer middle, dose default",
        "d": "layer middle, dose default",
    }
    assert compose([A, B])[0].fingerprint == build_basis([A, B]).fingerprint


def test_what_is_asked_for_comes_before_what_was_selected() -> None:
    basis, sources = compose([A, B], selections=SELECTED, layer={"a": 0}, dose=0.3)
    assert [column.layer for column in basis.columns] == [0, 3]
    assert [basis.dose({trait: 1.0}) for trait in "ab"] == pytest.approx([0.3, 0.3], rel=1e-5)
    assert sources["a"] == "layer asked, dose asked"
    assert [column.steerable for column in basis.columns] == [True, False]
    for option in ({"layer": {"z": 1}}, {"dose": {"z": 1.0}}):
        with pytest.raises(ArtifactError, match="no vector is given for z"):
            compose([A], **option)  # type: ignore[arg-type]
    with pytest.raises(ArtifactError, match="layer 9 for a does not exist"):
        compose([A], layer=9)


GOOD = {"layer": 1, "dose": 0.1}


@pytest.mark.parametrize(
    ("traits", "words"),
    [
        ([1], r"its traits are \[1\]"),
        (None, "no objects"),
        ({"a": [1]}, r"trait 'a': \[1\] is no selection"),
        ({"a": None}, "trait 'a': None is no selection"),
        ({"a": {"dose": 0.1}}, "trait 'a': it has no 'layer'"),
        ({"a": {"layer": 1}}, "trait 'a': it has no 'dose'"),
        ({"a": {**GOOD, "layer": True}}, "layer True is no layer number"),
        ({"a": {**GOOD, "layer": "1"}}, "layer '1' is no layer number"),
        ({"a": {**GOOD, "dose": "much"}}, "dose 'much' is not a number"),
        ({"a": {**GOOD, "dose": float("nan")}}, "dose nan is not a number"),
        ({"a": {**GOOD, "dose": 1e300}}, r"dose 1e\+300 is not a number above 0 and at most 10"),
        ({"a": {**GOOD, "layer": None}}, "do not go together"),
        ({"a": {**GOOD, "likelihood": [1]}}, "trait 'a': "),
        ({"a": {**GOOD, "likelihood": 1}}, "trait 'a': "),
        ({"a": {**GOOD, "likelihood": [{"layer": 1}]}}, "trait 'a': "),
        ({"a": {**GOOD, "likelihood": [{**LIKELY[0], "layer": "x"}]}}, "no layer number"),
        ({"a": {**GOOD, "likelihood": [{**LIKELY[0], "preference": "x"}, *LIKELY]}}, "trait 'a': "),
    ],
)
def test_a_damaged_selection_is_an_error_with_file_and_trait(traits: Any, words: str, tmp_path: Path) -> None:
    path = tmp_path / "selection.json"
    path.write_text(json.dumps({"format": "traitbasis.selection/1", "traits": traits}))
    objects = isinstance(traits, dict) and isinstance(traits["a"], dict)
    with pytest.raises((ArtifactError, SweepError), match=words if objects else "its traits are no objects") as raised:
        compose([A, B], selections=path)
    assert str(path) in str(raised.value) and "traitbasis select" in str(raised.value)
    if traits is not None:
        with pytest.raises(ArtifactError, match=words):
            compose([A, B], selections=traits)
    if objects:
        assert compose([B], selections=path)[0].traits == ("b",), "another trait's damage is none of this one"


@pytest.mark.parametrize("content", ["[1]", "null", "{}", "", "3"])
def test_what_is_no_selection_at_all_is_an_error_with_the_file(content: str, tmp_path: Path) -> None:
    path = tmp_path / "selection.json"
    path.write_text(content)
    with pytest.raises(SweepError, match=r"selection\.json"):
        compose([A], selections=path)


def calibrated(basis: Basis) -> Basis:
    curve = (CurvePoint(0.1, 0.2, 0.1, 0.3, 1.0, 0.0),)
    known: dict[str, Any] = {"low": 0.4, "high": 1.25, "limit": 0.45, "curve": curve}
    return Basis(tuple(replace(column, **known) for column in basis.columns), basis.matrix)


def test_what_calibration_measured_at_a_layer_is_kept() -> None:
    earlier = calibrated(build_basis([A, B], layer={"a": 3}, dose={"a": 0.15, "b": 0.25}))
    basis, sources = compose([A, B, C], earlier=earlier)
    assert basis.columns[:2] == earlier.columns
    assert sources["a"] == "layer calibrated, dose calibrated" and sources["c"] == "layer middle, dose default"
    assert compose([A, B], earlier=orthogonalize(earlier))[0].fingerprint == earlier.fingerprint, "and can be undone"
    again = compose([A, B], earlier=earlier, selections=SELECTED)[0].columns
    assert again[0] == earlier.columns[0], "selected where it was calibrated"
    assert (again[1].layer, again[1].limit, again[1].steerable) == (3, None, False), "measured at another layer"


def test_another_dose_keeps_the_limit_and_another_vector_keeps_nothing() -> None:
    earlier = calibrated(build_basis([A, B]))
    basis, _ = compose([A, B], earlier=earlier, dose={"a": 0.3})
    one, other = basis.columns
    assert (one.low, one.high, one.limit) == (0.5, 1.5, 0.45) and other == earlier.columns[1]
    assert basis.dose({"a": 1.0}) == pytest.approx(0.3, rel=1e-5)
    changed = replace(A, provenance=replace(A.provenance, pair_set_hash="d" * 64))
    assert compose([changed], earlier=earlier)[0].columns[0].limit is None
    plain = build_basis([A], layer=1, dose=0.4)
    assert compose([A], earlier=plain)[0].fingerprint == build_basis([A]).fingerprint, "nothing was calibrated"


# --- on a model -------------------------------------------------------------------------------------------------------


def haste() -> PairSet:
    """A trait of one's own, without `extra` pairs: no classifier."""
    texts = [(f"Send W{i} now, I run late.", f"Send W{i} then, I have time.") for i in range(5)]
    uses = ["default", "default", "heldout", "heldout", "heldout"]
    made = [
        sample_pair(i, use=use, positive=one, negative=other)
        for i, ((one, other), use) in enumerate(zip(texts, uses, strict=True))
    ]
    return PairSet.model_validate(sample_document(*made, trait="haste", aliases=["hasty"]))


PAIRS = {"impatience": load_pairs("impatience"), "skeptical": load_pairs("skeptical"), "haste": haste()}


@pytest.fixture(scope="module")
def lm() -> LanguageModel:
    return tiny_model()


@pytest.fixture(scope="module")
def basis(lm: LanguageModel) -> Basis:
    """impatience and haste at one layer; the vector of skeptical is made from the classifier's pairs, too."""
    vectors = [extract(lm, PAIRS["impatience"]), extract(lm, PAIRS["haste"])]
    skeptical = extract(lm, PAIRS["skeptical"], pairs=PAIRS["skeptical"].for_extraction(5))
    return build_basis([*vectors, skeptical], layer={"skeptical": 1}, dose={"impatience": 0.5})


@pytest.fixture(scope="module")
def selector(lm: LanguageModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Selector]:
    with Generator(lm, read_contexts()[:3], turns=4, max_tokens=12) as generator:
        yield Selector(generator, tmp_path_factory.mktemp("leakage"))


@pytest.fixture(scope="module")
def measured(selector: Selector, basis: Basis) -> Leakage:
    steps: list[int] = []
    found = measure_leakage(selector, basis, PAIRS, progress=steps.append)
    assert sum(steps) == leakage_steps(basis) == 9
    return found


def test_the_cost_in_preference_is_that_of_the_held_out_pairs(lm: LanguageModel, basis: Basis) -> None:
    after = orthogonalize(basis)
    found = preference_cost(Reader(lm), basis, after, PAIRS)
    assert list(found) == ["impatience", "haste"], "skeptical stands alone at its layer"
    for trait, values in found.items():
        pairs = PAIRS[trait].select("heldout")
        plain = preference(lm, pairs, {}, "user").mean()
        for value, one in zip(values, (basis, after), strict=True):
            expected = preference(lm, pairs, one.additions({trait: 1.0}), "user").mean() - plain
            assert value == pytest.approx(float(expected), abs=1e-4)
        assert values[0] != pytest.approx(values[1], abs=1e-4)


def states_of(lm: LanguageModel, selector: Selector, texts: list[str]) -> np.ndarray:
    """Mean states ``(turns, layers, d_model)`` of written turns, each from a full forward of the bare network."""
    found = []
    for (number, _), text in zip(selector.generator.cases, texts, strict=True):
        reply = tokenize_reply(lm.tokenizer, selector.generator.contexts[number].turns, text, "user")
        states = block_outputs(lm.model, reply.ids, blocks_of(lm.model))
        found.append(states[:, list(reply.positions)].mean(1))
    return np.stack(found)


def test_leakage_is_what_a_hand_computation_of_the_texts_gives(
    lm: LanguageModel, selector: Selector, basis: Basis, measured: Leakage
) -> None:
    """Steered and unsteered texts are read again, projected on each trait's own instruments, and compared."""
    _, steered = read_cells(selector.folder / f"leakage-{basis.fingerprint}.jsonl")
    _, shared = read_cells(selector.folder / "baselines.jsonl")
    texts = {(c.condition, c.trait, c.layer, c.dose): [turn.text for turn in c.turns] for c in [*steered, *shared]}
    plain = states_of(lm, selector, texts["unsteered", None, None, 0.0])
    doses = {"impatience": 0.5, "haste": 0.2, "skeptical": 0.2}

    def gain(text: list[str], trait: str) -> np.ndarray:
        states = states_of(lm, selector, text)
        probe, classifier = selector.instruments(PAIRS[trait])[trait]
        shown = [(states - plain)[:, probe.layer] @ probe.direction.numpy()]
        # haste has no pairs for a classifier, and skeptical's would have seen the pairs of its vector.
        if trait == "impatience":
            assert classifier
            shown.append((states - plain)[:, classifier.layer] @ classifier.weights.numpy())
        return np.asarray(np.mean(shown, 0))

    assert measured.basis == basis.fingerprint and measured.traits == ("impatience", "haste", "skeptical")
    for one, row in zip(basis.columns, measured.rows, strict=True):
        for j, other in enumerate(measured.traits):
            each = gain(texts["steered", one.trait, one.layer, doses[one.trait]], other)
            assert row.gain[j] == pytest.approx(each.mean(), abs=2e-3)
            draws = np.random.default_rng(0).choice(each, (20000, 4)).mean(1)
            tolerance = 0.15 * each.std() + 1e-3
            np.testing.assert_allclose((row.low[j], row.high[j]), np.percentile(draws, [2.5, 97.5]), atol=tolerance)
    for j, column in enumerate(basis.columns):
        each = gain(texts["random", None, column.layer, doses[column.trait]], column.trait)
        assert measured.random.gain[j] == pytest.approx(each.mean(), abs=2e-3)
    assert max(abs(value) for row in measured.rows for value in row.gain) > 0.05, "something moved"


def test_steering_is_the_trait_alone_at_its_medium(
    lm: LanguageModel, selector: Selector, basis: Basis, measured: Leakage
) -> None:
    _, cells = read_cells(selector.folder / f"leakage-{basis.fingerprint}.jsonl")
    for cell, column in zip(cells, basis.columns, strict=True):
        addition = column.scale * basis.matrix[:, basis.traits.index(column.trait)]
        (drawn,) = selector.generator.draw([{column.layer: addition}], [""])
        assert [turn.text for turn in cell.turns] == drawn
        assert float(addition.norm()) / column.layer_norm == pytest.approx(cell.dose, abs=1e-4)


def test_a_second_call_draws_nothing_and_finds_the_same(
    selector: Selector, basis: Basis, measured: Leakage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selector.generator, "draw", lambda *_: pytest.fail("everything was drawn before"))
    assert measure_leakage(selector, basis, PAIRS) == measured
    steps: list[int] = []
    part = measure_leakage(selector, basis, PAIRS, traits=["skeptical", "impatience"], progress=steps.append)
    assert part.traits == ("impatience", "skeptical") and sum(steps) == leakage_steps(basis, part.traits) == 6
    assert part.rows[0].gain == (measured.rows[0].gain[0], measured.rows[0].gain[2])
    assert part.random.gain == (measured.random.gain[0], measured.random.gain[2])


def test_leakage_says_what_made_it_and_comes_back_from_its_file(measured: Leakage, tmp_path: Path) -> None:
    """Contract 11."""
    assert Leakage.load(measured.save(tmp_path / "x" / "leakage.json")) == measured
    assert [file.name for file in (tmp_path / "x").iterdir()] == ["leakage.json"]
    wanted = {"model": "tiny-llama", "seed": 0, "turns": 4, "as_": "user"}
    assert wanted.items() <= measured.made_by.items()
    assert set(measured.made_by["pairs"]) == set(PAIRS) and "torch_version" in measured.made_by


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        '{"format": "traitbasis.leakage/2"}',
        '{"format": "traitbasis.leakage/1", "basis": "x"}',
        json.dumps(
            {"format": "traitbasis.leakage/1", "basis": "x", "traits": ["a"], "rows": [], "random": {}, "made_by": {}}
        ),
    ],
)
def test_a_leakage_file_that_is_none_is_an_error_with_its_name(content: str, tmp_path: Path) -> None:
    (tmp_path / "l.json").write_text(content)
    with pytest.raises(ArtifactError, match=r"l\.json.*traitbasis basis leakage"):
        Leakage.load(tmp_path / "l.json")
    with pytest.raises(ArtifactError, match=r"gone\.json"):
        Leakage.load(tmp_path / "gone.json")


def test_a_table_that_is_not_square_is_refused() -> None:
    row = LeakageRow((0.1, 0.2), (0.0, 0.1), (0.2, 0.3))
    for rows, random in (((row,), row), ((row, row), LeakageRow((0.1,), (0.0,), (0.2,)))):
        with pytest.raises(ArtifactError, match="leakage table of 2 traits"):
            Leakage("x", ("a", "b"), rows, random, {})
    with pytest.raises(ArtifactError, match="interval missing"):
        LeakageRow((0.1,), (), (0.2,))


def test_leakage_is_refused_before_anything_is_drawn(selector: Selector, basis: Basis) -> None:
    with pytest.raises(ArtifactError, match="the basis has no greed; it has impatience, haste, skeptical"):
        measure_leakage(selector, basis, PAIRS, traits=["greed"])
    with pytest.raises(PairError, match="no contrastive pairs are given for 'haste'"):
        measure_leakage(selector, basis, {name: PAIRS[name] for name in ("impatience", "skeptical")})
    bare = PAIRS["haste"].model_copy(update={"pairs": PAIRS["haste"].select("default")})
    with pytest.raises(PairError, match="haste: no pair is marked 'use: heldout'"):
        measure_leakage(selector, basis, {**PAIRS, "haste": bare})
    with pytest.raises(ArtifactError, match="does not fit tiny-llama"):
        measure_leakage(selector, BASIS, PAIRS)


# --- heat maps --------------------------------------------------------------------------------------------------------


def test_numbers_are_short_and_signed() -> None:
    assert [short(x) for x in (0.07, -0.5, 1.0, 0.996, -1.204, 0.0, -0.001, 10.5)] == [
        "+.07",
        "-.50",
        "+1.00",
        "+1.00",
        "-1.20",
        ".00",
        ".00",
        "+10.50",
    ]


def test_cosines_across_layers_stand_in_brackets_and_without_colour() -> None:
    text = list(lines(cosine_grid(BASIS), 80))
    shown = [line.plain.split() for line in text]
    value = {key: short(float(BASIS.cosine()[key])) for key in ((0, 1), (0, 2))}
    assert shown[1] == ["a", "b", "c", "d"]
    assert shown[2][:4] == ["a", "+1.00", value[0, 1], f"({value[0, 2]})"]
    assert shown[4] == [
        "c",
        *(f"({short(x)})" if j != 2 else "+1.00" for j, x in enumerate(BASIS.cosine()[2].tolist())),
    ]
    styles = {span.style.bgcolor is not None for span in text[4].spans if hasattr(span.style, "bgcolor")}  # type: ignore[union-attr]
    assert styles == {False, True}, "the diagonal alone is coloured"


def table(n: int) -> Leakage:
    row = LeakageRow(tuple(0.1 * i for i in range(n)), tuple(0.1 * i - 0.15 for i in range(n)), (2.0,) * n)
    return Leakage("x", tuple(f"t{i}" for i in range(n)), (row,) * n, row, {})


def test_leakage_has_stars_intervals_and_a_random_row() -> None:
    shown = [line.plain for line in lines(leakage_grid(table(4)), 80)]
    body = [line for line in shown if line.startswith(("t", "("))]
    assert body[0].split() == ["t0", ".00", "+.10", "+.20*", "+.30*"]
    assert body[-1].split()[0] == "(random)" and len(body) == 5
    assert shown[shown.index(body[0]) + 1].split() == ["-.15..+2.00", "-.05..+2.00", "+.05..+2.00", "+.15..+2.00"]


@pytest.mark.parametrize("width", [40, 80, 200])
def test_many_traits_are_numbered_in_blocks_that_fit_and_small_values_are_dots(width: int) -> None:
    grid = leakage_grid(table(31))
    for everything in (False, True):
        text = [line.plain for line in lines(grid, width, everything=everything)]
        assert all(len(line) <= width for line in text[:-1] if ":" not in line)
        heads = [
            int(n) for line in text if (numbers := line.split()) and all(map(str.isdigit, numbers)) for n in numbers
        ]
        assert heads == list(range(1, 32)), "each column stands in one block"
        rows = [line.split()[2:] for line in text if line.startswith(" 5 t4 ")]
        values = [value for row in rows for value in row]
        assert len(values) == 31 and values[4] == "+.40*" and values[30] == "+3.00*"
        assert values[:2] == ([".00", "+.10"] if everything else ["·", "·"]), "t0, t1: the interval holds 0"
        assert ("--all" in text[-1]) != everything


def test_a_small_value_on_the_diagonal_is_shown_all_the_same() -> None:
    n = 13
    grid = Grid("g", tuple("abcdefghijklm"), tuple("abcdefghijklm"), [[0.01] * n for _ in range(n)], 1.0, 0.3)
    rows = [line.plain.split()[1:] for line in lines(grid, 200)][2 : 2 + n]
    assert all(row == ["·"] * i + ["+.01"] + ["·"] * (n - 1 - i) for i, row in enumerate(rows))


# --- the commands -----------------------------------------------------------------------------------------------------


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli.app, ["basis", *map(str, arguments)])


def succeed(*arguments: str | Path) -> str:
    result = run(*arguments)
    assert result.exit_code == 0, (result.output, result.exception)
    return result.output


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with vectors of a model named ``m``."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli.vectors.out, "_width", 120)  # put back as unset, which "width" would not be
    for vector in (A, B, C, D):
        vector.save(f"vectors/m/{vector.trait}.safetensors")
    return tmp_path


def select_file(path: Path) -> None:
    path.write_text(json.dumps({"format": "traitbasis.selection/1", "made_by": {}, "traits": SELECTED}))


def test_build_takes_what_was_selected_and_says_so(here: Path) -> None:
    select_file(here / "vectors/m/selection.json")
    output = succeed("build", "--model", "m")
    built = Basis.load("vectors/m/basis.safetensors")
    assert built.fingerprint == compose([A, B, C, D], selections=SELECTED)[0].fingerprint
    assert "a: layer selected, dose selected" in output and "d: layer middle" in output
    (here / "vectors/m/selection.json").rename("elsewhere.json")
    assert "a: layer middle" in succeed("build", "--model", "m", "--out", "x.safetensors")
    output = succeed("build", "--model", "m", "--selection", "elsewhere.json", "--layer", "a=1, b=0", "--dose", "b=.3")
    assert [column.layer for column in Basis.load("vectors/m/basis.safetensors").columns] == [1, 0, 2, 2]
    assert "a: layer asked, dose selected" in output and "b: layer asked, dose asked" in output


def test_build_takes_trait_vectors_and_names_what_else_lies_among_them(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli.vectors.err, "_width", 120)
    succeed("build", "--model", "m", "--orthogonal", "symmetric", "--out", "vectors/m/orth.safetensors")
    save_file({"x": torch.zeros(2)}, "vectors/m/foreign.safetensors")
    output = succeed("build", "--model", "m")
    assert Basis.load("vectors/m/basis.safetensors").fingerprint == build_basis([A, B, C, D]).fingerprint
    for name in ("orth", "foreign"):
        assert f"vectors/m/{name}.safetensors is no trait vector and is left out" in output
    assert "basis.safetensors is no" not in succeed("build", "--model", "m")
    (here / "vectors/m/e.safetensors").write_text("half a vector")
    assert "e.safetensors is damaged" in str(run("build", "--model", "m").exception), "not left out in silence"
    assert "orth.safetensors is not a" in str(run("build", "--model", "m", "--traits", "orth").exception)


def test_build_saves_no_dose_that_is_never_served(here: Path) -> None:
    assert "at most 10" in str(run("build", "--model", "m", "--dose", "1e300").exception)
    assert not (here / "vectors/m/basis.safetensors").exists()


def test_build_keeps_the_calibration_it_overwrites(here: Path) -> None:
    earlier = calibrated(build_basis([A, B, C, D], layer={"a": 3}))
    earlier.save("vectors/m/basis.safetensors")
    succeed("build", "--model", "m")
    assert Basis.load("vectors/m/basis.safetensors").fingerprint == earlier.fingerprint
    (here / "vectors/m/basis.safetensors").write_text("no basis")
    assert "nothing is kept of it" in succeed("build", "--model", "m")
    assert Basis.load("vectors/m/basis.safetensors").fingerprint == build_basis([A, B, C, D]).fingerprint


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--layer", "a"], "--layer is 'a'"),
        (["--layer", "1,b=2"], "--layer is '1,b=2'"),
        (["--layer", "a=1,a=2"], "--layer is"),
        (["--layer", "1.5"], "--layer is '1.5'"),
        (["--dose", "a=b=1"], "--dose is"),
        (["--measure"], "--orthogonal"),
    ],
)
def test_build_says_which_option_it_cannot_read(arguments: list[str], words: str, here: Path) -> None:
    result = run("build", "--model", "m", *arguments)
    assert result.exit_code == 2 and words in " ".join(result.output.replace("│", " ").split())


def test_build_refuses_a_trait_or_a_selection_that_is_not_there(here: Path) -> None:
    assert "no vector is given for z" in str(run("build", "--model", "m", "--layer", "z=1").exception)
    assert "gone.json" in str(run("build", "--model", "m", "--selection", "gone.json").exception)


def test_an_orthogonal_basis_is_built_in_the_order_asked_for_and_shown_with_its_cost(here: Path) -> None:
    succeed("build", "--model", "m", "--orthogonal", "ordered", "--traits", "b,a,d", "--out", "o/basis.safetensors")
    expected = orthogonalize(build_basis([B, A, D]), "ordered")
    assert Basis.load("o/basis.safetensors").fingerprint == expected.fingerprint
    output = succeed("show", "o/basis.safetensors")
    note = expected.columns[2].orthogonalized
    assert note and "b, a (ordered)" in output and f"{note.kept:.3f}" in output
    assert "levels and limits were measured before" not in output
    orthogonalize(calibrated(BASIS)).save("o/calibrated.safetensors")
    assert "levels and limits were measured before" in succeed("show", "o/calibrated.safetensors")


def test_show_has_the_levels_and_marks_what_is_not_steerable(here: Path) -> None:
    known = Basis(tuple(replace(c, steerable=c.trait != "b") for c in calibrated(BASIS).columns), BASIS.matrix)
    known.save("b.safetensors")
    rows = {
        line.split()[0]: line.split() for line in succeed("show", "b.safetensors").splitlines() if "(0.250)" in line
    }
    assert rows["a"] == ["a", "2", "0.4", "(0.080)", "1", "(0.200)", "1.25", "(0.250)", "0.450", "yes", "2"]
    assert rows["b"][-2:] == ["no", "2"] and list(rows) == ["a", "b", "c", "d"]
    shown = json.loads(succeed("show", "b.safetensors", "--json"))
    assert shown["fingerprint"] == known.fingerprint and shown["leakage"] is None
    assert shown["columns"][1]["steerable"] is False and shown["columns"][0]["limit"] == 0.45
    assert shown["columns"][0]["levels"]["high"] == {"intensity": 1.25, "dose": pytest.approx(0.25, rel=1e-5)}
    np.testing.assert_allclose(shown["cosine"], known.cosine(), atol=1e-6)


def test_show_finds_the_leakage_of_this_basis_and_of_no_other(here: Path) -> None:
    BASIS.save("o/basis.safetensors")
    assert "leakage was not measured" in succeed("show", "o/basis.safetensors")
    own = replace(table(4), basis=BASIS.fingerprint, traits=BASIS.traits)
    own.save("o/leakage.json")
    assert "+.30*" in succeed("show", "o/basis.safetensors")
    assert Leakage("x", **{k: v for k, v in vars(own).items() if k != "basis"}).save("other.json")
    shown = json.loads(succeed("show", "o/basis.safetensors", "--json"))["leakage"]
    assert shown["rows"][0]["gain"] == pytest.approx([0, 0.1, 0.2, 0.3])
    orthogonalize(BASIS).save("o/basis.safetensors")
    output = succeed("show", "o/basis.safetensors")
    assert f"leakage of another basis ({BASIS.fingerprint}" in output and "+.30*" not in output
    assert "another basis (x" in str(run("show", "o/basis.safetensors", "--leakage", "other.json").exception)
    assert "gone.json" in str(run("show", "o/basis.safetensors", "--leakage", "gone.json").exception)
    Path("o/leakage.json").write_text("{")
    assert "cannot read the leakage table" in succeed("show", "o/basis.safetensors")


def test_the_picture_is_the_same_for_the_same_numbers_and_has_them(here: Path) -> None:
    pytest.importorskip("matplotlib")
    BASIS.save("o/basis.safetensors")
    replace(table(4), basis=BASIS.fingerprint, traits=BASIS.traits).save("o/leakage.json")
    assert "saved: p/one.svg" in succeed("show", "o/basis.safetensors", "--heatmap", "p/one.svg")
    succeed("show", "o/basis.safetensors", "--heatmap", "two.svg")
    first = Path("p/one.svg").read_text()
    assert first == Path("two.svg").read_text()
    assert all(
        word in first for word in (BASIS.fingerprint, "(random)", "+.30*", f"({short(float(BASIS.cosine()[0, 2]))})")
    )
    succeed("show", "o/basis.safetensors", "--heatmap", "p/one.png")
    assert Path("p/one.png").read_bytes().startswith(b"\x89PNG") and len(list(Path("p").iterdir())) == 2
    assert run("show", "o/basis.safetensors", "--heatmap", "x.bmp").exit_code == 2


def test_from_a_basis_to_its_leakage(lm: LanguageModel, basis: Basis, here: Path) -> None:
    save_folder(lm, "tiny-llama")
    basis.save("vectors/tiny-llama/basis.safetensors")
    (here / "haste.yaml").write_text(json.dumps(PAIRS["haste"].model_dump(mode="json"), default=str))
    common = ["--model", "tiny-llama", "--turns", "2", "--max-tokens", "8", "--dtype", "float32"]
    assert "no contrastive pairs are given for 'haste'" in str(run("leakage", *common).exception)
    output = succeed("leakage", *common, "--traits", "impatience")
    found = Leakage.load("vectors/tiny-llama/leakage.json")
    assert (found.basis, found.traits, found.made_by["turns"]) == (basis.fingerprint, ("impatience",), 2)
    assert "saved: vectors/tiny-llama/leakage.json" in output
    assert short(found.rows[0].gain[0]) in output and short(found.rows[0].gain[0]) in succeed(
        "show", "--model", "tiny-llama"
    )
    assert len(lm.layers) == LAYERS
