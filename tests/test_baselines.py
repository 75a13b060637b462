"""experiments/baselines: training sets, personas, random directions; SFT and LoRA on a tiny model, all of it served."""

from __future__ import annotations

import json
import random
import re
import sys
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
import torch
import yaml
from safetensors.torch import load_file
from typer.testing import CliRunner

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "experiments"))

from baselines import data, serve, tasks, train, users, values  # noqa: E402
from baselines.__main__ import app  # noqa: E402
from baselines.random_basis import random_basis  # noqa: E402
from samples import MILD_GUARDS, lettered_set  # noqa: E402
from samples import random_basis as some_basis  # noqa: E402
from scripted import ScriptedEngine  # noqa: E402
from tiny import save_folder, tiny_model  # noqa: E402

from traitbasis.basis import Basis, CurvePoint, find_basis  # noqa: E402
from traitbasis.errors import EvaluationError, ModelError, PairError, TraitSpecError  # noqa: E402
from traitbasis.model import load_model  # noqa: E402
from traitbasis.pairs import PAPER_TRAITS, fold, known_traits, load_pairs  # noqa: E402
from traitbasis.simulator import UserSimulator  # noqa: E402
from traitbasis.users import check_users, read_users  # noqa: E402

PAIRS = {"impatience": lettered_set("impatience", "x", 24), "skeptical": lettered_set("skeptical", "q", 24)}
QUICK = train.Settings(samples=12, heldout=6, epochs=3, lr=3e-3, batch=4, dtype="float32")
EVALUATED = "\n".join(
    path.read_text(encoding="utf-8")
    for path in [*(ROOT / "contrastive_pairs" / "contexts").glob("*.yaml"), ROOT / "experiments" / "scenarios.yaml"]
)
WIRE = {"system": "system", "agent": "user", "customer": "assistant"}


@pytest.fixture(scope="module")
def lm():
    return tiny_model()


@pytest.fixture(scope="module")
def home(lm, tmp_path_factory):
    """A folder with a tiny model, a training set, and what was trained on them."""
    home = tmp_path_factory.mktemp("baselines")
    save_folder(lm, home / "tiny")
    data.pair_samples(PAIRS, 24, home / "data.jsonl")
    train.train("sft", home / "data.jsonl", home / "sft", PAIRS, model=str(home / "tiny"), settings=QUICK)
    for trait in PAIRS:
        settings = replace(QUICK, samples=6, heldout=2, epochs=2, lr=3e-2)
        folder = home / "adapters" / trait
        train.train(
            "lora", home / "data.jsonl", folder, PAIRS, model=str(home / "tiny"), trait=trait, settings=settings
        )
    return home


@pytest.fixture
def paper():
    return users.pair_sets_of(PAPER_TRAITS)


def messages(turns):
    return [{"role": WIRE[turn.speaker], "content": turn.text} for turn in turns]


# --- personas ---------------------------------------------------------------------------------------------------------


def test_prompted_users_are_told_their_traits_and_levels_and_are_not_steered(tmp_path, paper):
    conditions = [users.read_condition(spec) for spec in ("impatience-high", "impatience-low+skeptical-medium")]
    served = read_users(users.write_users(tmp_path / "users.yaml", conditions, paper))
    check_users(served, PAPER_TRAITS)
    names = [user.name for user in served]
    assert names == ["prompted-neutral", "prompted-impatience-high", "prompted-impatience-low.skeptical-medium"]
    assert not any(user.traits for user in served)
    assert served[0].about == ""
    definition = " ".join(paper["impatience"].definition.split())
    assert served[1].about == f"About you: impatience (very strongly, in every message): {definition}"
    assert "slightly" in served[2].about and "skeptical (clearly" in served[2].about


@pytest.mark.parametrize("spec", ["impatience", "impatience-0.5", "impatience-high+impatience-low", "high"])
def test_a_condition_is_traits_with_levels(spec):
    with pytest.raises(TraitSpecError, match="low, medium or high"):
        users.read_condition(spec)


