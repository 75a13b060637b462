"""The basis: columns, scales, sums and what it refuses, against float64 numpy."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, fields, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file
from samples import sample_set, sample_vector
from tiny import tiny_model

from traitbasis.basis import DEFAULT_DOSE, MAX_DOSE, Basis, CurvePoint, basis_path, build_basis, find_basis
from traitbasis.calibrate import with_columns
from traitbasis.errors import ArtifactError, TraitSpecError
from traitbasis.extract import extract
from traitbasis.trait_vector import Provenance

A, B, C = (sample_vector(name, seed, layers=4, width=64) for seed, name in enumerate("abc"))
BASIS = build_basis([A, B, C], layer={"b": 1}, dose={"c": 0.1})  # a and c at layer 2


def numpy_sum(basis: Basis, intensities: dict[str, float], layer: int) -> Any:
    total = np.zeros(basis.matrix.shape[0])
    for i, column in enumerate(basis.columns):
        if column.layer == layer:
            total += intensities.get(column.trait, 0.0) * column.scale * basis.matrix[:, i].numpy().astype(np.float64)
    return total


# --- building ---------------------------------------------------------------------------------------------------------


def test_a_column_is_its_vectors_row_scaled_to_the_dose() -> None:
    assert [(column.trait, column.layer) for column in BASIS.columns] == [("a", 2), ("b", 1), ("c", 2)]
    for column, vector, dose in zip(BASIS.columns, (A, B, C), (DEFAULT_DOSE, DEFAULT_DOSE, 0.1), strict=True):
        i = BASIS.traits.index(column.trait)
        assert torch.equal(BASIS.matrix[:, i], vector.vector[column.layer])
        pushed = np.linalg.norm(column.scale * vector.vector[column.layer].numpy().astype(np.float64))
        assert pushed / float(vector.layer_norms[column.layer]) == pytest.approx(dose, rel=1e-6)
        assert column.aliases == vector.aliases and column.provenance == vector.provenance


@pytest.mark.parametrize("layer", [-1, 4, 99, {"a": 4}])
def test_a_layer_that_does_not_exist_is_refused(layer: Any) -> None:
    with pytest.raises(ArtifactError, match=r"layer -?\d+ for a does not exist; layers are 0 to 3"):
        build_basis([A, B], layer=layer)


@pytest.mark.parametrize("dose", [0, -1, float("nan"), float("inf"), {"a": 0.0}, 1e300, 10.001])
def test_a_dose_that_is_not_positive_or_beyond_what_is_ever_served_is_refused(dose: Any) -> None:
    with pytest.raises(ArtifactError, match=r"dose \S+ for a is not a number above 0 and at most 10"):
        build_basis([A], dose=dose)
    assert build_basis([A], dose=MAX_DOSE).dose({"a": 1.0}) == pytest.approx(10, rel=1e-5)


def test_a_zero_vector_has_no_direction_and_is_refused() -> None:
    with pytest.raises(ArtifactError, match=r"vector of .*a is zero at layer 2"):
        build_basis([0 * A])


def test_vectors_of_two_models_templates_or_headers_are_refused_by_name() -> None:
    """Contract 7."""
    for field, value in (("model_fingerprint", "fedc"), ("template_hash", "0" * 64), ("as_", "assistant")):
        other = sample_vector("b", layers=4, width=64, **{field: value})
        with pytest.raises(ArtifactError, match=rf"share one {field}: a has .*, b has {value}"):
            build_basis([A, other])


def test_a_trait_twice_or_none_at_all_is_refused() -> None:
    with pytest.raises(ArtifactError, match="stands twice"):
        build_basis([A, B, replace(C, trait="a")])
    with pytest.raises(ArtifactError, match="at least one"):
        build_basis([])
    with pytest.raises(ArtifactError, match="at least one"):
        Basis((), torch.zeros(4, 0))
    with pytest.raises(ArtifactError, match="3 columns"):
        Basis(BASIS.columns, BASIS.matrix[:, :2])


# --- sums -------------------------------------------------------------------------------------------------------------


@given(st.dictionaries(st.sampled_from("abc"), st.floats(-4, 4).filter(lambda x: x == 0 or abs(x) > 1e-3)))
def test_additions_are_the_float64_sum_per_layer(intensities: dict[str, float]) -> None:
    """Contract 5, fault 26: one float32 sum per layer, within 1e-6 of the size of its parts."""
    additions = BASIS.additions(intensities)
    layers = {column.layer for column in BASIS.columns if intensities.get(column.trait)}
    assert set(additions) == layers, "contract 2: a layer that nobody steers is absent"
    for layer, addition in additions.items():
        assert addition.dtype == torch.float32 and addition.shape == (64,)
        expected = numpy_sum(BASIS, intensities, layer)
        size = sum(np.abs(numpy_sum(BASIS, {trait: x}, layer)).max() for trait, x in intensities.items())
        np.testing.assert_allclose(addition.numpy(), expected, rtol=1e-6, atol=1e-6 * size)


@pytest.mark.parametrize("intensities", [{}, {"a": 0.0}, {"a": 0, "b": -0.0, "c": 0.0}])
def test_zero_intensity_adds_nothing_at_all(intensities: dict[str, float]) -> None:
    """Contract 2."""
    assert BASIS.additions(intensities) == {}
    assert BASIS.dose(intensities) == 0.0


@pytest.mark.parametrize("trait", "abc")
def test_the_dose_of_one_trait_is_its_intensity_times_the_calibrated_dose(trait: str) -> None:
    """Traits at one layer have measured its norm on their own pairs; another trait's must not count."""
    dose = 0.1 if trait == "c" else DEFAULT_DOSE
    assert BASIS.dose({trait: 1.5}) == pytest.approx(1.5 * dose, rel=1e-6)
    assert BASIS.dose({trait: -0.5}) == pytest.approx(0.5 * dose, rel=1e-6)


