"""Training: SFT of the whole model, and one LoRA adapter a trait, with trl and peft.

The loss is on the customer's reply and on the token that ends it, nowhere else, under the prompt that the server will
render: token ids and labels are made here, from ``traitbasis.chat``, since trl would put a customer's reply under the
assistant header. trl's SFTTrainer takes them as they are.

SFT is told the trait in the instruction, as a prompted user is. An adapter is the trait and is told nothing; its weight
takes the place of the level, and a mixture is the sum of the adapters' changes (``merge``).
"""

from __future__ import annotations

import json
import shutil
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PrinterCallback, TrainerCallback
from transformers.utils import logging as transformers_logging

from traitbasis import embedded
from traitbasis.basis import build_basis
from traitbasis.chat import As, Turn, render_prompt, tokenize, tokenize_reply
from traitbasis.errors import EvaluationError, ModelError
from traitbasis.extract import extract
from traitbasis.files import write_whole
from traitbasis.model import DTYPES, LanguageModel, fingerprint, prepare_model
from traitbasis.pairs import PairSet
from traitbasis.spec import LEVELS
from traitbasis.sweep import versions

from .data import Sample, data_hash, read_samples

FORMAT = "traitbasis.baselines.model/1"
RECORD, BASIS = "train.json", "basis.safetensors"
Method = Literal["sft", "lora"]
IGNORED = -100  # a label that has no loss


@dataclass(frozen=True)
class Settings:
    """How a model is trained.

    samples: of the training set, from its beginning; of an adapter's trait alone. None takes all but the held-out ones.
    heldout: samples behind those, whose loss is measured and never learnt from. dtype: of the products; weights, sums
    and the optimizer are float32. max_steps: stops before the epochs are through. rank: of an adapter. at_once: how
    many of a batch go through the model together; their gradients are added up. weights, checkpointing: for models
    whose float32 weights, or activations, do not fit a GPU.
    """

    samples: int | None = None
    heldout: int = 32
    epochs: float = 2.0
    lr: float = 2e-5
    batch: int = 8
    seed: int = 0
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    max_steps: int | None = None
    rank: int = 8
    at_once: int = 2
    weights: Literal["float32", "bfloat16"] = "float32"
    checkpointing: bool = False


def tokenized(lm: LanguageModel, sample: Sample, told: bool, as_: As = "user") -> dict[str, list[int]]:
    """Token ids of a sample as the server would have them, and labels that count the reply and its end alone.

    told: with the persona in the instruction. Raises ChatTemplateError when the model's tokenizer merges the reply with
    the prompt, since such tokens never come up when the reply is generated.
    """
    turns = sample.turns(told)
    prompt = tokenize(lm.tokenizer, render_prompt(lm.tokenizer, turns, as_))
    ids = list(tokenize_reply(lm.tokenizer, turns, sample.reply, as_).ids)
    if ids[: len(prompt)] != prompt:
        raise ModelError(f"the tokenizer of {lm.name} joins the reply {sample.reply[:40]!r} to the prompt before it")
    ids.append(closing_id(lm, as_))
    return {"input_ids": ids, "labels": [IGNORED] * len(prompt) + ids[len(prompt) :]}


def closing_id(lm: LanguageModel, as_: As = "user") -> int:
    """The token that the template writes behind a customer's turn. Raises ModelError when it writes none."""
    mark = "‡reply‡"
    told = (Turn("system", "A talk."), Turn("agent", "Hello."))
    text = render_prompt(lm.tokenizer, (*told, Turn("customer", mark), Turn("agent", "Goodbye.")), as_)
    stops = lm.stop_ids(as_)
    found = next((i for i in tokenize(lm.tokenizer, text[text.rindex(mark) + len(mark) :]) if i in stops), None)
    if found is None:
        raise ModelError(f"the chat template of {lm.name} ends a customer's turn with none of the model's end tokens")
    return found


