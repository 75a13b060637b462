"""``traitbasis verify``: it passes on models that work, and each check fails when what it checks is broken."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from reference import hook_count
from samples import random_basis
from tiny import WIDTH, save_folder, tiny_model
from torch import Tensor
from typer.testing import CliRunner, Result

from traitbasis import cli
from traitbasis import verify as verify_module
from traitbasis.bench import Served
from traitbasis.engines import transformers as engine_module
from traitbasis.engines.base import Request
from traitbasis.engines.kv import PrefixCache, Slots
from traitbasis.engines.transformers import Row, SlotBatch, TransformersEngine, why_not_continuous
from traitbasis.errors import ArtifactError
from traitbasis.hooks import steer
from traitbasis.model import LanguageModel
from traitbasis.verify import Check, verify

HOW = "how requests run"
CHANGES = "changes output"
ZERO = "zero is nothing"
FIRST = "the first token is steered"
MIXED = "a mixed batch is its rows alone"
PADDING = "padding does not matter"
CACHE = "the prefix cache changes nothing"
NOTHING_LEFT = "nothing is left behind"
CHECKS = [HOW, CHANGES, ZERO, FIRST, MIXED, PADDING, CACHE, NOTHING_LEFT]
COSTS = ["time per token, 1 user", "time per token, 8 users"]
FIGURES = {HOW, *COSTS}

tiny_lm = cache(tiny_model)


@pytest.fixture
def lm() -> LanguageModel:
    """A model that was found to work before anything is broken."""
    lm = tiny_lm("llama")
    assert why_not_continuous(lm) is None
    return lm


def failed(checks: Sequence[Check]) -> set[str]:
    return {check.name for check in checks if check.passed is False}


# --- models that work ---


@pytest.mark.parametrize("traits", [(), ("impatience", "skeptical", "confusion")], ids=["random", "basis"])
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "mistral"])
def test_a_model_that_works_passes_every_check(architecture: str, traits: tuple[str, ...]) -> None:
    """Mistral runs in micro-batches here: no prefix cache, and no step whose time could be compared."""
    lm = tiny_lm(architecture)
    hooks, threads = hook_count(lm.model), threading.active_count()
    checks = list(verify(lm, random_basis(lm, *traits) if traits else None, tokens=8))
    assert hook_count(lm.model) == hooks and threading.active_count() == threads, "contract 6"
    continuous = architecture != "mistral"
    assert [check.name for check in checks] == CHECKS + (COSTS if continuous else [])
    figures = FIGURES if continuous else {*FIGURES, CACHE}
    assert {check.name: check.passed for check in checks} == {
        check.name: None if check.name in figures else True for check in checks
    }, checks
    details = {check.name: check.detail for check in checks}
    assert ("continuous" if continuous else "micro-batches") in details[HOW]
    assert all(trait in details[CHANGES] for trait in traits or ("a random direction", "its opposite"))


def test_in_bfloat16_equality_is_a_figure_and_no_check() -> None:
    """Kernels round by batch shape there, unsteered just as well; what is left can still fail."""
    lm = tiny_model("llama", dtype=torch.bfloat16)
    checks = {check.name: check for check in verify(lm, tokens=8)}
    assert not failed(list(checks.values()))
    assert checks[MIXED].passed is None and "unsteered rows" in checks[MIXED].detail
    assert checks[CACHE].passed is None and checks[FIRST].passed is True and checks[ZERO].passed is True


# --- engines that are broken ---

Break = Callable[[pytest.MonkeyPatch], None]
_stack, _join, _match, _decode = engine_module.stack_additions, SlotBatch.join, PrefixCache.match, Slots.decode
_submit, _end_cancelled, _pad = TransformersEngine.submit, Row.end_cancelled, engine_module.pad_left


def no_steering(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(engine_module, "steer", lambda layers, additions: nullcontext())


def half_of_it(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(engine_module, "steer", lambda layers, a: steer(layers, {z: sum_ / 2 for z, sum_ in a.items()}))


def the_layer_before(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(engine_module, "steer", lambda layers, a: steer(layers, {z - 1: sum_ for z, sum_ in a.items()}))


def from_the_second_token_on(patch: pytest.MonkeyPatch) -> None:
    step = SlotBatch.step

    def late(batch: SlotBatch, rows: Sequence[Row]) -> Tensor:
        begun = [row if row.length >= len(row.request.prompt_ids) else _unsteered(row) for row in rows]
        batch.additions = _stack(begun, batch._lm)
        return step(batch, rows)

    patch.setattr(SlotBatch, "step", late)


def _unsteered(row: Row) -> Row:
    return Row(replace(row.request, additions={}), lambda event: None, tiny_lm("llama").tokenizer, None)


def the_prompt_too(patch: pytest.MonkeyPatch) -> None:
    def join(batch: SlotBatch, row: Row, slot: int) -> int:
        with steer(batch._lm.layers, _stack([row], batch._lm)):
            return _join(batch, row, slot)

    patch.setattr(SlotBatch, "join", join)


def the_papers_plain_form(patch: pytest.MonkeyPatch) -> None:
    def submit(engine: TransformersEngine, request: Request, listener: Any) -> Row:
        return _submit(engine, replace(request, positions="all"), listener)

    patch.setattr(TransformersEngine, "submit", submit)


def zeros_are_something(patch: pytest.MonkeyPatch) -> None:
    def stack(rows: Sequence[Row], lm: LanguageModel) -> dict[int, Tensor]:
        stacked = _stack(rows, lm)
        nothing = torch.tensor([bool(row.request.additions) and not row.additions for row in rows])
        if nothing.any():
            stacked[0] = stacked.get(0, torch.zeros(len(rows), WIDTH)) + 1e-3 * nothing[:, None]
        return stacked

    patch.setattr(engine_module, "stack_additions", stack)


def other_rows(patch: pytest.MonkeyPatch) -> None:
    def stack(rows: Sequence[Row], lm: LanguageModel) -> dict[int, Tensor]:
        return {z: sums.flip(0) for z, sums in _stack(rows, lm).items()}

    patch.setattr(engine_module, "stack_additions", stack)


def columns_behind_a_row_are_seen(patch: pytest.MonkeyPatch) -> None:
    """Only where a longer row stands beside it: alone, it sees its own columns and those up to the next multiple."""

    def decode(slots: Slots, lengths: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        mask = _decode(slots, lengths, dtype, device)
        for row, length in enumerate(lengths):
            mask[row, ..., -(-(length + 1) // 64) * 64 :] = 0
        return mask

    patch.setattr(Slots, "decode", decode)


def another_block(patch: pytest.MonkeyPatch) -> None:
    """The first one that was ever read, whatever was looked for."""
    first: list[Any] = []

    def match(prefix: PrefixCache, ids: Sequence[int]) -> list[list[Tensor]]:
        found = _match(prefix, ids)
        first.extend(found[:1])
        return [first[0] for _ in found]

    patch.setattr(PrefixCache, "match", match)


def nothing_is_found_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PrefixCache, "match", lambda prefix, ids: [])


def the_past_is_steered_where_it_is_cached(patch: pytest.MonkeyPatch) -> None:
    def join(batch: SlotBatch, row: Row, slot: int) -> int:
        cached = bool(batch.prefix.limit)
        with steer(batch._lm.layers, _stack([row], batch._lm)) if cached else nullcontext():
            return _join(batch, row, slot)

    patch.setattr(SlotBatch, "join", join)


def a_hook_stays(patch: pytest.MonkeyPatch) -> None:
    def leaking(layers: Any, additions: Any) -> Any:
        if additions:
            layers[0].register_forward_hook(lambda module, arguments, output: None)
        return steer(layers, additions)

    patch.setattr(engine_module, "steer", leaking)


def a_cancelled_row_stays(patch: pytest.MonkeyPatch) -> None:
    left: list[Row] = []

    def end_cancelled(row: Row) -> None:
        left.append(row)
        _end_cancelled(row)

    def stack(rows: Sequence[Row], lm: LanguageModel) -> dict[int, Tensor]:
        stacked = _stack(rows, lm)
        return stacked or {z: sums.expand(len(rows), -1) for z, sums in _stack(left[-1:], lm).items()}

    patch.setattr(Row, "end_cancelled", end_cancelled)
    patch.setattr(engine_module, "stack_additions", stack)


def padding_is_read_as_tokens(patch: pytest.MonkeyPatch) -> None:
    def pad(rows: Sequence[Sequence[int]], pad_id: int, device: torch.device) -> tuple[Tensor, Tensor]:
        ids, mask = _pad(rows, pad_id, device)
        return ids, torch.ones_like(mask)

    patch.setattr(engine_module, "pad_left", pad)


BROKEN: list[tuple[Break, set[str]]] = [
    (no_steering, {CHANGES, FIRST}),
    (half_of_it, {FIRST}),
    (the_layer_before, {FIRST}),
    (from_the_second_token_on, {CHANGES, FIRST}),
    (the_prompt_too, {FIRST}),
    (the_papers_plain_form, {FIRST, CACHE}),  # which is never cached
    (zeros_are_something, {ZERO}),
    (other_rows, {MIXED, PADDING}),
    (columns_behind_a_row_are_seen, {MIXED, PADDING}),
    (another_block, {CACHE}),
    (nothing_is_found_again, {CACHE}),
    (the_past_is_steered_where_it_is_cached, {CACHE}),
    (a_hook_stays, {NOTHING_LEFT}),
    (a_cancelled_row_stays, {NOTHING_LEFT}),
]


@pytest.mark.parametrize(("fault", "expected"), BROKEN, ids=[fault.__name__ for fault, _ in BROKEN])
def test_a_broken_engine_fails_the_check_that_is_for_it(
    lm: LanguageModel, fault: Break, expected: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Contracts 2, 3, 4 and 6, faults 13, 28 to 30 and 34; and no check fails that has nothing to do with it."""
    lm = tiny_model("llama") if fault is a_hook_stays else lm  # the shared one stays clean
    assert why_not_continuous(lm) is None
    fault(monkeypatch)
    checks = list(verify(lm, tokens=6))
    assert failed(checks) == expected, checks
    assert len(checks) == len(CHECKS) + len(COSTS), "stops at nothing"


