"""Load a causal language model and find its decoder layers.

Layers are found by structure, not by a table of names, and then verified by tiny forwards: every block runs once, in
order, each one's output is the next one's input, and adding to any block's output changes the logits. A model
that does not verify is refused (after nnterp; docs/design.md, contract 1).
"""

from __future__ import annotations

import hashlib
import inspect
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import align_module_device
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    DynamicCache,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from traitbasis import embedded
from traitbasis.chat import As, stop_token_ids, template_hash
from traitbasis.cpu import faster_dtype, prepare_weights
from traitbasis.errors import ModelError
from traitbasis.hooks import hidden_of, steer

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
QUANTIZATIONS = ("8bit", "4bit")  # by bitsandbytes
_FINGERPRINT_SAMPLES = 64


@dataclass(frozen=True)
class LanguageModel:
    """A loaded causal LM whose decoder layers are known.

    name: alias, hub id or folder name it was loaded by.
    layers: the decoder blocks in order; index z is layer z (contract 1).
    width: d_model, the size of the residual stream.
    """

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    layers: tuple[nn.Module, ...]
    width: int

    @property
    def device(self) -> torch.device:
        """Where inputs go; of a model on several devices, its first."""
        return _input_device(self.model)

    @property
    def dtype_name(self) -> str:
        """Such as ``float32``."""
        return str(self.model.dtype).removeprefix("torch.")

    @property
    def exact(self) -> bool:
        """Whether equal sums give equal logits up to float32's rounding: not in half precision, nor quantised."""
        return self.model.dtype == torch.float32 and not getattr(self.model, "is_quantized", False)

    @cached_property
    def fingerprint(self) -> str:
        """Identifies the weights, whatever their file layout, and the same in bfloat16 and in float32."""
        return fingerprint(self.model)

    @cached_property
    def template_hash(self) -> str:
        return template_hash(self.tokenizer)

    @property
    def slug(self) -> str:
        """The name as a folder name."""
        return model_slug(self.name)

    @property
    def context_length(self) -> int | None:
        """Most tokens the model's positions allow, where its configuration says."""
        config = self.model.config.get_text_config()
        length = getattr(config, "max_position_embeddings", None)
        return int(length) if length else None

    def stop_ids(self, as_: As) -> frozenset[int]:
        """Token ids that end the customer's turn when it stands under header `as_`."""
        configured = self.model.generation_config.eos_token_id if self.model.generation_config else None
        return stop_token_ids(self.tokenizer, as_, configured)

    @property
    def vocabulary(self) -> int:
        """Number of token ids the model has an embedding for."""
        return int(self.model.get_input_embeddings().weight.shape[0])

    def forward(
        self,
        ids: Tensor,
        mask: Tensor | None,
        cache: Any = None,
        last_only: bool = True,
        positions: Tensor | None = None,
    ) -> Tensor:
        """Logits ``(batch, tokens or 1, vocabulary)``; `cache` is filled when given.

        ids: ``(batch, new tokens)``. mask: of a left-padded batch ``(batch, cached + new tokens)``, 1 where there is a
        token, and then positions are each row's own count of its tokens, so padding changes nothing. With `positions`
        ``(batch, new tokens)`` given, mask is None (causal, no padding) or additive ``(batch, 1, new tokens, all)``.
        """
        if positions is None:
            assert mask is not None
            positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        arguments: dict[str, Any] = {"use_cache": cache is not None}
        if cache is not None:
            arguments[self._cache_argument] = cache
        if last_only and "logits_to_keep" in self._forward_arguments:
            arguments["logits_to_keep"] = 1
        with torch.inference_mode():
            output = self.model(input_ids=ids, attention_mask=mask, position_ids=positions, **arguments)
        logits: Tensor = output.logits
        return logits[:, -1:] if last_only else logits

    @cached_property
    def _forward_arguments(self) -> frozenset[str]:
        # A PEFT wrapper's own signature says nothing: it passes keywords on to the model inside.
        model = self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model
        return frozenset(inspect.signature(model.forward).parameters)

    @cached_property
    def _cache_argument(self) -> str:
        # transformers renamed past_key_values to cache during 5.x.
        return "cache" if "cache" in self._forward_arguments else "past_key_values"