def test_a_trait_without_pairs_is_refused_with_the_known_ones():
    with pytest.raises(PairError, match="impatience"):
        users.pair_sets_of(["impatiance"])


# --- random directions ------------------------------------------------------------------------------------------------


def test_a_random_basis_has_the_doses_and_nothing_of_the_directions(tmp_path, lm):
    basis = some_basis(lm, "impatience", "skeptical")
    curve = (CurvePoint(0.1, 0.2, 0.1, 0.3, 1.0, 0.0),)
    columns = tuple(replace(column, low=0.4, high=1.3, limit=0.5, curve=curve) for column in basis.columns)
    basis = Basis(columns, basis.matrix)
    drawn = Basis.load(random_basis(basis, 3).save(tmp_path / "random.safetensors"))
    drawn.check_model(lm)
    torch.testing.assert_close(drawn.matrix.norm(dim=0), basis.matrix.norm(dim=0))
    for traits in ({"impatience": 1.3}, {"impatience": 0.4}, {"skeptical": -2.0}):
        assert drawn.dose(traits) == pytest.approx(basis.dose(traits))
        assert drawn.load_share(traits) == pytest.approx(basis.load_share(traits))
    cosines = torch.nn.functional.cosine_similarity(drawn.matrix, basis.matrix, dim=0)
    assert cosines.abs().max() < 0.6  # 32 dimensions: a standard deviation is 0.18
    assert abs(float(drawn.cosine()[0, 1])) < 0.6  # of one layer, and yet two directions
    assert drawn.levels == basis.levels and drawn.fingerprint != basis.fingerprint
    for column in drawn.columns:
        assert "random" in column.provenance.pair_set_hash and column.curve == ()
    assert torch.equal(random_basis(basis, 3).matrix, drawn.matrix)
    assert not torch.equal(random_basis(basis, 4).matrix, drawn.matrix)


# --- values -----------------------------------------------------------------------------------------------------------


def test_what_is_replaced_is_replaced_everywhere_and_no_fact_is_lost():
    replaced = 0
    for trait in known_traits():
        for pair in load_pairs(trait).select("default"):
            texts = [*(turn.text for turn in pair.context), pair.positive, pair.negative]
            slots = values.Slots([*texts, *pair.facts])
            new = slots.draw(tasks.names(), random.Random(pair.id))
            written = [values.replace_all(text, new) for text in texts]
            for old, value in new.items():
                found = re.compile(rf"(?<![\w@]){re.escape(old)}(?![\w@])")
                assert not any(found.search(text) for text in written), (trait, pair.id, old)
                assert value in "\n".join(written)
            for fact in pair.facts:
                fact = fold(values.replace_all(fact, new))
                assert fact in fold(written[-1]) and fact in fold(written[-2]), (trait, pair.id, fact)
            replaced += bool(new)
    assert replaced > 100  # of 124


def test_dates_move_together_and_not_where_a_day_is_named_alone():
    rng = random.Random(1)
    new = values.Slots(["From May 3 to May 10.", "It was May 3."]).draw(tasks.names(), rng)
    days = [values._day(*date.split()).toordinal() for date in (new["May 3"], new["May 10"])]
    assert days[1] - days[0] == 7
    assert not values.Slots(["From May 3 on.", "It was the third, I think."]).dates
    assert not values.Slots(["My March bill is of May 3."]).dates


def test_a_sum_is_left_as_it_is():
    assert not values.Slots(["It was $120 and is $95 now.", "So $25 back."]).amounts
    assert values.Slots(["It was $120.", "So $120 back."]).amounts == ["$120"]


# --- training sets ----------------------------------------------------------------------------------------------------


