"""Contrastive pairs x model -> trait vector.

``P_T[z] = mean_i (mean_t h_pos,i,t[z] - mean_t h_neg,i,t[z])`` (the paper, section 3): hidden states of decoder block
z's output, averaged over a response's own tokens, positive minus negative, averaged over pairs. Token 0 and template
tokens stay out of every mean (docs/design.md). Sums are float32 whatever the model's dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version

import torch
from torch import Tensor

from traitbasis.chat import As, Span, TokenizedReply, tokenize_reply
from traitbasis.errors import ChatTemplateError, ModelError, PairError
from traitbasis.hooks import record
from traitbasis.model import LanguageModel, pad_left
from traitbasis.pairs import Pair, PairSet, pair_set_hash
from traitbasis.trait_vector import Provenance, TraitVector


@dataclass(frozen=True)
class ReplyStates:
    """Read-outs of n replies on the unsteered model.

    means: ``(n, layers, d_model)`` float32, mean hidden state over the reply's counted tokens.
    norms: ``(n, layers)`` float32, mean norm of those tokens' hidden states.
    """

    means: Tensor
    norms: Tensor


def read_states(
    lm: LanguageModel,
    replies: Sequence[TokenizedReply],
    *,
    batch_size: int = 8,
    progress: Callable[[int], None] = lambda done: None,
) -> ReplyStates:
    """Mean hidden states of each reply at every decoder layer.

    Batches are padded on the left and masked, so a reply's result does not depend on its batchmates. `progress` is
    told how many replies each step has read. Raises ModelError when a state is not finite.
    """
    n, layers = len(replies), len(lm.layers)
    means = torch.zeros((n, layers, lm.width))
    norms = torch.zeros((n, layers))
    pad_id = lm.tokenizer.pad_token_id or 0
    by_length = sorted(range(n), key=lambda i: len(replies[i].ids))
    for start in range(0, n, batch_size):
        rows = by_length[start : start + batch_size]
        ids, mask = pad_left([replies[i].ids for i in rows], pad_id, lm.device)
        weights = torch.zeros(ids.shape, dtype=torch.float32)
        for row, i in enumerate(rows):
            positions = torch.tensor(replies[i].positions) + ids.shape[1] - len(replies[i].ids)
            weights[row, positions] = 1 / len(replies[i].positions)

        def reduce(hidden: Tensor, weights: Tensor = weights) -> tuple[Tensor, Tensor]:
            hidden = hidden.float()
            local = weights.to(hidden.device)
            mean = torch.einsum("btd,bt->bd", hidden, local)
            norm = (hidden.norm(dim=-1) * local).sum(-1)
            return mean.cpu(), norm.cpu()

        with record(lm.layers, keep=reduce) as states:
            lm.forward(ids, mask)
        for layer in range(layers):
            means[rows, layer], norms[rows, layer] = states[layer]
        progress(len(rows))
    if not torch.isfinite(means).all():
        raise ModelError(f"{lm.name} gives hidden states that are not finite in {lm.model.dtype}; load it in bfloat16")
    return ReplyStates(means, norms)


def extract(
    lm: LanguageModel,
    pair_set: PairSet,
    *,
    n: int | None = None,
    pairs: Sequence[Pair] | None = None,
    span: Span = "response",
    as_: As = "user",
    batch_size: int = 8,
    progress: Callable[[int], None] = lambda done: None,
) -> TraitVector:
    """Extract one trait's vector at every decoder layer.

    pairs: which pairs of the set; by default ``pair_set.for_extraction(n)``. span: ``response`` averages the response's
    tokens, ``conversation`` the content tokens of the whole conversation (the paper's formula). as_: the header the
    customer's turns stand under. progress: told how many responses (two a pair) each step has read.
    Raises PairError naming the pair whose response cannot be found in the rendered text.
    """
    chosen = tuple(pair_set.for_extraction(n) if pairs is None else pairs)
    if not chosen:
        raise PairError(f"{pair_set.trait}: no pairs to extract from")
    replies = []
    for pair in chosen:
        for side in ("positive", "negative"):
            try:
                replies.append(tokenize_reply(lm.tokenizer, pair.context, getattr(pair, side), as_, span))
            except ChatTemplateError as error:
                raise PairError(f"{pair_set.trait}: pair {pair.id!r}: field {side!r}: {error}") from error
    states = read_states(lm, replies, batch_size=batch_size, progress=progress)
    differences = states.means[0::2] - states.means[1::2]
    return TraitVector(
        trait=pair_set.trait,
        vector=differences.mean(0),
        layer_norms=states.norms.mean(0),
        agreement=mean_cosine(differences),
        aliases=pair_set.aliases,
        provenance=Provenance(
            model=lm.name,
            model_fingerprint=lm.fingerprint,
            template_hash=lm.template_hash,
            as_=as_,
            span=span,
            pair_set_hash=pair_set_hash(chosen),
            pair_ids=tuple(pair.id for pair in chosen),
            dtype=lm.dtype_name,
            traitbasis_version=version("traitbasis"),
            transformers_version=version("transformers"),
            torch_version=version("torch").split("+")[0],
        ),
    )


def mean_cosine(differences: Tensor) -> Tensor:
    """Mean cosine between ``(n, layers, d_model)`` differences, over pairs i < j, ``(layers,)``; nan for n = 1."""
    n = len(differences)
    unit = torch.nn.functional.normalize(differences, dim=-1)
    gram = torch.einsum("ild,jld->lij", unit, unit)
    return (gram.sum((1, 2)) - n) / (n * (n - 1)) if n > 1 else torch.full((differences.shape[1],), float("nan"))