def test_the_dose_of_several_traits_is_that_of_their_sum_largest_over_layers() -> None:
    asked = {"a": 1.0, "c": -2.0, "b": 0.1}
    norm = float(A.layer_norms[2] + C.layer_norms[2]) / 2
    together = np.linalg.norm(numpy_sum(BASIS, asked, 2)) / norm
    assert together > 0.1 * DEFAULT_DOSE
    assert BASIS.dose(asked) == pytest.approx(together, rel=1e-6)
    assert build_basis([C, B, A], layer={"b": 1}, dose={"c": 0.1}).dose(asked) == pytest.approx(together, rel=1e-6)
    assert BASIS.dose({"a": 0.1, "b": 3.0}) == pytest.approx(3 * DEFAULT_DOSE, rel=1e-6)


def test_the_cosine_matrix_is_numpys() -> None:
    matrix = BASIS.matrix.numpy().astype(np.float64)
    unit = matrix / np.linalg.norm(matrix, axis=0)
    np.testing.assert_allclose(BASIS.cosine(), unit.T @ unit, atol=1e-6)
    np.testing.assert_allclose(
        build_basis([A, replace(A, trait="b", aliases=(), vector=-2 * A.vector)]).cosine(),
        [[1, -1], [-1, 1]],
        atol=1e-6,
    )


def test_traits_are_read_with_the_columns_names_and_aliases() -> None:
    assert BASIS.parse("a_x-high+b-0.5") == {"a": 1.5, "b": 0.5}
    with pytest.raises(TraitSpecError, match="'d'; known: a, b, c"):
        BASIS.parse({"d": 1})


# --- the file ---------------------------------------------------------------------------------------------------------


def test_a_basis_comes_back_from_its_file(tmp_path: Path) -> None:
    loaded = Basis.load(BASIS.save(tmp_path / "x" / "basis.safetensors"))
    assert loaded.columns == BASIS.columns and torch.equal(loaded.matrix, BASIS.matrix)
    assert loaded.fingerprint == BASIS.fingerprint and loaded.traits == ("a", "b", "c")
    assert (loaded.model, loaded.as_) == ("no-model", "user")
    again = loaded.save(tmp_path / "again.safetensors")
    assert again.read_bytes() == (tmp_path / "x" / "basis.safetensors").read_bytes()


CURVE = (CurvePoint(0.0, 0.1, 0.0, 0.2, 1.0, 0.0), CurvePoint(0.25, 0.7, 0.6, 0.75, 0.9, 1 / 3))
CALIBRATED: dict[str, Any] = {"low": 0.3, "high": 2.25, "limit": 0.45, "steerable": False, "curve": CURVE}


def test_what_was_calibrated_comes_back_from_the_file(tmp_path: Path) -> None:
    basis = Basis((replace(BASIS.columns[0], **CALIBRATED), *BASIS.columns[1:]), BASIS.matrix)
    loaded = Basis.load(basis.save(tmp_path / "b.safetensors"))
    assert loaded.columns == basis.columns and loaded.fingerprint == basis.fingerprint
    assert loaded.columns[0].curve[1] == CurvePoint(0.25, 0.7, 0.6, 0.75, 0.9, 1 / 3)
    assert loaded.levels == {
        "a": {"low": 0.3, "medium": 1.0, "high": 2.25},
        **{trait: {"low": 0.5, "medium": 1.0, "high": 1.5} for trait in "bc"},
    }


def fingerprint_of_file(path: Path) -> str:
    """From what stands in a file, whatever fields this version knows."""
    with safe_open(path, framework="pt") as file:
        columns = json.loads(file.metadata()["traitbasis"])["columns"]
        values = file.get_tensor("matrix").contiguous().numpy().tobytes()
    return hashlib.sha256(json.dumps({"columns": columns}, sort_keys=True).encode() + values).hexdigest()[:16]