def test_training_pairs_are_the_default_ones_and_nothing_that_measures(tmp_path, paper):
    made = data.pair_samples(paper, 400, tmp_path / "data.jsonl").samples
    default = {trait: {pair.id for pair in s.select("default")} for trait, s in paper.items()}
    measured = {
        text
        for pair_set in paper.values()
        for pair in pair_set.select("extra", "heldout")
        for text in (pair.positive, pair.negative, pair.context[0].text)
    }
    for sample in made:
        made_by = sample.made_by
        assert made_by["use"] == "default" and made_by["pair"] in default[made_by["pair_trait"]]
        assert (sample.trait, made_by["side"]) in ((None, "negative"), (made_by["pair_trait"], "positive"))
        assert not measured & {sample.reply, sample.context[0].text}
        assert all(fold(fact) in fold(sample.reply) for fact in sample.facts)
        for value in made_by["replaced"].values():
            assert not re.search(rf"(?<![\w.]){re.escape(value.lstrip('$'))}(?![\w])", EVALUATED), value
    assert {sample.reply for sample in made[:16]} <= {
        side for s in paper.values() for pair in s.pairs for side in (pair.positive, pair.negative)
    }
    assert len({(sample.context, sample.reply) for sample in made}) == 400


def test_the_beginning_of_a_training_set_is_a_smaller_one_of_the_same_mixture(tmp_path, paper):
    small = data.pair_samples(paper, 20, tmp_path / "small.jsonl").samples
    large = data.pair_samples(paper, 60, tmp_path / "large.jsonl").samples
    assert large[:20] == small
    assert [sample.trait for sample in small[:5]] == [*PAPER_TRAITS, None]
    assert data.data_hash(large[:20]) == data.data_hash(small) != data.data_hash(large)
    again = data.pair_samples(paper, 60, tmp_path / "small.jsonl")  # enlarged
    assert data.read_samples(again.path)[1] == large


def test_training_tasks_differ_and_share_no_value_with_an_evaluation():
    made = [tasks.training_task(number) for number in range(13_000)]
    assert len({task.context for task in made}) == len(made)
    assert len({task.domain for task in made}) >= 10
    drawn = {task.facts[name] for task in made[:3000] for name in ("number", "amount") if name in task.facts}
    assert not {value for value in drawn if value.lstrip("$") in EVALUATED}
    dates = {task.facts["date"] for task in made if "date" in task.facts}
    month_first = set(re.findall(r"\b[A-Z][a-z]+ [0-9]{1,2}\b", EVALUATED))
    day_first = {f"{month} {day}" for day, month in re.findall(r"\b([0-9]{1,2}) ([A-Z][a-z]+)\b", EVALUATED)}
    assert len(dates) > 50 and not dates & (month_first | day_first)
    for names in tasks.names().values():
        assert len(names) > 25
        assert not any(re.search(rf"\b{name}\b", EVALUATED) for name in names)


def test_every_fact_that_is_asked_for_stands_in_the_instruction():
    for number in range(200):
        task = tasks.training_task(number, seed=5)
        assert task.context[-1].speaker == "agent" and task.context[0].speaker == "system"
        assert not any("{" in turn.text for turn in task.context)
        assert all(value in task.context[0].text for value in task.facts.values())
        assert set(task.asked) <= set(task.facts)


def test_a_training_set_of_steered_turns_goes_on_where_it_was_killed(tmp_path, lm, paper):
    pair_sets = {trait: paper[trait] for trait in ("impatience", "skeptical")}
    whole, killed = tmp_path / "whole.jsonl", tmp_path / "killed.jsonl"
    with UserSimulator(lm, some_basis(lm, *pair_sets), guards=MILD_GUARDS) as simulator:
        made = data.steered_samples(simulator, pair_sets, 8, whole, max_tokens=6).samples
        lines = whole.read_text(encoding="utf-8").splitlines(keepends=True)
        killed.write_text("".join(lines[:4]) + lines[4][:50], encoding="utf-8")
        data.steered_samples(simulator, pair_sets, 8, killed, max_tokens=6)
        assert killed.read_bytes() == whole.read_bytes()
        with pytest.raises(EvaluationError, match="max_tokens"):
            data.steered_samples(simulator, pair_sets, 8, killed, max_tokens=7)
        turn = simulator.reply(
            messages(made[4].context),
            {"skeptical": made[4].level},
            seed=made[4].made_by["seed"],
            max_tokens=6,
            temperature=0.7,
        )
    assert turn.text == made[4].reply  # what made it says how to get it again
    assert [(sample.trait, sample.level) for sample in made[:5]] == [
        ("impatience", "low"),
        ("skeptical", "low"),
        (None, None),
        ("impatience", "medium"),
        ("skeptical", "medium"),
    ]
    assert made[3].made_by["basis"] == simulator.basis.fingerprint and made[3].made_by["traits"] == {"impatience": 1.0}
    assert len({sample.made_by["task"] for sample in made}) == 8