MICRO_BROKEN: list[tuple[Break, set[str]]] = [
    (no_steering, {CHANGES, FIRST}),
    (the_papers_plain_form, {FIRST}),
    (other_rows, {MIXED, PADDING}),
    (padding_is_read_as_tokens, {MIXED, PADDING}),
]


@pytest.mark.parametrize(("fault", "expected"), MICRO_BROKEN, ids=[fault.__name__ for fault, _ in MICRO_BROKEN])
def test_micro_batches_are_checked_as_well(fault: Break, expected: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    lm = tiny_lm("mistral")
    assert why_not_continuous(lm)
    fault(monkeypatch)
    assert failed(list(verify(lm, tokens=6))) == expected


def test_a_basis_that_does_nothing_fails(lm: LanguageModel) -> None:
    checks = list(verify(lm, random_basis(lm, "impatience", dose=1e-7), tokens=4))
    assert CHANGES in failed(checks) <= {CHANGES, FIRST}


def not_a_number(patch: pytest.MonkeyPatch) -> None:
    """Fresh columns hold it, and masked or not it spreads."""

    def empty(slots: Slots, states: Tensor) -> Tensor:
        return states.new_full((slots._rows, slots._columns, states.shape[1], states.shape[3]), torch.nan)

    patch.setattr(Slots, "empty", empty)


def test_a_check_that_raises_has_failed_and_the_others_go_on(
    lm: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    not_a_number(monkeypatch)
    checks = list(verify(lm, tokens=4))
    reasons = [check.detail for check in checks if check.passed is False]
    assert reasons and all("not finite" in reason for reason in reasons)
    assert len(checks) == len(CHECKS) + len(COSTS)


def test_a_check_that_raises_keeps_its_name(lm: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who reads the result by name finds it whether it passed, failed or raised."""
    not_a_number(monkeypatch)
    assert [check.name for check in verify(lm, tokens=4)] == CHECKS + COSTS


def test_padding_that_changes_every_token_is_said_in_figures(
    lm: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not as an error of Python's."""

    together = verify_module.serve_all

    def elsewhere(engine: TransformersEngine, requests: Sequence[Request]) -> list[Served]:
        return together(
            engine, [replace(r, additions={3: -1000 * r.additions[2]} if r.additions else {}) for r in requests]
        )

    monkeypatch.setattr(verify_module, "serve_all", elsewhere)
    checks = list(verify(lm, tokens=4))
    (padding,) = [check for check in checks if check.name.startswith("padding")]
    assert padding.passed is False and "ValueError" not in padding.detail


# --- the command ---


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_folder(tiny_lm("llama"), tmp_path_factory.mktemp("models") / "tiny-llama")


def run(*arguments: str | Path) -> Result:
    return CliRunner(env={"COLUMNS": "200"}).invoke(cli.app, ["verify", *map(str, arguments)])


def test_the_command_says_what_passed_and_exits_with_0(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a basis of the model, random directions stand in."""
    monkeypatch.chdir(tmp_path)
    result = run(folder)
    assert result.exit_code == 0, (result.output, result.exception)
    lines = result.stdout.splitlines()
    assert [line for line in lines if line.startswith("pass")] == [
        line for line in lines if any(f"{name}:" in line for name in CHECKS[1:])
    ]
    assert all(any(f"{name}:" in line for line in lines) for name in CHECKS + COSTS)
    assert "FAIL" not in result.output and "random direction" in result.stdout
    assert "no basis for tiny-llama" in result.stderr


def test_the_command_takes_a_basis(folder: Path, lm: LanguageModel, tmp_path: Path) -> None:
    path = random_basis(lm, "impatience", "haste").save(tmp_path / "mine.safetensors")
    result = run(folder, "--basis", path)
    assert result.exit_code == 0, (result.output, result.exception)
    assert "haste" in result.stdout and "random" not in result.output


def test_a_failing_check_is_named_and_the_exit_status_is_1(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    no_steering(monkeypatch)
    result = run(folder)
    assert result.exit_code == 1
    assert {line.split(": ")[0] for line in result.stdout.splitlines() if line.startswith("FAIL")} == {
        f"FAIL  {CHANGES}",
        f"FAIL  {FIRST}",
    }
    assert "2 checks failed on tiny-llama" in result.stderr


def test_a_basis_of_another_model_is_an_error_and_no_failed_check(folder: Path, tmp_path: Path) -> None:
    """Contract 7."""
    other = tiny_model("llama", seed=3)
    result = run(folder, "--basis", random_basis(other, "impatience").save(tmp_path / "other.safetensors"))
    assert isinstance(result.exception, ArtifactError) and "FAIL" not in result.output


def test_the_command_has_help_with_an_example() -> None:
    result = run("--help")
    assert result.exit_code == 0 and "Example: traitbasis verify" in result.output