def test_the_basis_that_ships_is_read_as_it_was_written(tmp_path: Path) -> None:
    """Contract 11: numbers were published under its fingerprint, which fields that it does not have must not change."""
    path = basis_path("smollm2-135m-instruct")
    shipped = Basis.load(path)
    assert shipped.fingerprint == fingerprint_of_file(path)
    assert shipped.parse("impatience-high+skepticism") == {
        "impatience": shipped.levels["impatience"]["high"],
        "skeptical": 1.0,
    }
    assert shipped.save(tmp_path / "again.safetensors").read_bytes() == path.read_bytes()


def described(**changes: Any) -> dict[str, Any]:
    """The file's description of one column, as JSON gives it."""
    one = Basis(BASIS.columns[:1], BASIS.matrix[:, :1])
    entry = json.loads(json.dumps(one._description()))["columns"][0]
    return {"format": "traitbasis.basis/1", "columns": [{**entry, **changes}]}


def test_a_column_that_was_not_calibrated_is_written_as_before(tmp_path: Path) -> None:
    before = {"trait", "layer", "scale", "layer_norm", "aliases", "provenance"}
    assert set(described()["columns"][0]) == before
    save_file({"matrix": torch.ones(64, 1)}, tmp_path / "b.safetensors", {"traitbasis": json.dumps(described())})
    column = Basis.load(tmp_path / "b.safetensors").columns[0]
    assert (column.low, column.high, column.limit, column.steerable, column.curve) == (0.5, 1.5, None, True, ())


@pytest.mark.parametrize(
    "changes",
    [
        {"colour": 1},
        {"low": 1.5},
        {"high": "2"},
        {"limit": 0},
        {"steerable": 1},
        {"curve": 3},
        {"curve": None},
        {"curve": [3]},
        {"curve": [{}]},
        {"curve": [{**asdict(CURVE[0]), "colour": 1}]},
        {"curve": [asdict(point) for point in CURVE[::-1]]},
    ],
)
def test_a_calibration_that_cannot_be_read_is_told_with_the_file(changes: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "b.safetensors"
    save_file({"matrix": torch.ones(64, 1)}, path, {"traitbasis": json.dumps(described(**changes))})
    with pytest.raises(ArtifactError, match=r"b\.safetensors.*build the basis again"):
        Basis.load(path)


def test_the_fingerprint_changes_with_each_thing_that_matters() -> None:
    """Contract 11: it goes with every published number."""
    first, *rest = BASIS.columns
    changes: dict[str, Any] = {
        "trait": "z",
        "layer": 0,
        "scale": first.scale * 1.0001,
        "layer_norm": 1.0,
        "aliases": ("q",),
        **CALIBRATED,
    }
    variants = [Basis((replace(first, **{name: value}), *rest), BASIS.matrix) for name, value in changes.items()]
    for field in fields(Provenance):
        other: dict[str, Any] = {"pair_ids": ("z",), "as_": "assistant", "span": "conversation"}
        value = other.get(field.name, "z")
        columns = tuple(replace(c, provenance=replace(c.provenance, **{field.name: value})) for c in BASIS.columns)
        variants.append(Basis(columns, BASIS.matrix))
    nudged = BASIS.matrix.clone()
    nudged[5, 1] = torch.nextafter(nudged[5, 1], torch.tensor(9.0))
    variants += [Basis(BASIS.columns, nudged), Basis(BASIS.columns[::-1], BASIS.matrix.flip(1))]
    variants += [Basis(BASIS.columns[:2], BASIS.matrix[:, :2])]
    fingerprints = [basis.fingerprint for basis in (BASIS, *variants)]
    assert all(one != other for one, other in combinations(fingerprints, 2))
    assert build_basis([A, B, C], layer={"b": 1}, dose={"c": 0.1}).fingerprint == BASIS.fingerprint


def test_a_vector_file_is_no_basis_and_a_basis_file_is_no_vector(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"v\.safetensors is not a traitbasis\.basis/1 file"):
        Basis.load(A.save(tmp_path / "v.safetensors"))
    with pytest.raises(ArtifactError, match=r"not a traitbasis.trait_vector/1 file"):
        type(A).load(BASIS.save(tmp_path / "b.safetensors"))
    with pytest.raises(ArtifactError, match="no file"):
        Basis.load(tmp_path / "gone.safetensors")


@pytest.mark.parametrize(
    "description",
    [[], {}, {"columns": None}, {"columns": [None]}, {"columns": [{}]}, {"columns": [{"aliases": []}]}, {"columns": 3}],
)
def test_a_basis_file_with_unreadable_columns_is_an_artifact_error(description: Any, tmp_path: Path) -> None:
    path = tmp_path / "b.safetensors"
    whole = {"format": "traitbasis.basis/1", **description} if isinstance(description, dict) else description
    save_file({"matrix": torch.ones(4, 1)}, path, {"traitbasis": json.dumps(whole)})
    with pytest.raises(ArtifactError, match=r"b\.safetensors"):
        Basis.load(path)


def test_a_basis_fits_its_model_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lm = tiny_model()
    basis = build_basis([extract(lm, sample_set())])
    basis.check_model(lm)
    with pytest.raises(ArtifactError, match=r"this basis was made on tiny-llama .* does not fit tiny-qwen2"):
        basis.check_model(tiny_model("qwen2"))
    for bad in (Basis((replace(basis.columns[0], layer=4),), basis.matrix), Basis(basis.columns, basis.matrix[:-1])):
        with pytest.raises(ArtifactError, match="does not fit tiny-llama"):
            bad.check_model(lm)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ArtifactError, match=r"no basis for tiny-llama; make one with .traitbasis extract"):
        find_basis(lm)
    basis.save(tmp_path / "vectors" / "tiny-llama" / "basis.safetensors")
    assert find_basis(lm).fingerprint == basis.fingerprint
    with pytest.raises(ArtifactError, match="does not fit tiny-qwen2"):
        find_basis(tiny_model("qwen2"), tmp_path / "vectors" / "tiny-llama" / "basis.safetensors")