def test_of_several_draws_the_one_with_most_facts_is_kept(tmp_path, lm, paper):
    task = next(task for task in map(tasks.training_task, range(0, 9999, 14)) if len(task.asked) > 1)
    number = int(task.id.rpartition("-")[2])
    engine = ScriptedEngine("Hello there.", f"It is {task.facts['number']}.", "Who are you?")
    written = {"format": data.FORMAT}
    with UserSimulator(lm, some_basis(lm, "impatience"), engine=engine, guards=()) as simulator:
        path = tmp_path / "data.jsonl"
        original = data.training_task
        data.training_task = lambda n, seed: original(number, seed)
        try:
            made = data.steered_samples(simulator, {"impatience": paper["impatience"]}, 1, path, best_of=3)
        finally:
            data.training_task = original
    assert made.samples[0].reply == f"It is {task.facts['number']}."
    assert len(engine.requests) == 3
    assert written["format"] == json.loads(path.read_text(encoding="utf-8").splitlines()[0])["format"]


def test_two_runs_do_not_make_one_training_set(tmp_path):
    """Every sample would be in it twice."""
    made = data.SampleFile(tmp_path / "a.jsonl", {})
    again = data.SampleFile(tmp_path / "a.jsonl", {})
    sample = data.Sample("s", "pairs", None, None, (data.Turn("system", "Buy."),), "Hi.", "", (), {})
    made.append([sample])
    made.append([sample])
    with pytest.raises(EvaluationError, match="another run is writing"):
        again.append([sample])
    assert len(data.read_samples(tmp_path / "a.jsonl")[1]) == 2


def test_a_damaged_or_missing_training_set_is_refused(tmp_path):
    with pytest.raises(EvaluationError, match=r"no training set at .*experiments\.baselines data"):
        data.read_samples(tmp_path / "none.jsonl")
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(EvaluationError, match="damaged"):
        data.read_samples(tmp_path / "empty.jsonl")
    (tmp_path / "other.jsonl").write_text('{"format": "else"}\n{"id": 1}\n')
    with pytest.raises(EvaluationError, match="'else'"):
        data.read_samples(tmp_path / "other.jsonl")
    (tmp_path / "headed.jsonl").write_text(json.dumps({"format": data.FORMAT}) + "\n")
    with pytest.raises(EvaluationError, match="no sample"):
        data.read_samples(tmp_path / "headed.jsonl")


# --- training ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", ["plain", "dialogue"])
def test_a_sample_is_tokenised_as_the_server_renders_it(tmp_path, lm, paper, prompt):
    made = data.pair_samples(paper, 10, tmp_path / "data.jsonl", prompt=prompt).samples
    with UserSimulator(lm, some_basis(lm, "impatience")) as simulator:
        for sample in made:
            for told in (True, False):
                row = train.tokenized(lm, sample, told)
                user = users.prompted_user({sample.trait: sample.level} if sample.trait and told else {}, paper)
                prepared = simulator.prepare(messages(sample.context), {}, user=user)
                silent = [i for i, label in zip(row["input_ids"], row["labels"], strict=True) if label == -100]
                assert silent == list(prepared.request.prompt_ids)
                spoken = [label for label in row["labels"] if label != -100]
                assert lm.tokenizer.decode(spoken[:-1]) == sample.reply
                assert spoken[-1] in prepared.request.stop_ids
    assert ("###STOP###" in made[0].context[0].text) == (prompt == "dialogue")


def test_training_lowers_the_loss_also_of_what_it_did_not_see(home):
    for folder in (home / "sft", home / "adapters" / "impatience"):
        record = train.read_record(folder)
        losses = [entry["loss"] for entry in record["losses"]]
        assert len(losses) == record["steps"] > 2
        assert losses[-1] < losses[0] - 0.3, folder
        assert record["heldout_loss"]["after"] < record["heldout_loss"]["before"] - 0.3, folder


