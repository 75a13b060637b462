"""The whole chain on the embedded model: a real tokenizer, real weights, the shipped pairs, vectors and basis."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import resources
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import GenerationConfig

from traitbasis.basis import Basis
from traitbasis.chat import read_messages, render_prompt, tokenize
from traitbasis.contexts import read_contexts
from traitbasis.extract import extract
from traitbasis.metrics.fidelity import TraitProbe, preference
from traitbasis.model import LanguageModel
from traitbasis.pairs import PAPER_TRAITS, known_traits, load_pairs, pair_set_hash
from traitbasis.select import Selector
from traitbasis.simulator import UserSimulator
from traitbasis.sweep import Generator
from traitbasis.trait_vector import TraitVector

SHIPPED = Path(str(resources.files("traitbasis.vectors"))) / "smollm2-135m-instruct"
MESSAGES = [
    {"role": "system", "content": "You are a customer. Your order #W4417, a desk lamp, is late. You want a refund."},
    {"role": "user", "content": "Hi! How can I help you today?"},
]


@pytest.mark.parametrize("trait", PAPER_TRAITS)
def test_the_shipped_vectors_are_what_extraction_gives(real: LanguageModel, trait: str) -> None:
    """Contract 7. Other processors round differently, so values agree to a thousandth and not to the bit."""
    shipped = TraitVector.load(SHIPPED / f"{trait}.safetensors")
    fresh = extract(real, load_pairs(trait))
    difference = (fresh.vector - shipped.vector).norm(dim=-1) / shipped.vector.norm(dim=-1)
    assert float(difference.max()) < 1e-3
    torch.testing.assert_close(fresh.layer_norms, shipped.layer_norms, rtol=1e-3, atol=0)
    torch.testing.assert_close(fresh.agreement, shipped.agreement, rtol=0, atol=1e-3)
    made, stored = fresh.provenance, shipped.provenance
    assert made.model_fingerprint == stored.model_fingerprint and made.pair_set_hash == stored.pair_set_hash


@pytest.mark.parametrize("trait", known_traits())
def test_the_shipped_basis_is_made_from_the_shipped_vectors_and_pairs(real_basis: Basis, trait: str) -> None:
    vector = TraitVector.load(SHIPPED / f"{trait}.safetensors")
    assert vector.provenance.pair_set_hash == pair_set_hash(load_pairs(trait).for_extraction())
    i = real_basis.traits.index(trait)
    column = real_basis.columns[i]
    assert torch.equal(real_basis.matrix[:, i], vector.vector[column.layer])
    assert column.provenance == vector.provenance


def test_zero_is_nothing(real: LanguageModel, real_user: UserSimulator) -> None:
    """Contract 2: intensity 0 gives exactly the tokens of ``model.generate``, float32 greedy."""
    prompt = tokenize(real.tokenizer, render_prompt(real.tokenizer, read_messages(MESSAGES), "user"))
    config = GenerationConfig(do_sample=False, max_new_tokens=40, eos_token_id=2, pad_token_id=2)
    expected = real.model.generate(torch.tensor([prompt]), generation_config=config)[0, len(prompt) :].tolist()
    text = real.tokenizer.decode(expected, skip_special_tokens=True).strip()
    for traits in (None, {}, {"impatience": 0, "confusion": "off"}):
        turn = real_user.reply(MESSAGES, traits, temperature=0, max_tokens=40)
        assert (turn.text, turn.completion_tokens, turn.dose) == (text, len(expected), 0)
    assert real_user.reply(MESSAGES, "confusion-high", temperature=0, max_tokens=40).text != text


@pytest.mark.parametrize("trait", PAPER_TRAITS)
def test_steering_makes_held_out_wording_of_the_trait_likelier(
    real: LanguageModel, real_basis: Basis, trait: str
) -> None:
    """Positive control (fault 8): on pairs the vector was not made from, + raises and − lowers the preference for
    the trait's wording, and more raises it more at these doses."""
    pairs = load_pairs(trait).select("heldout")[::2]
    less, none, some, more = (
        float(preference(real, pairs, real_basis.additions({trait: intensity}), "user").mean())
        for intensity in (-0.5, 0, 0.5, 1.0)
    )
    assert less < none < some < more


@pytest.mark.parametrize("trait", known_traits())
def test_expression_rises_over_the_shipped_levels(real_basis: Basis, trait: str) -> None:
    """On the curve that calibration measured in turns on tasks that are in no pair: above unsteered at low, and up."""
    column = real_basis.columns[real_basis.traits.index(trait)]
    doses, shown = zip(*((point.dose, point.expression) for point in column.curve), strict=True)
    at = [np.interp(real_basis.dose({trait: x}), [0, *doses], [0, *shown]) for x in column.levels.values()]
    assert 0 < at[0] < at[1] < at[2]
    assert real_basis.dose({trait: column.high}) <= column.limit * (1 + 1e-3)


@pytest.mark.parametrize("trait", PAPER_TRAITS)
def test_probes_tell_the_trait_on_pairs_they_were_not_made_from(real: LanguageModel, trait: str) -> None:
    assert TraitProbe.from_held_out(real, load_pairs(trait)).auc > 0.9


def test_the_past_is_clean_and_steering_never_outlives_its_turn(real_user: UserSimulator) -> None:
    """Contract 4, fault 30: after a strongly steered turn, the same conversation unsteered is as if it never was."""
    cold = real_user.reply(MESSAGES, temperature=0, max_tokens=24)
    steered = real_user.reply(MESSAGES, "skeptical-high", temperature=0, max_tokens=24)
    again = real_user.reply(MESSAGES, temperature=0, max_tokens=24)
    everywhere = real_user.reply(MESSAGES, "skeptical-high", positions="all", temperature=0, max_tokens=24)
    assert again == cold
    assert len({cold.text, steered.text, everywhere.text}) == 3


def test_no_prompt_tells_the_customer_to_be_a_helpful_assistant(real: LanguageModel) -> None:
    """Fault 22: this model's template would, without a system message."""
    for as_ in ("user", "assistant"):
        assert "helpful" not in render_prompt(real.tokenizer, read_messages(MESSAGES[1:]), as_)
    assert "helpful" in real.tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False)


@pytest.fixture(scope="module")
def selector(real: LanguageModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Selector]:
    """Few short turns at the middle layer, at a usual dose and at ten times as much."""
    with Generator(real, read_contexts()[:6], turns=6, max_tokens=24) as generator:
        yield Selector(generator, tmp_path_factory.mktemp("home"), layers=[len(real.layers) // 2], doses=(0.2, 2.0))


@pytest.mark.parametrize("trait", ["confusion", "incoherence"])
def test_a_real_overdose_of_what_looks_like_damage_loses(selector: Selector, trait: str) -> None:
    """However much the instruments take it for the trait: what is written is damaged, and that is said."""
    selection = selector.select(load_pairs(trait))
    usual, over = selection.summaries
    assert (usual.dose, over.dose) == (0.2, 2.0)
    assert selection.dose != 2.0
    damage = {"broken", "surprise", "relevance"}
    assert damage & set(over.rejected), over
    assert not damage & set(usual.rejected), usual