@pytest.mark.parametrize(
    "change",
    [
        {"layer": "2"},
        {"layer": 2.0},
        {"layer": -1},
        {"layer": True},
        {"scale": 0.0},
        {"scale": float("nan")},
        {"layer_norm": 0.0},
        {"layer_norm": "x"},
        {"low": 0},
        {"low": 1.0},
        {"low": -0.5},
        {"low": "0.5"},
        {"low": float("nan")},
        {"high": 1},
        {"high": 0.9},
        {"high": float("inf")},
        {"high": True},
        {"high": 1000},
        {"limit": 0.0},
        {"limit": -1},
        {"limit": float("inf")},
        {"limit": True},
        {"limit": 10**400},
        {"steerable": 1},
        {"steerable": None},
        {"curve": CURVE[::-1]},
        {"curve": CURVE[:1] * 2},
        {"curve": (replace(CURVE[0], dose=float("nan")),)},
        {"curve": (replace(CURVE[0], facts=None),)},
        {"curve": (replace(CURVE[0], damage="x"),)},
    ],
)
def test_a_column_of_impossible_values_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ArtifactError, match=rf"{next(iter(change))} .*of column 'a'"):
        replace(BASIS.columns[0], **change)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_basis_matrix_that_is_not_finite_is_refused(bad: float) -> None:
    with pytest.raises(ArtifactError, match="basis matrix is not finite"):
        Basis(BASIS.columns, BASIS.matrix * bad)


@pytest.mark.parametrize("option", [{"dose": {"impatiance": 0.5}}, {"layer": {"impatiance": 1}}])
def test_an_option_for_a_trait_that_is_not_there_is_refused(option: dict[str, Any]) -> None:
    with pytest.raises(ArtifactError, match="no vector is given for impatiance"):
        build_basis([A, B], **option)


def test_two_traits_of_one_name_are_refused() -> None:
    """A pair file that was copied keeps the aliases of the trait it was copied from."""
    copied = replace(B, aliases=(*B.aliases, A.trait))
    with pytest.raises(ArtifactError, match=rf"'{A.trait}' would name several traits: {A.trait}, {B.trait}"):
        build_basis([A, copied])


@pytest.mark.parametrize(
    ("one", "other"), [(("x",), ("x",)), ((), ("a",)), (("b",), ())], ids=["two aliases", "a's name", "b's name"]
)
def test_no_basis_has_a_name_for_two_columns_however_it_is_made(
    one: tuple[str, ...], other: tuple[str, ...], tmp_path: Path
) -> None:
    basis = build_basis([replace(A, aliases=()), replace(B, aliases=())])
    columns = tuple(replace(c, aliases=names) for c, names in zip(basis.columns, (one, other), strict=True))
    with pytest.raises(ArtifactError, match=r"'[abx]' would name several traits: a, b; change"):
        Basis(columns, basis.matrix)
    with pytest.raises(ArtifactError, match="would name several traits"):
        with_columns(basis, {"b": (replace(columns[1], aliases=("a",)), basis.matrix[:, 1])})
    own = replace(basis.columns[0], aliases=("a", "x", "x"))  # its own name twice means one trait
    Basis((own, basis.columns[1]), basis.matrix)


def test_the_basis_that_ships_has_no_such_name() -> None:
    Basis.load(Path(__file__).parent.parent / "vectors" / "smollm2-135m-instruct" / "basis.safetensors")