def test_the_heldout_loss_is_the_mean_over_reply_tokens(home, lm):
    """Of the untrained model, computed sample by sample."""
    made = data.read_samples(home / "data.jsonl")[1][12:18]
    total = count = 0.0
    for sample in made:
        row = train.tokenized(lm, sample, told=True)
        ids = torch.tensor([row["input_ids"]])
        logits = lm.forward(ids, torch.ones_like(ids), last_only=False)[0, :-1].log_softmax(-1)
        for position, label in enumerate(row["labels"][1:]):
            if label != -100:
                total, count = total - float(logits[position, label]), count + 1
    assert train.read_record(home / "sft")["heldout_loss"]["before"] == pytest.approx(total / count, rel=0.01)


def test_a_record_says_what_made_the_model(home, lm):
    header, samples = data.read_samples(home / "data.jsonl")
    record = train.read_record(home / "sft")
    assert record["base"] == {"model": "tiny", "fingerprint": lm.fingerprint}
    assert record["data"]["header"] == header and record["data"]["hash"] == data.data_hash(samples[:12])
    assert record["data"]["samples_by_trait"] == {"impatience": 4, "skeptical": 4, "neutral": 4}
    assert record["settings"]["lr"] == 3e-3 and {"trl", "peft", "torch_version"} <= record["versions"].keys()
    adapter = train.read_record(home / "adapters" / "skeptical")
    assert adapter["data"]["samples_by_trait"] == {"skeptical": 6}
    written = (home / "adapters" / "skeptical" / "adapter_config.json").read_text()
    assert str(home) not in written + json.dumps(record) + json.dumps(adapter)  # no path of this machine


def test_a_tuned_model_is_another_one_and_has_its_own_basis(home, lm):
    tuned = load_model(str(home / "sft"))
    assert tuned.fingerprint == train.read_record(home / "sft")["tuned_fingerprint"] != lm.fingerprint
    assert find_basis(tuned, home / "sft" / train.BASIS).traits == tuple(PAIRS)
    changed = [
        name
        for (name, new), (_, old) in zip(tuned.model.named_parameters(), lm.model.named_parameters(), strict=True)
        if not torch.equal(new, old)
    ]
    assert len(changed) == len(list(lm.model.named_parameters()))  # full, and not a part of it


def test_a_finished_training_is_left_alone_and_another_one_refused(home, monkeypatch):
    arguments = ("sft", home / "data.jsonl", home / "sft", PAIRS)
    monkeypatch.setattr(train, "_trainer", lambda *_: pytest.fail("it trains again"))
    record = train.train(*arguments, model=str(home / "tiny"), settings=QUICK)
    assert record == train.read_record(home / "sft")
    with pytest.raises(EvaluationError, match="settings"):
        train.train(*arguments, model=str(home / "tiny"), settings=replace(QUICK, lr=1e-3))


def test_a_killed_training_goes_on_from_its_last_epoch_to_the_same_weights(home, tmp_path):
    steps: list[int] = []

    def killed(step: int, total: int, loss: float) -> None:
        steps.append(step)
        if step == 5:
            raise KeyboardInterrupt

    arguments = ("sft", home / "data.jsonl", tmp_path / "sft", PAIRS)
    with pytest.raises(KeyboardInterrupt):
        train.train(*arguments, model=str(home / "tiny"), settings=QUICK, told=killed)
    assert steps == [1, 2, 3, 4, 5] and not (tmp_path / "sft").exists()
    steps.clear()
    record = train.train(*arguments, model=str(home / "tiny"), settings=QUICK, told=lambda n, *_: steps.append(n))
    assert steps[0] == 4 and steps[-1] == 9  # three steps an epoch
    whole = train.read_record(home / "sft")
    assert record["tuned_fingerprint"] == whole["tuned_fingerprint"]
    assert [entry["loss"] for entry in record["losses"]] == pytest.approx([entry["loss"] for entry in whole["losses"]])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["sft"]