def train(
    method: Method,
    data: Path,
    out: Path,
    pair_sets: Mapping[str, PairSet],
    *,
    model: str = embedded.DEFAULT_MODEL,
    trait: str | None = None,
    settings: Settings | None = None,
    device: str = "auto",
    told: Callable[[int, int, float], None] = lambda step, steps, loss: None,
) -> dict[str, Any]:
    """Train and write a folder; returns its record (``train.json``), which says what made it.

    sft: a whole model with a basis of its own, for ``traitbasis serve``. lora: the adapter of `trait`, for ``merge``.
    pair_sets: whose default pairs make that basis, which the server needs and nobody asks for. A folder that is there
    and was made the same way is left as it is; a training that was killed goes on from its last epoch. told: of each
    step its number, of how many, and its loss.
    Raises EvaluationError for a folder that was made in another way, or too few samples.
    """
    settings = settings or Settings()
    header, samples = read_samples(data)
    learnt, heldout = _chosen(method, samples, trait, settings, data)
    lm = load_base(model, device, settings.weights)
    made_of = {
        "format": FORMAT,
        "method": method,
        "trait": trait,
        "settings": asdict(settings),
        "base": {"model": lm.name, "fingerprint": lm.fingerprint},
        "data": {
            "header": header,
            "hash": data_hash(learnt),
            "samples": len(learnt),
            "samples_by_trait": _counts(learnt),
            "heldout_hash": data_hash(heldout),
            "heldout": len(heldout),
        },
        "versions": {**versions(), **{name: version(name) for name in ("trl", "peft", "datasets")}},
    }
    if (record := _finished(out, made_of)) is not None:
        return record
    part = _part(out, made_of)
    trainer = _trainer(method, lm, learnt, heldout, settings, part / "checkpoints", told)
    before = _heldout_loss(trainer, heldout)
    checkpoint, done = _last_checkpoint(part / "checkpoints")
    begin = time.perf_counter()
    trainer.train(resume_from_checkpoint=checkpoint)
    seconds = time.perf_counter() - begin
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    after = _heldout_loss(trainer, heldout)
    tokens = sum(len(tokenized(lm, sample, method == "sft")["input_ids"]) for sample in learnt)
    record = {
        **made_of,
        "losses": [{"step": e["step"], "epoch": round(e["epoch"], 4), "loss": round(e["loss"], 5)} for e in steps],
        "heldout_loss": {"before": before, "after": after},
        "steps": trainer.state.global_step,
        "tokens": tokens,
        "seconds": round(seconds, 1),
        "tokens_per_second": round(tokens * (trainer.state.epoch - done) / seconds, 1),
    }
    folder = part / "model"
    shutil.rmtree(folder, ignore_errors=True)
    if method == "sft":
        tuned = lm.model
        _write_model(folder, tuned, lm, pair_sets, out.name)
        record["tuned_fingerprint"] = fingerprint(tuned)
    else:
        trainer.model.peft_config["default"].base_model_name_or_path = lm.name  # and not a path of this machine
        trainer.model.save_pretrained(folder, save_embedding_layers=False)
    write_whole(folder / RECORD, json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    folder.rename(out)
    shutil.rmtree(part)
    return record


def merge(
    adapters: Mapping[str, Path],
    traits: Mapping[str, str],
    out: Path,
    pair_sets: Mapping[str, PairSet],
    *,
    model: str = embedded.DEFAULT_MODEL,
) -> Path:
    """Write the base model with the adapters of `traits` merged into it, for ``traitbasis serve``.

    adapters: folder by trait. traits: level by trait; an adapter's weight is the level's plain intensity (0.5, 1, 1.5),
    and 1 is as it was trained. Several are added up, each change in full: the paper found that adapters do not mix,
    and this is what mixing them gives. Raises EvaluationError for a trait without an adapter, ArtifactError and
    ModelError for one of another model.
    """
    from peft import PeftModel

    lm = load_base(model, "cpu")
    names = sorted(traits)
    for trait in names:
        record = read_record(adapters[trait]) if trait in adapters else {}
        if record.get("method") != "lora" or record.get("trait") != trait:
            where = f" at {adapters[trait]}" if trait in adapters else ""
            raise EvaluationError(
                f"there is no adapter of {trait}{where}; train one with: python -m experiments.baselines lora"
            )
        if record["base"]["fingerprint"] != lm.fingerprint:
            raise EvaluationError(
                f"the adapter of {trait} was trained on {record['base']['model']} ({record['base']['fingerprint']}), "
                f"not on {lm.name} ({lm.fingerprint})"
            )
    merged: Any = lm.model
    if names:
        merged = PeftModel.from_pretrained(lm.model, str(adapters[names[0]]), adapter_name=names[0])
        for trait in names[1:]:
            merged.load_adapter(str(adapters[trait]), adapter_name=trait)
        weights = [LEVELS[traits[trait]] for trait in names]
        # "cat" stacks the low-rank factors, whose product is the exact sum of the weighted changes.
        merged.add_weighted_adapter(names, weights, adapter_name="sum", combination_type="cat")
        merged.set_adapter("sum")
        merged = merged.merge_and_unload(adapter_names=["sum"])
    part = out.with_name(f"{out.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    _write_model(part, merged, lm, pair_sets, out.name)
    record = {
        "format": FORMAT,
        "method": "lora-merged",
        "traits": dict(traits),
        "weights": {trait: LEVELS[level] for trait, level in traits.items()},
        "adapters": {trait: read_record(adapters[trait]) for trait in names},
        "base": {"model": lm.name, "fingerprint": lm.fingerprint},
        "tuned_fingerprint": fingerprint(merged),
    }
    write_whole(part / RECORD, json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    shutil.rmtree(out, ignore_errors=True)
    return part.rename(out)


def load_base(name: str, device: str = "auto", weights: str = "float32") -> LanguageModel:
    """A model to train, its weights as the checkpoint has them; ``load_model`` lays them out for serving.

    Raises ModelError when there is none.
    """
    source = str(embedded.fetch(name)) if name in embedded.EMBEDDED else name
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(source, dtype=DTYPES[weights])
        tokenizer = AutoTokenizer.from_pretrained(source)
    except Exception as error:  # whatever a damaged or foreign checkpoint makes the loaders raise
        raise ModelError(
            f"cannot load model {name!r} to train it: {str(error).strip() or type(error).__name__}"
        ) from error
    finally:
        if bars:
            transformers_logging.enable_progress_bar()
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    name = name if name in embedded.EMBEDDED or not Path(name).is_dir() else Path(name).resolve().name
    return prepare_model(name, model.to(device), tokenizer)


def read_record(folder: Path) -> dict[str, Any]:
    """What made a trained folder. Raises EvaluationError when it is none."""
    try:
        record: dict[str, Any] = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        if record["format"] != FORMAT:
            raise EvaluationError(f"{folder} is no model of this version (its format is {record['format']!r})")
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise EvaluationError(f"{folder} holds no trained model: {error}; train it again") from error
    return record


def _chosen(
    method: Method, samples: Sequence[Sample], trait: str | None, settings: Settings, data: Path
) -> tuple[list[Sample], list[Sample]]:
    """Samples to learn from, and held-out ones."""
    if (method == "lora") == (trait is None):
        raise EvaluationError("an adapter is of one trait, and SFT of all: give a trait to lora, and none to sft")
    own = [sample for sample in samples if method == "sft" or sample.trait == trait]
    n = max(0, len(own) - settings.heldout) if settings.samples is None else settings.samples
    if not 1 <= n <= len(own):
        of = f" of {trait}" if trait else ""
        raise EvaluationError(
            f"{data} has {len(own)} samples{of}, and {n} to learn from were asked for (beside {settings.heldout} held "
            "out); make a larger set, or give --samples"
        )
    return own[:n], own[n : n + settings.heldout]


def _trainer(
    method: Method,
    lm: LanguageModel,
    learnt: Sequence[Sample],
    heldout: Sequence[Sample],
    settings: Settings,
    checkpoints: Path,
    told: Callable[[int, int, float], None],
) -> Any:
    from datasets import Dataset
    from peft import LoraConfig
    from trl import SFTConfig, SFTTrainer

    def columns(samples: Sequence[Sample]) -> Any:
        return Dataset.from_list([tokenized(lm, sample, told=method == "sft") for sample in samples])

    warnings.filterwarnings("ignore", ".*_checkpointing", FutureWarning)  # trl's and peft's own
    arguments = SFTConfig(
        output_dir=str(checkpoints),
        num_train_epochs=settings.epochs,
        max_steps=settings.max_steps or -1,
        per_device_train_batch_size=min(settings.at_once, settings.batch),
        per_device_eval_batch_size=min(settings.at_once, settings.batch),
        gradient_accumulation_steps=-(-settings.batch // settings.at_once),
        learning_rate=settings.lr,
        lr_scheduler_type="cosine",
        train_sampling_strategy="group_by_length",  # less padding
        seed=settings.seed,
        bf16=settings.dtype == "bfloat16",
        use_cpu=lm.device.type == "cpu",
        gradient_checkpointing=settings.checkpointing,
        max_length=None,
        logging_steps=1,
        save_strategy="epoch",
        save_total_limit=1,
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    adapter = LoraConfig(
        r=settings.rank, lora_alpha=2 * settings.rank, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    if not lm.tokenizer.pad_token:  # trl insists; padding has no loss and no attention
        lm.tokenizer.pad_token = lm.tokenizer.eos_token
    torch.manual_seed(settings.seed)
    trainer = SFTTrainer(
        model=lm.model,
        args=arguments,
        train_dataset=columns(learnt),
        eval_dataset=columns(heldout) if heldout else None,
        processing_class=lm.tokenizer,
        peft_config=adapter if method == "lora" else None,
    )
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(_Teller(told))
    return trainer


def _heldout_loss(trainer: Any, heldout: Sequence[Sample]) -> float | None:
    """Mean loss a token."""
    return round(float(trainer.evaluate()["eval_loss"]), 5) if heldout else None


def _write_model(
    folder: Path, model: PreTrainedModel, lm: LanguageModel, pair_sets: Mapping[str, PairSet], name: str
) -> None:
    """A folder that ``traitbasis serve --model`` takes, with a basis extracted on this very model."""
    model.eval()
    model.save_pretrained(folder)
    lm.tokenizer.save_pretrained(folder)
    # Read anew: the trainer has left its autocast on the forward of the one it trained.
    tuned = prepare_model(name, AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), lm.tokenizer)
    build_basis([extract(tuned, pair_set) for pair_set in pair_sets.values()]).save(folder / BASIS)


def _finished(out: Path, made_of: Mapping[str, Any]) -> dict[str, Any] | None:
    """The record of a folder that was made the same way; None where there is no folder."""
    if not out.exists():
        return None
    record = read_record(out)
    if different := sorted(key for key, value in made_of.items() if record.get(key) != json.loads(json.dumps(value))):
        raise EvaluationError(
            f"{out} was trained with other {', '.join(different)}; delete it, or write elsewhere with --out"
        )
    return record


def _part(out: Path, made_of: Mapping[str, Any]) -> Path:
    """The folder of the training that is under way: another training's is thrown away."""
    part = out.with_name(f"{out.name}.part")
    settings = json.dumps(made_of, sort_keys=True)
    note = part / "made_of.json"
    if not note.is_file() or note.read_text(encoding="utf-8") != settings:
        shutil.rmtree(part, ignore_errors=True)
        write_whole(note, settings)
    return part


def _last_checkpoint(folder: Path) -> tuple[str | None, float]:
    """The latest whole one, and its epoch: the trainer writes its state last."""
    states = {int(path.parent.name.rpartition("-")[2]): path for path in folder.glob("checkpoint-*/trainer_state.json")}
    if not states:
        return None, 0.0
    state = states[max(states)]
    return str(state.parent), float(json.loads(state.read_text(encoding="utf-8"))["epoch"])


class _Teller(TrainerCallback):  # type: ignore[misc]
    def __init__(self, told: Callable[[int, int, float], None]) -> None:
        self._told = told

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **others: Any) -> None:
        if logs and "loss" in logs:
            self._told(state.global_step, state.max_steps, float(logs["loss"]))


def _counts(samples: Sequence[Sample]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for sample in samples:
        counts[sample.trait or "neutral"] = counts.get(sample.trait or "neutral", 0) + 1
    return counts