def load_model(
    name: str = embedded.DEFAULT_MODEL,
    *,
    device: str = "auto",
    dtype: str = "auto",
    quantize: str | None = None,
    device_map: str | dict[str, Any] | None = None,
    rows: int = 8,
    say: Callable[[str], None] = lambda message: None,
) -> LanguageModel:
    """Load a model by alias, folder or hub id.

    device: ``auto`` takes CUDA, then Apple's MPS, then the CPU. dtype: ``auto`` is float32 on the CPU, where results
    are repeatable in any batch (contract 3), and the checkpoint's own elsewhere; ``fastest`` measures on the CPU and
    takes bfloat16 where that pays (``cpu.faster_dtype``) for products of so many `rows`. quantize: ``8bit`` or
    ``4bit``, by bitsandbytes; a checkpoint that is quantised already loads as it is. device_map: spread the model over
    devices, as accelerate does; instead of `device`.
    Raises ModelError for a model that is not found, cannot be read, or does not verify.
    """
    if dtype not in ("auto", "fastest", *DTYPES):
        raise ModelError(f"unknown dtype {dtype!r}; known: auto, fastest, {', '.join(DTYPES)}")
    if quantize not in (None, *QUANTIZATIONS):
        raise ModelError(f"unknown quantization {quantize!r}; known: {', '.join(QUANTIZATIONS)}")
    if device_map is not None and device != "auto":
        raise ModelError(f"give either a device ({device!r}) or a device map ({device_map!r}), not both")
    target = _device(device)
    source: str | Path = name
    if name in embedded.EMBEDDED:
        source = embedded.fetch(name, say)
    elif Path(name).is_dir():
        source = Path(name)
        name = source.resolve().name
    elif Path(name).is_absolute() or name.startswith((".", "~")):
        raise ModelError(f"no model folder at {name!r}")
    say(f"loading {name}")
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        config = AutoConfig.from_pretrained(source)
        quantized = quantize is not None or getattr(config, "quantization_config", None) is not None
        options: dict[str, Any] = {"dtype": _dtype(dtype, target, config, quantized or device_map is not None, rows)}
        if quantize is not None:
            options["quantization_config"] = BitsAndBytesConfig(**{f"load_in_{quantize}": True})
            if dtype == "auto":  # what is not quantised; in float32 activations would be rounded all the same
                options["dtype"] = torch.bfloat16
        if quantized or device_map is not None:  # such a model is placed while it is loaded, and cannot be moved
            options["device_map"] = device_map or {"": str(target)}
        tokenizer = AutoTokenizer.from_pretrained(source)
        model = AutoModelForCausalLM.from_pretrained(source, **options)
        if "device_map" not in options:
            model = model.to(target)
    except Exception as error:  # whatever a damaged or foreign checkpoint makes the loaders raise
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(
            f"cannot load model {name!r}: {reason}. Give an alias ({', '.join(embedded.EMBEDDED)}), "
            "a folder with a Hugging Face checkpoint, or a hub id where a hub is reachable"
        ) from error
    finally:
        if bars:
            transformers_logging.enable_progress_bar()
    lm = prepare_model(name, model, tokenizer)
    if target.type == "cpu" and "device_map" not in options:
        head = model.get_output_embeddings()
        embedding = model.get_input_embeddings().weight
        prepare_weights([*lm.layers, *([] if head is None else [head])], embedding)
    return lm


def model_slug(source: str) -> str:
    """Folder name for a model given by alias, folder or hub id: ``org/model`` becomes ``org--model``."""
    name = Path(source).resolve().name if source not in embedded.EMBEDDED and Path(source).is_dir() else source
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name.replace("/", "--"))


