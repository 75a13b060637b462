"""What ``traitbasis bench engine`` measures: what is compared is alike, and what is reported is what was measured.

No figure here means anything: the models are tiny, and the machine is shared.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from reference import push
from samples import random_basis
from tiny import CONFIGS, LAYERS, VOCABULARY, WIDTH, save_folder, tiny_model
from typer.testing import CliRunner, Result

from traitbasis import cli
from traitbasis.bench import (
    MEASUREMENTS,
    Ratio,
    Workload,
    against_generate,
    bandwidth,
    converse,
    differing_tokens,
    growing,
    in_turns,
    made_with,
    measure,
    newcomer,
    ratio_of,
    running,
    serve_all,
    share_differing,
    steering_cost,
    throughput,
    weight_bytes,
)
from traitbasis.cli import checks
from traitbasis.engines import transformers as engine_module
from traitbasis.engines.base import Request, Sampling, generate
from traitbasis.engines.kv import PrefixCache
from traitbasis.errors import EngineBusyError, EngineError

TRAITS = ("impatience", "confusion", "skeptical", "incoherence")
BLOCK = 32  # tokens that the prefix cache keeps together

tiny_lm = cache(tiny_model)


def workload(tokens: int = 8, architecture: str = "llama", **options: Any) -> Workload:
    lm = tiny_lm(architecture)
    return Workload(lm, random_basis(lm, *TRAITS, dose=0.5), tokens, **options)


@pytest.fixture
def load() -> Workload:
    return workload()


def numbers(figures: Any) -> Iterator[float]:
    """All figures of a measurement."""
    if isinstance(figures, dict):
        for value in figures.values():
            yield from numbers(value)
    elif isinstance(figures, list):
        for value in figures:
            yield from numbers(value)
    elif isinstance(figures, Ratio):
        assert figures.low <= figures.value <= figures.high and figures.samples > 0
        yield figures.value
    else:
        yield float(figures)


# --- statistics ---


def test_a_ratio_is_the_median_of_the_ratios_of_neighbours() -> None:
    """And not the ratio of medians: 4/1, 6/3 and 30/10."""
    ratio = ratio_of([4, 6, 30], [1, 3, 10])
    assert ratio.value == 3 and ratio.samples == 3
    assert 2 <= ratio.low <= 3 <= ratio.high <= 4
    assert ratio == ratio_of([4, 6, 30], [1, 3, 10]), "no figure changes by being worked out again"
    assert str(Ratio(1.0, 0.98765, 1.5, 3)) == "1.000 [0.988, 1.500]"
    with pytest.raises(ValueError):
        ratio_of([1, 2], [1])


def test_the_interval_of_a_ratio_is_that_of_its_median() -> None:
    """Of 1 to 101 at even distances 95 % of resampled medians are within some 20 of 51; one outlier moves nothing."""
    spread = ratio_of([float(i) for i in range(1, 102)], [1.0] * 101)
    assert spread.value == 51 and 30 < spread.low < 45 and 57 < spread.high < 72
    assert ratio_of([3.0] * 40, [2.0] * 40) == Ratio(1.5, 1.5, 1.5, 40)
    outlier = ratio_of([2.0] * 40 + [1000.0], [2.0] * 41)
    assert (outlier.value, outlier.low, outlier.high) == (1, 1, 1)
    narrow, wide = (ratio_of([float(1 + i % 5) for i in range(n)], [1.0] * n) for n in (200, 10))
    assert narrow.high - narrow.low <= wide.high - wide.low and wide.low < wide.high


def test_runs_take_turns_in_changing_order_and_the_warm_up_does_not_count() -> None:
    order: list[str] = []

    def run(name: str) -> float:
        order.append(name)
        return float(len(order))

    found = in_turns({name: lambda name=name: run(name) for name in "abc"}, repeats=3, warm=2)  # type: ignore[misc]
    rounds = ["".join(order[i : i + 3]) for i in range(0, len(order), 3)]
    assert len(rounds) == 5 and all(sorted(one) == ["a", "b", "c"] for one in rounds)
    assert all(one != other for one, other in pairwise(rounds)), "the order changes"
    assert {name: {one.index(name) for one in rounds[2:]} for name in "abc"} == {name: {0, 1, 2} for name in "abc"}
    counted = {name: [i + 1.0 for i, run in enumerate(order) if run == name and i >= 6] for name in "abc"}
    assert found == counted


@pytest.mark.parametrize(
    ("expected", "found", "share"),
    [
        ([[1, 2, 3, 4]], [[1, 2, 3, 4]], 0),
        ([[1, 2, 3, 4]], [[1, 2, 9, 4]], 0.5),
        ([[1, 2, 3, 4]], [[9, 2, 3, 4]], 1),
        ([[1, 2, 3, 4]], [[1, 2, 3, 9]], 0.25),
        ([[1, 2], [3, 4, 5, 6, 7, 8]], [[9, 2], [3, 4, 5, 6, 7, 8]], 0.25),
        ([[1, 2], [3, 4, 5, 6, 7, 8]], [[1, 9], [3, 4, 5, 6, 9, 8]], 3 / 8),
        ([[1, 2, 3, 4]], [[1, 2]], 0.5),
    ],
)
def test_the_share_that_differs_begins_at_each_rows_first_difference(
    expected: list[list[int]], found: list[list[int]], share: float
) -> None:
    """A row that ends early differs from its end on."""
    assert share_differing(expected, found) == pytest.approx(share)


def test_rows_are_compared_with_as_many() -> None:
    with pytest.raises(ValueError):
        share_differing([[1], [2]], [[1]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_weight_bytes_are_those_a_step_reads(tied: bool, dtype: torch.dtype) -> None:
    """A tied embedding is read by the head; one of its own is only looked up."""
    lm = tiny_model("llama", dtype=dtype)
    if tied:
        lm.model.get_output_embeddings().weight = lm.model.get_input_embeddings().weight
    config = CONFIGS["llama"]()
    heads = config.head_dim * (2 * config.num_attention_heads + 2 * config.num_key_value_heads)
    block = WIDTH * heads + 3 * WIDTH * config.intermediate_size + 2 * WIDTH
    assert weight_bytes(lm) == dtype.itemsize * (LAYERS * block + WIDTH + VOCABULARY * WIDTH)


def test_bandwidth_is_a_number_of_bytes_a_second(load: Workload) -> None:
    """More than a floppy disk, less than any memory there is."""
    assert 1e6 < bandwidth(load.lm, 2**22) < 1e14


# --- the workload ---


def test_the_same_seed_is_the_same_workload() -> None:
    one, same, other = workload(), workload(), workload(seed=1)
    for user in range(6):
        first, second = one.request(user), same.request(user)
        assert (first.prompt_ids, first.seed, first.sampling) == (second.prompt_ids, second.seed, second.sampling)
        assert first.additions.keys() == second.additions.keys()
        assert all(torch.equal(first.additions[z], second.additions[z]) for z in first.additions)
    assert one.prompts(4) == same.prompts(4) != other.prompts(4)
    assert torch.equal(one.every_layer()[1], same.every_layer()[1])
    assert not torch.equal(one.every_layer()[1], other.every_layer()[1])


def test_no_two_users_prompts_share_a_block(load: Workload) -> None:
    """Else the prefix cache would serve one with the other's, which no harness's users allow."""
    prompts = load.prompts(64)
    assert len({prompt[:BLOCK] for prompt in prompts}) == 64


def test_a_users_conversation_grows_and_ends_with_the_agent(load: Workload) -> None:
    for turns in (1, 2, 4):
        messages = load.messages(3, turns)
        assert [m["role"] for m in messages] == ["system", "user", *["assistant", "user"] * (turns - 1)]
        assert load.messages(3, turns + 1)[: len(messages)] == messages
    text = load.lm.tokenizer.decode(load.prompt(load.messages(3, 4)))
    assert all(message["content"] in text for message in load.messages(3, 4))


def test_requests_are_as_long_as_was_asked_for_and_steered_in_five_ways(load: Workload) -> None:
    """No stop token ends one; every fifth user is unsteered, and all of them on demand."""
    requests = [load.request(user) for user in range(10)]
    assert all(request.sampling.max_tokens == 8 and not request.stop_ids for request in requests)
    assert [bool(request.additions) for request in requests] == [True, True, False, True, True] * 2
    sums = [next(iter(request.additions.values())) for request in requests[:5] if request.additions]
    assert all(not torch.equal(a, b) for i, a in enumerate(sums) for b in sums[:i])
    assert not any(load.request(user, steered=False).additions for user in range(5))
    assert load.request(0, temperature=0, max_tokens=3).sampling.max_tokens == 3
    with running(load.lm) as engine:
        assert [len(served.tokens) for served in serve_all(engine, requests)] == [8] * 10


def test_a_basis_of_other_traits_steers_too() -> None:
    """Else ``bench --basis mine`` gives unsteered figures for steered ones (contract 11)."""
    lm = tiny_lm("llama")
    assert any(Workload(lm, random_basis(lm, "haste", "greed")).additions(user) for user in range(5))


def test_additions_for_every_layer_and_for_many_traits(load: Workload) -> None:
    """By the layer norms of the basis, which are 5 here."""
    every = load.every_layer(dose=0.1)
    assert list(every) == list(range(LAYERS))
    assert all(addition.norm().item() == pytest.approx(0.5, rel=1e-5) for addition in every.values())
    (one,) = load.composed(1).values()
    assert one.norm().item() == pytest.approx(0.25, rel=1e-5)
    many = load.composed(64)
    assert len(many) > 1 and set(many) <= set(range(LAYERS))
    assert all(torch.equal(addition, load.composed(64)[z]) for z, addition in many.items())


# --- serving ---


def test_requests_served_together_are_those_served_alone(load: Workload) -> None:
    """Contract 3; times are in order, and count from the first submission."""
    requests = [load.request(user, temperature=0) for user in range(4)]
    with running(load.lm) as engine:
        served = serve_all(engine, requests)
        alone = [generate(engine, request).token_ids for request in requests]
    assert [tuple(one.tokens) for one in served] == alone
    for one in served:
        assert len(one.times) == 8 and one.times[0] > 0 and one.times == sorted(one.times)


def test_a_request_that_fails_is_raised(load: Workload) -> None:
    bad = replace(load.request(0), additions={1: torch.full((WIDTH,), torch.inf)})
    with running(load.lm) as engine, pytest.raises(EngineError, match="not finite"):
        serve_all(engine, [load.request(1), bad])


def test_a_measurement_closes_its_engine_when_it_fails(load: Workload) -> None:
    """Contract 6."""
    with pytest.raises(ZeroDivisionError), running(load.lm) as engine:
        raise ZeroDivisionError
    with pytest.raises(EngineError, match="closed"):
        engine.submit(load.request(0), print)


# --- measurements ---


def test_the_cost_of_steering_is_a_ratio_for_every_condition(load: Workload) -> None:
    conditions = {"one": [push(2, 3.0)] * 2, "every": [load.every_layer()] * 2, "some": [push(1, 3.0), {}]}
    for baseline in (None, [load.composed(1)] * 2):
        cost = steering_cost(load.lm, load.prompts(2), conditions, steps=5, baseline=baseline)
        assert list(cost) == ["one", "every", "some"]
        for ratios in cost.values():
            assert list(ratios) == ["wall", "cpu"] and all(ratio.samples == 5 for ratio in ratios.values())
            assert all(0 < number < math.inf for number in numbers(ratios))


def test_a_condition_that_takes_twice_as_long_costs_half(load: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that only the model's forwards move: what is timed is the step, with the condition's additions."""
    now = 0.0
    forward = type(load.lm).forward
    layer = load.lm.layers[2]

    def slow(lm: Any, *arguments: Any, **options: Any) -> Any:
        nonlocal now
        now += 2.0 if layer._forward_hooks else 1.0
        return forward(lm, *arguments, **options)

    monkeypatch.setattr(type(load.lm), "forward", slow)
    for clock in ("perf_counter", "process_time"):
        monkeypatch.setattr(f"traitbasis.bench.{clock}", lambda: now)
    cost = steering_cost(load.lm, load.prompts(1), {"there": [push(2, 3.0)], "elsewhere": [push(1, 3.0)]}, steps=4)
    assert {name: ratio.value for name, ratio in cost["there"].items()} == {"wall": 0.5, "cpu": 0.5}
    assert {name: ratio.value for name, ratio in cost["elsewhere"].items()} == {"wall": 1, "cpu": 1}


