"""Trait specs: text and mapping say the same, and nothing unreadable gets through."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from traitbasis.errors import TraitSpecError
from traitbasis.spec import format_traits, parse_traits

KNOWN = ("impatience", "confusion", "skeptical", "incoherence", "no_show2")
ALIASES = {"skepticism": "skeptical", "impatient": "impatience"}


def parse(traits: Any) -> dict[str, float]:
    return parse_traits(traits, KNOWN, ALIASES)


@pytest.mark.parametrize(
    "nothing", [None, "", {}, "impatience-off", "impatience-0", {"impatience": None}, "skeptical-none"]
)
def test_nothing_asked_for_is_an_empty_mapping(nothing: Any) -> None:
    assert parse(nothing) == {}


@pytest.mark.parametrize(
    ("spec", "intensities"),
    [
        ("impatience", {"impatience": 1.0}),
        ("impatience-low", {"impatience": 0.5}),
        ("impatience-medium", {"impatience": 1.0}),
        ("impatience-high", {"impatience": 1.5}),
        ("impatience-HIGH", {"impatience": 1.5}),
        ("Impatience-0.25", {"impatience": 0.25}),
        ("impatience--0.5", {"impatience": -0.5}),
        ("impatience-.5", {"impatience": 0.5}),
        ("skepticism-2", {"skeptical": 2.0}),
        ("no_show2-1", {"no_show2": 1.0}),
        (" skeptical-1 + confusion-low ", {"skeptical": 1.0, "confusion": 0.5}),
        ({"skepticism": "high", "confusion": 0}, {"skeptical": 1.5}),
        ({"impatient": " Low "}, {"impatience": 0.5}),
        ({"impatience": "-1.5"}, {"impatience": -1.5}),
        ({"impatience": 1e-7}, {"impatience": 1e-7}),
        ({"impatience": np.float64(0.5)}, {"impatience": 0.5}),
    ],
)
def test_levels_numbers_and_aliases_are_read(spec: Any, intensities: dict[str, float]) -> None:
    assert parse(spec) == intensities


def test_the_order_of_the_request_does_not_matter() -> None:
    """Contract 9: the derived seed is made from what is parsed."""
    one = parse("skeptical-0.5+impatience-high")
    other = parse({"impatience": 1.5, "skeptical": 0.5})
    assert list(one.items()) == list(other.items()) == [("impatience", 1.5), ("skeptical", 0.5)]


@pytest.mark.parametrize(
    "value",
    [math.nan, math.inf, -math.inf, "nan", "inf", "-Infinity", "1e400", 1e308, -1001, "1000.5"],
)
def test_an_intensity_must_be_finite_and_of_this_world(value: Any) -> None:
    with pytest.raises(TraitSpecError, match=r"impatience.*low, medium, high.*-1000 to 1000"):
        parse({"impatience": value})


@pytest.mark.parametrize("value", [True, False, [], [1.0], {"a": 1}, "", "very", b"high", object(), 1j])
def test_an_intensity_must_be_a_level_or_a_number(value: Any) -> None:
    with pytest.raises(TraitSpecError, match="impatience"):
        parse({"impatience": value})


@pytest.mark.parametrize(
    "spec",
    ["impatience high", "impatience-", "-high", "+", "impatience++confusion", "impatience-1-3", "1-impatience", "é"],
)
def test_unreadable_text_shows_how_to_write_it(spec: str) -> None:
    with pytest.raises(TraitSpecError, match="such as impatience-high"):
        parse(spec)


@pytest.mark.parametrize("traits", [["impatience"], 3, ("impatience", 1), True])
def test_traits_are_text_or_a_mapping(traits: Any) -> None:
    with pytest.raises(TraitSpecError, match="text spec or a mapping"):
        parse(traits)


@pytest.mark.parametrize(
    "traits",
    [
        "impatience-low+impatience-high",
        "impatience+impatient-0.5",
        {"impatience": 1, "Impatience": 2},
        "impatience-0+impatient",
    ],
)
def test_a_trait_given_twice_is_refused(traits: Any) -> None:
    with pytest.raises(TraitSpecError, match=r"'impatience' is given twice"):
        parse(traits)


@pytest.mark.parametrize("traits", ["impatiance-high", {"impatiance": 1}, {"impatiance": 0}, "confusion+impatiance"])
def test_an_unknown_trait_names_the_known_ones(traits: Any) -> None:
    with pytest.raises(TraitSpecError, match=r"'impatiance'; known: confusion, impatience, incoherence"):
        parse(traits)


def test_a_trait_is_taken_before_an_alias_of_the_same_name() -> None:
    assert parse_traits("calm", ["calm", "patient"], {"calm": "patient"}) == {"calm": 1.0}


def test_a_trait_may_have_levels_of_its_own() -> None:
    levels = {"impatience": {"low": 0.2, "medium": 1.0, "high": 3.5}, "confusion": {"high": 1.1}}
    found = parse_traits("impatient-high+confusion-high+skeptical-high", KNOWN, ALIASES, levels)
    assert found == {"confusion": 1.1, "impatience": 3.5, "skeptical": 1.5}
    found = parse_traits({"impatience": "LOW", "confusion": "low", "skeptical": "off"}, KNOWN, ALIASES, levels)
    assert found == {"confusion": 0.5, "impatience": 0.2}
    assert parse_traits("impatience", KNOWN, ALIASES, levels) == {"impatience": 1.0}
    with pytest.raises(TraitSpecError, match=r"'very'.*low, medium, high"):
        parse_traits("impatience-very", KNOWN, ALIASES, levels)


@given(
    st.dictionaries(st.sampled_from(KNOWN), st.floats(-1000, 1000).filter(bool)),
)
def test_the_text_form_reads_back_exactly(intensities: dict[str, float]) -> None:
    assert parse(format_traits(intensities)) == intensities


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1.5, "1.5"),
        (1.0, "1"),
        (-0.5, "-0.5"),
        (10, "10"),
        (1 / 3, "0.3333333333333333"),
        (1e-7, "0.0000001"),
        (-1e-300, "-1e-300"),
    ],
)
def test_the_text_form_is_what_a_person_would_write(value: float, text: str) -> None:
    assert format_traits({"impatience": value}) == f"impatience-{text}"
    assert parse(f"impatience-{text}+confusion-low") == {"confusion": 0.5, "impatience": value}


@given(
    st.one_of(
        st.text(),
        st.dictionaries(
            st.one_of(st.text(), st.sampled_from(KNOWN)),
            st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.lists(st.integers())),
        ),
    )
)
def test_whatever_is_asked_gives_finite_intensities_or_a_trait_spec_error(traits: Any) -> None:
    try:
        intensities = parse(traits)
    except TraitSpecError:
        return
    assert set(intensities) <= set(KNOWN)
    assert all(type(value) is float and math.isfinite(value) and value != 0 for value in intensities.values())
