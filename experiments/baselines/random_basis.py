"""A basis of random directions: what the dose does, whatever the direction.

Each column has the layer, scale, norm, levels and limit of the real one, so every request gets the same dose at the
same layer; a direction that means nothing is all that differs.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from traitbasis.basis import Basis
from traitbasis.tries import digest_seed


def random_basis(basis: Basis, seed: int = 0) -> Basis:
    """`basis` with random directions of the same norms, the same for one seed.

    Provenance names the seed in the place of pairs: nothing was extracted. The measured curves are left out, since they
    are of other directions; levels and limits stay, since the same requests must get the same doses.
    """
    columns = tuple(
        replace(
            column,
            provenance=replace(
                column.provenance,
                pair_set_hash=f"none: a random direction, seed {seed}",
                pair_ids=(f"random-direction-seed-{seed}",),
            ),
            curve=(),
            orthogonalized=None,
        )
        for column in basis.columns
    )
    norms = basis.matrix.norm(dim=0)
    directions = [_direction(basis.matrix.shape[0], column.trait, column.layer, seed) for column in columns]
    return Basis(columns, torch.stack(directions, dim=1) * norms)


def _direction(width: int, trait: str, layer: int, seed: int) -> Tensor:
    """A unit direction ``(d_model,)``; two traits of one layer get two."""
    drawn = torch.randn(width, generator=torch.Generator().manual_seed(digest_seed([seed, trait, layer])))
    return torch.nn.functional.normalize(drawn, dim=0)