@pytest.mark.parametrize("users", [(1, 2), (16, 1)], ids=str)
def test_throughput_by_the_number_of_users(load: Workload, users: tuple[int, ...]) -> None:
    """Also where the first user's reply has ended before the last one's prompt is read."""
    found = throughput(load, users, repeats=1)
    assert list(found) == ["tokens_per_second", "times_one_user", "share_of_roofline"]
    assert all(list(by_users) == list(users) for by_users in found.values())
    assert all(0 < number < math.inf for number in numbers(found)), found
    assert found["times_one_user"][1] == 1


@pytest.mark.parametrize("eos", [None, "a token that is generated"])
def test_the_engine_against_generate(eos: str | None) -> None:
    """Replies are as long on both sides, whatever tokens end the model's turns."""
    load = workload()
    if eos:
        load = replace(load, lm=replace(load.lm, model=copy.deepcopy(load.lm.model)))
        with running(load.lm) as engine:
            (served,) = serve_all(engine, [load.request(0, temperature=0)])
        load.lm.model.generation_config.eos_token_id = served.tokens[2]
    found = against_generate(load, users=2, repeats=2, waves=1)
    assert list(found) == ["static", "serial"] and all(ratio.samples == 2 for ratio in found.values())
    assert all(0 < number < math.inf for number in numbers(found))