def test_what_cannot_be_trained_says_why(home, tmp_path):
    def lora(**changes):
        settings = replace(QUICK, **changes)
        train.train("lora", home / "data.jsonl", tmp_path / "a", PAIRS, model=str(home / "tiny"), settings=settings)

    with pytest.raises(EvaluationError, match="one trait"):
        lora()
    with pytest.raises(EvaluationError, match="24 samples, and 99"):
        train.train(
            "sft", home / "data.jsonl", tmp_path / "a", PAIRS, model="none", settings=replace(QUICK, samples=99)
        )
    with pytest.raises(EvaluationError, match="0 samples of angry"):
        train.train("lora", home / "data.jsonl", tmp_path / "a", PAIRS, trait="angry", settings=QUICK)
    with pytest.raises(ModelError, match="no-such-model"):
        train.load_base(str(tmp_path / "no-such-model"))
    with pytest.raises(EvaluationError, match="train it again"):
        train.read_record(tmp_path)


# --- LoRA -------------------------------------------------------------------------------------------------------------


def logits_of(model):
    ids = torch.arange(3, 60)[None] % 250
    with torch.inference_mode():
        return model(input_ids=ids).logits


def test_a_merged_adapter_is_what_peft_computes_with_it(home, lm, tmp_path):
    from peft import PeftModel

    adapters = {trait: home / "adapters" / trait for trait in PAIRS}
    merged = train.merge(adapters, {"skeptical": "medium"}, tmp_path / "merged", PAIRS, model=str(home / "tiny"))
    wrapped = PeftModel.from_pretrained(tiny_model().model, str(adapters["skeptical"]))
    expected = logits_of(wrapped)
    found = logits_of(load_model(str(merged)).model)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert (found - logits_of(lm.model)).abs().max() > 0.1
    find_basis(load_model(str(merged)), merged / train.BASIS)


def test_a_mixture_is_the_sum_of_its_adapters_each_as_strong_as_its_level(home, lm, tmp_path):
    adapters = {trait: home / "adapters" / trait for trait in PAIRS}
    mixture = {"impatience": "high", "skeptical": "low"}
    merged = load_file(
        train.merge(adapters, mixture, tmp_path / "merged", PAIRS, model=str(home / "tiny")) / "model.safetensors"
    )
    before = lm.model.state_dict()
    name = "model.layers.1.mlp.up_proj"
    expected = before[f"{name}.weight"].clone()
    for trait, weight in (("impatience", 1.5), ("skeptical", 0.5)):
        factors = load_file(adapters[trait] / "adapter_model.safetensors")
        down, up = (factors[f"base_model.model.{name}.lora_{letter}.weight"] for letter in "AB")
        expected += weight * 16 / 8 * up @ down  # alpha over rank
    torch.testing.assert_close(merged[f"{name}.weight"], expected)
    untouched = "model.norm.weight"
    assert torch.equal(merged[untouched], before[untouched])
    record = train.read_record(tmp_path / "merged")
    assert record["weights"] == {"impatience": 1.5, "skeptical": 0.5} and len(record["adapters"]) == 2


def test_adapters_of_another_model_or_trait_are_not_merged(home, tmp_path):
    other = save_folder(tiny_model(seed=1), tmp_path / "other")
    adapters = {"impatience": home / "adapters" / "impatience", "skeptical": home / "adapters" / "impatience"}
    with pytest.raises(EvaluationError, match="not on other"):
        train.merge(adapters, {"impatience": "low"}, tmp_path / "merged", PAIRS, model=str(other))
    with pytest.raises(EvaluationError, match="no adapter of skeptical"):
        train.merge(adapters, {"skeptical": "low"}, tmp_path / "merged", PAIRS, model=str(home / "tiny"))


# --- served -----------------------------------------------------------------------------------------------------------


def ask(endpoint, traits):
    model = endpoint.model(traits)
    said = [{"role": "system", "content": "You are a customer."}, {"role": "user", "content": "Hi!"}]
    body = {"model": model, "messages": said, "max_tokens": 8, "seed": 1}
    answer = httpx.post(f"{endpoint.url}/chat/completions", json=body, timeout=60, trust_env=False).raise_for_status()
    return answer.json()