def prepare_model(name: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> LanguageModel:
    """A LanguageModel from an already loaded model and tokenizer. Raises ModelError when it does not verify."""
    model.eval()
    layers, width = find_decoder_layers(model)
    lm = LanguageModel(name, model, tokenizer, tuple(layers), width)
    _verify_generation(lm)
    return lm


def find_decoder_layers(model: PreTrainedModel) -> tuple[list[nn.Module], int]:
    """The decoder blocks of a causal LM, in order, and d_model; found by structure, verified by forwards.

    Raises ModelError saying what did not hold.
    """
    expected = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    failures = []
    for path, blocks in _block_lists(model):
        if expected is not None and len(blocks) != expected:
            failures.append(f"{path} has {len(blocks)} blocks, the configuration says {expected}")
            continue
        problem, width = _verify(model, blocks)
        if problem is None:
            return blocks, width
        failures.append(f"{path}: {problem}")
    raise ModelError(
        f"{type(model).__name__} cannot be steered: "
        + ("; ".join(failures) if failures else "it has no list of decoder blocks")
    )


def fingerprint(model: PreTrainedModel) -> str:
    """SHA-256 over every parameter's name, shape and 64 evenly spaced values rounded to bfloat16 (16 hex digits).

    Rounding makes a bfloat16 checkpoint and its float32 copy the same model; sampling keeps it fast at any size.
    """
    names = {name for name, _ in model.named_parameters()}  # shared ones once
    parts: dict[str, bytes] = {}
    for prefix, module in model.named_modules():
        with align_module_device(module):  # fetches what is offloaded
            for name, parameter in module.named_parameters(prefix, recurse=False):
                if name not in names:
                    continue
                parts[name] = json.dumps([name, list(parameter.shape)]).encode() + _samples(parameter)
    digest = hashlib.sha256()
    for _, part in sorted(parts.items()):
        digest.update(part)
    return digest.hexdigest()[:16]


def _samples(parameter: Tensor) -> bytes:
    flat = parameter.detach().reshape(-1)
    step = max(1, flat.numel() // _FINGERPRINT_SAMPLES)
    values = flat[::step][:_FINGERPRINT_SAMPLES].to("cpu", torch.float32).to(torch.bfloat16)
    return values.view(torch.int16).numpy().tobytes()


def pad_left(rows: Sequence[Sequence[int]], pad_id: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Ids and attention mask, both ``(batch, longest)``, of ragged rows padded on the left."""
    longest = max(len(row) for row in rows)
    ids = torch.full((len(rows), longest), pad_id, dtype=torch.long)
    mask = torch.zeros((len(rows), longest), dtype=torch.long)
    for i, row in enumerate(rows):
        if row:
            ids[i, longest - len(row) :] = torch.tensor(list(row))
            mask[i, longest - len(row) :] = 1
    return ids.to(device), mask.to(device)


def _input_device(model: PreTrainedModel) -> torch.device:
    device = torch.device(model.device)
    if device.type != "meta":
        return device
    # What is offloaded has no device of its own; it runs on the first that is one, as accelerate does it.
    places = [place for place in getattr(model, "hf_device_map", {}).values() if place not in ("cpu", "disk")]
    return torch.device(places[0] if places else "cpu")


def _dtype(name: str, target: torch.device, config: Any, placed: bool, rows: int) -> torch.dtype | str:
    """The dtype to load in; "auto" is the checkpoint's own."""
    if name == "fastest":
        name = "auto"
        if target.type == "cpu" and not placed:
            return faster_dtype(config.get_text_config().hidden_size, rows)
    return DTYPES.get(name, torch.float32 if target.type == "cpu" and not placed else "auto")


def _device(name: str) -> torch.device:
    if name != "auto":
        try:
            device = torch.device(name)
            torch.empty(1, device=device)
        except (RuntimeError, AssertionError) as error:
            raise ModelError(f"device {name!r} is not usable here: {str(error).splitlines()[0]}") from error
        return device
    if torch.cuda.is_available():
        return torch.device("cuda")
    if torch.backends.mps.is_available():
        return torch.device("mps")
    return torch.device("cpu")


def _block_lists(model: nn.Module) -> Iterator[tuple[str, list[nn.Module]]]:
    """Lists of modules of one class, longest first, outermost first."""
    lists = [
        (path, list(module))
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) and len({type(block) for block in module}) == 1
    ]
    yield from sorted(lists, key=lambda item: (-len(item[1]), item[0].count(".")))


def _verify_generation(lm: LanguageModel) -> None:
    """Check the two things that generation in ragged batches rests on: a cached step gives what a full forward gives,
    and a row padded on the left what the row alone gives. Recurrent models, among others, do not. Raises ModelError."""
    long, short = ([(seed + 7 * i) % lm.vocabulary for i in range(length)] for seed, length in ((3, 8), (5, 3)))
    tolerance = 1e-3 if lm.exact else 0.1
    try:
        alone_long, alone_short = (lm.forward(*pad_left([row], 0, lm.device))[0, -1].float() for row in (long, short))
        ids, mask = pad_left([long, short], 0, lm.device)
        cache = DynamicCache(config=lm.model.config)
        lm.forward(ids[:, :-1], mask[:, :-1], cache)
        batch = lm.forward(ids[:, -1:], mask, cache)[:, -1].float()
    except (TypeError, ValueError, RuntimeError, AttributeError, NotImplementedError) as error:
        raise ModelError(f"{type(lm.model).__name__} cannot generate from a clean past: {error}") from error
    for what, got, expected in (("cached", batch[0], alone_long), ("padded", batch[1], alone_short)):
        distance = float((got - expected).norm() / expected.norm())
        if not distance < tolerance:
            raise ModelError(
                f"{type(lm.model).__name__} cannot be served: a {what} row's logits differ by {distance:.1%} from the "
                "same row's by one forward (recurrent state or absolute positions, perhaps)"
            )


def _verify(model: PreTrainedModel, blocks: list[nn.Module]) -> tuple[str | None, int]:
    """What is wrong with taking `blocks` for the decoder layers (None: nothing), and d_model."""
    order: list[int] = []
    inputs: dict[int, Tensor] = {}
    outputs: dict[int, Tensor] = {}

    def hook_for(index: int) -> Callable[..., None]:
        def hook(module: nn.Module, arguments: Any, keywords: Any, output: Any) -> None:
            order.append(index)
            inputs[index] = (arguments[0] if arguments else keywords["hidden_states"]).detach()
            outputs[index] = hidden_of(output).detach()

        return hook

    ids = torch.arange(4, device=_input_device(model))[None] % int(model.get_input_embeddings().weight.shape[0])
    handles = [block.register_forward_hook(hook_for(i), with_kwargs=True) for i, block in enumerate(blocks)]
    try:
        with torch.inference_mode():
            logits = model(input_ids=ids, use_cache=False).logits
    except (TypeError, KeyError, AttributeError) as error:
        return f"a block does not map hidden states to hidden states ({error})", 0
    finally:
        for handle in handles:
            handle.remove()
    if order != list(range(len(blocks))):
        return f"its blocks ran in the order {order}", 0
    width = outputs[0].shape[-1]
    for index in range(1, len(blocks)):
        if inputs[index].shape != outputs[index - 1].shape or not torch.equal(inputs[index], outputs[index - 1]):
            return f"the output of block {index - 1} is not the input of block {index}", width
    for index in {0, len(blocks) // 2, len(blocks) - 1}:
        # A direction with no mean and the size of the state itself: layer norms cannot remove it.
        push = torch.linspace(-1, 1, width, device=outputs[index].device) * outputs[index].float().norm(dim=-1).mean()
        with torch.inference_mode(), steer(blocks, {index: push}):
            if torch.equal(model(input_ids=ids, use_cache=False).logits, logits):
                return f"adding to the output of block {index} does not change the logits", width
    return None, width