def test_a_conversation_holds_what_was_said_and_repeats_itself(load: Workload) -> None:
    with running(load.lm) as engine:
        runs = [converse(load, engine, user=1, turns=3, temperature=0) for _ in range(2)]
    assert runs[0].replies == runs[1].replies and [len(reply) for reply in runs[0].replies] == [8] * 3
    assert runs[0].prompt_tokens == runs[1].prompt_tokens == sorted(runs[0].prompt_tokens)
    assert runs[0].prompt_tokens[0] == len(load.prompt(load.messages(1, turns=1)))
    said = load.lm.tokenizer.decode(runs[0].replies[0], skip_special_tokens=True).strip()
    messages = [*load.messages(1, turns=1), {"role": "assistant", "content": said or "..."}]
    assert runs[0].prompt_tokens[1] > len(load.prompt(messages))
    assert all(0 < time < math.inf for time in runs[0].first_token)


def test_growing_conversations_say_the_same_with_a_prefix_cache_and_without(load: Workload) -> None:
    """Contract 4."""
    found = growing(load, turns=3, repeats=2)
    assert found["same_tokens"] is True
    assert found["prompt_tokens"] == sorted(found["prompt_tokens"]) and len(found["prompt_tokens"]) == 3
    times = found["first_token_over_turn_1"]
    assert list(times) == ["cached", "uncached"] and all(len(one) == 3 and one[0] == 1 for one in times.values())
    assert all(0 < number < math.inf for number in numbers(times))