def test_a_tuned_model_is_served_and_answers(home):
    traits = {"impatience": "high"}
    with serve.served("sft", home, [traits]) as endpoints:
        endpoint = next(endpoints)
        assert endpoint.model(traits) == "prompted-impatience-high" and endpoint.model({}) == "prompted-neutral"
        for asked in (traits, {}):
            answer = ask(endpoint, asked)
            assert answer["choices"][0]["message"]["content"]
            tuned = train.read_record(home / "sft")["tuned_fingerprint"]
            assert answer["traitbasis"]["model_fingerprint"] == tuned
            assert answer["traitbasis"]["traits"] == {}
        assert next(endpoints, None) is None  # one endpoint for all conditions
        with pytest.raises(httpx.ConnectError):
            ask(endpoint, traits)  # and it is gone


def test_each_method_starts_the_server_with_what_it_needs(home, monkeypatch):
    started: list[tuple[str, ...]] = []

    @serve.contextmanager
    def running(arguments, port, log):
        started.append(tuple(map(str, arguments)))
        yield "http://nowhere/v1"

    basis = some_basis(tiny_model(), *PAIRS).save(home / "basis.safetensors")
    monkeypatch.setattr(serve, "_running", running)
    conditions = [{}, {"impatience": "high", "skeptical": "low"}]
    model = str(home / "tiny")
    ids: dict[str, list[list[str]]] = {}
    for method in serve.METHODS:
        with serve.served(method, home, conditions, model=model, basis=basis) as endpoints:
            ids[method] = [[endpoint.model(traits) for traits in endpoint.conditions] for endpoint in endpoints]
    assert ids == {
        "unsteered": [["steered-user@"]],
        "prompted": [["prompted-neutral", "prompted-impatience-high.skeptical-low"]],
        "random": [["steered-user@", "steered-user@impatience-high+skeptical-low"]],
        "sft": [["prompted-neutral", "prompted-impatience-high.skeptical-low"]],
        "lora": [["lora-neutral"], ["lora-impatience-high.skeptical-low"]],
        "steered": [["steered-user@", "steered-user@impatience-high+skeptical-low"]],
    }
    unsteered, prompted, drawn, tuned, neutral, mixed, steered = started
    assert unsteered == steered == ("--model", model, "--basis", str(basis))
    assert prompted[:2] == ("--model", model) and "--users" in prompted
    assert Basis.load(drawn[drawn.index("--basis") + 1]).columns[0].provenance.pair_set_hash.startswith("none")
    assert tuned[1] == str(home / "sft")
    assert neutral[1] == mixed[1] == str(home / "merged") and not (home / "merged").exists()


def test_a_server_that_does_not_start_shows_its_log(home, tmp_path):
    with (
        serve.served("unsteered", tmp_path, [{}], model=str(home / "tiny"), options=["--fast"]) as endpoints,
        pytest.raises(EvaluationError, match=r"(?s)did not start:.*No such option.*--fast"),
    ):
        next(endpoints)


# --- commands ---------------------------------------------------------------------------------------------------------


def test_commands_make_users_and_training_sets(tmp_path):
    def run(*arguments):
        ran = CliRunner().invoke(app, [*map(str, arguments)])
        assert ran.exit_code == 0, ran.output
        return ran.output

    run("users", "--condition", "impatience-high", "--out", tmp_path / "users.yaml")
    assert len(yaml.safe_load((tmp_path / "users.yaml").read_text())["users"]) == 2
    run("data", "--samples", 9, "--traits", "confusion, skeptical", "--out", tmp_path / "data.jsonl")
    header, samples = data.read_samples(tmp_path / "data.jsonl")
    assert header["traits"] == ["confusion", "skeptical"] and len(samples) == 9
    for command in app.registered_commands:
        name = command.name or command.callback.__name__
        assert f"python -m experiments.baselines {name}" in run(name, "--help").replace("\n", " ").replace("│", "")
