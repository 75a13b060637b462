"""Fixtures. ``tiny`` models are random and built on the spot; ``real`` is the embedded model, fetched once."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
import torch

from traitbasis.basis import Basis, find_basis
from traitbasis.model import LanguageModel, load_model
from traitbasis.simulator import UserSimulator

# Tables as wide as a terminal, wherever the tests run; and Ctrl-C for the processes they start, even under nohup.
os.environ["COLUMNS"] = "200"
signal.signal(signal.SIGINT, signal.default_int_handler)
torch.set_num_threads(1)  # two threads on a busy two-core machine are ten times slower than one


@pytest.fixture(scope="session")
def real() -> LanguageModel:
    """The embedded default model in float32 on the CPU."""
    return load_model(device="cpu", dtype="float32")


@pytest.fixture(scope="session")
def real_basis(real: LanguageModel) -> Basis:
    """The basis that ships for it."""
    return find_basis(real)


@pytest.fixture(scope="session")
def real_user(real: LanguageModel, real_basis: Basis) -> Iterator[UserSimulator]:
    """A simulator on the embedded model."""
    with UserSimulator(real, real_basis) as user:
        yield user