def test_growing_conversations_that_differ_are_noticed(load: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache that gives other blocks than it was given."""
    match = PrefixCache.match
    monkeypatch.setattr(
        PrefixCache, "match", lambda cache, ids: [[-state for state in block] for block in match(cache, ids)]
    )
    assert growing(load, turns=3, repeats=1)["same_tokens"] is False


def test_a_newcomer_waits_some_steps(load: Workload) -> None:
    found = newcomer(load, others=2, repeats=2)
    assert list(found) == ["steps", "most"] and found["steps"] <= found["most"] < math.inf


@pytest.mark.parametrize("architecture", ["llama", "mistral"])
def test_no_token_differs_in_a_crowd(architecture: str) -> None:
    """Contract 3, in slots and in micro-batches."""
    assert differing_tokens(workload(architecture=architecture), users=4) == {"steered": 0, "unsteered": 0}


def test_tokens_that_differ_in_a_crowd_are_counted(load: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    stack = engine_module.stack_additions
    monkeypatch.setattr(
        engine_module, "stack_additions", lambda rows, lm: {z: 9 * a.flip(0) for z, a in stack(rows, lm).items()}
    )
    found = differing_tokens(load, users=4)
    assert 0 < found["steered"] <= 1 and found["unsteered"] == 0


def test_what_made_the_figures_goes_with_them(load: Workload) -> None:
    """Contract 11."""
    made = made_with(load)
    assert made["model"] == "tiny-llama" and made["model_fingerprint"] == load.lm.fingerprint
    assert made["basis"] == load.basis.fingerprint and made["dtype"] == "float32" and made["device"] == "cpu"
    assert made["threads"] == torch.get_num_threads() and (made["tokens"], made["seed"]) == (8, 0)
    assert made["prompt_tokens"] == median(len(prompt) for prompt in load.prompts(8))
    assert made["versions"].keys() == {"traitbasis", "transformers", "torch"}
    assert json.loads(json.dumps(made)) == made


@pytest.mark.parametrize("architecture", ["llama", "mistral"])
def test_a_model_in_micro_batches_is_measured_too(architecture: str) -> None:
    """What its users get, however slow."""
    found = dict(measure(workload(architecture=architecture), (1, 2), quick=True, only=["throughput", "generate"]))
    assert list(found) == ["throughput", "generate"]
    assert all(0 < number < math.inf for number in numbers(found)), found


# --- the command ---


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A tiny Llama as a Hugging Face folder, and a basis of it."""
    folder = tmp_path_factory.mktemp("models")
    lm = tiny_lm("llama")
    return save_folder(lm, folder / "tiny-llama"), random_basis(lm, *TRAITS, dose=0.5).save(
        folder / "basis.safetensors"
    )


def run(files: tuple[Path, Path], *arguments: str | Path) -> Result:
    model, basis = files
    words = ["bench", "engine", "--model", model, "--basis", basis, *arguments]
    return CliRunner(env={"COLUMNS": "200"}).invoke(cli.app, [str(word) for word in words])


def test_the_command_prints_a_table_and_writes_json(files: tuple[Path, Path], tmp_path: Path) -> None:
    """Contract 11: the file says what made it, and only what was asked for is in it."""
    path = tmp_path / "new" / "figures.json"
    result = run(
        files, "--quick", "--only", "steering, crowd,throughput", "--users", "2,1", "--tokens", "8", "--out", path
    )
    assert result.exit_code == 0, (result.output, result.exception)
    figures = json.loads(path.read_text())
    assert figures.keys() == {"made_with", "throughput", "steering", "crowd"}
    assert figures["made_with"]["model"] == "tiny-llama" and figures["made_with"]["tokens"] == 8
    assert figures["made_with"]["model_fingerprint"] == tiny_lm("llama").fingerprint
    assert figures["throughput"]["tokens_per_second"].keys() == {"1", "2"}
    assert figures["steering"]["1"]["one layer"]["wall"].keys() == {"value", "low", "high", "samples"}
    assert figures["crowd"] == {"steered": 0, "unsteered": 0}
    assert all(name in result.stdout for name in ("throughput", "steering", "all layers / wall", str(path)))
    assert [entry.name for entry in path.parent.iterdir()] == ["figures.json"], "no partial file stays"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--only", "throughput,speed"], ["speed", *MEASUREMENTS]),
        (["--users", "1,two"], ["--users", "1,two"]),
        (["--users", "0"], ["--users", "0"]),
        (["--users", "-1"], ["--users", "-1"]),
        (["--users", ""], ["--users"]),
        (["--turns", "1"], ["--turns", "2"]),
        (["--tokens", "0"], ["--tokens", "8"]),
        (["--threads", "0"], ["--threads", "1"]),
    ],
)
def test_arguments_that_cannot_be_are_refused_by_name(
    files: tuple[Path, Path], arguments: list[str], words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before a model is loaded."""
    monkeypatch.setattr(checks, "load_lm", lambda *arguments: pytest.fail("the model was loaded first"))
    result = run(files, *arguments)
    assert result.exit_code == 2, (result.output, result.exception)
    assert all(word in result.output for word in words), result.output


def test_the_command_has_help_with_an_example() -> None:
    result = CliRunner(env={"COLUMNS": "200"}).invoke(cli.app, ["bench", "engine", "--help"])
    assert result.exit_code == 0 and "Example: traitbasis bench engine" in result.output


def test_more_requests_than_the_queue_takes_are_an_error_and_no_hang() -> None:
    lm = tiny_model("llama")
    request = Request((5, 6, 7), 0, Sampling(max_tokens=2), frozenset())
    with running(lm, max_queue=2) as engine, pytest.raises(EngineBusyError):
        serve_all(engine, [request] * 4)
