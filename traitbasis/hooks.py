"""Record hidden states of decoder layers, and add to them. Context managers, nothing left behind (contract 6).

Both act only on forwards of the thread that entered the context: other threads may use the same model meanwhile, with
steering of their own or none.

Layer *z* is the output of decoder block z, 0-based (contract 1). Forward hooks only: modules are never wrapped, and
only our own handles are removed, so other people's hooks stay. Blocks return a bare tensor, a tuple, a list or a
``ModelOutput`` depending on model and transformers version; all are read and rebuilt alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from threading import get_ident
from typing import Any

from torch import Tensor, nn


@contextmanager
def record(
    layers: Sequence[nn.Module],
    indices: Sequence[int] | None = None,
    keep: Callable[[Tensor], Any] = Tensor.detach,
) -> Iterator[dict[int, Any]]:
    """Collect the output of decoder blocks during the forwards run inside the context.

    Yields a dict that after a forward holds, per layer index, ``keep(hidden)`` of that forward's output, hidden being
    ``(batch, tokens, d_model)``. `keep` reduces on the spot, so that all layers of a large batch need not be held.

        with record(lm.layers) as states:
            lm.model(input_ids)
        states[15].shape  # (batch, tokens, d_model)

    Steering that is active is included, whichever of the two contexts was entered first.
    Raises IndexError for a layer the model does not have.
    """
    states: dict[int, Any] = {}
    thread = get_ident()

    def hook_for(index: int) -> Callable[..., None]:
        def hook(module: nn.Module, arguments: Any, output: Any) -> None:
            if get_ident() == thread:
                states[index] = keep(hidden_of(output))

        return hook

    indices = range(len(layers)) if indices is None else indices
    with ExitStack() as stack:
        for index in indices:
            handle = _layer(layers, index).register_forward_hook(hook_for(index))
            stack.callback(handle.remove)
        yield states


@contextmanager
def steer(layers: Sequence[nn.Module], additions: Mapping[int, Tensor]) -> Iterator[None]:
    """Add `additions` to the outputs of decoder blocks during the forwards run inside the context.

    ``h[b, t] <- h[b, t] + additions[z][b]`` at every layer z of the mapping, every row b, every position t of the
    forward. `additions[z]` is ``(batch, d_model)``, or ``(d_model,)`` for all rows alike: the float32 sum of all
    traits at that layer, cast once to the dtype and device of `h` (contract 5: in bfloat16, 300 + 0.9 is 300).

    Layers that are not in the mapping get no hook. Contexts nest, and additions then add up.
    Raises IndexError for a layer the model does not have, ValueError when the rows do not fit the batch.
    """
    thread = get_ident()

    def hook_for(addition: Tensor) -> Callable[..., Any]:
        def hook(module: nn.Module, arguments: Any, output: Any) -> Any:
            if get_ident() != thread:
                return None
            hidden = hidden_of(output)
            if addition.dim() == 2 and addition.shape[0] != hidden.shape[0]:
                raise ValueError(f"additions have {addition.shape[0]} rows, the batch has {hidden.shape[0]}")
            delta = addition.to(device=hidden.device, dtype=hidden.dtype)
            return with_hidden(output, hidden + (delta[:, None, :] if delta.dim() == 2 else delta))

        return hook

    with ExitStack() as stack:
        for index, addition in additions.items():
            # First in line, so that recorders (ours, and transformers' own for output_hidden_states) see the sum.
            handle = _layer(layers, index).register_forward_hook(hook_for(addition), prepend=True)
            stack.callback(handle.remove)
        yield


def hidden_of(output: Any) -> Tensor:
    """The hidden states ``(batch, tokens, d_model)`` in whatever a decoder block returned."""
    hidden = output if isinstance(output, Tensor) else output[0]
    if not isinstance(hidden, Tensor) or hidden.dim() != 3:
        raise TypeError(f"expected a decoder block to return (batch, tokens, d_model) states first, got {type(hidden)}")
    return hidden


def with_hidden(output: Any, hidden: Tensor) -> Any:
    """`output` with its hidden states replaced, in the same kind of container."""
    if isinstance(output, Tensor):
        return hidden
    if isinstance(output, list):
        return [hidden, *output[1:]]
    if isinstance(output, tuple):
        rest = (hidden, *output[1:])
        return type(output)(*rest) if hasattr(output, "_fields") else rest
    first = next(iter(output))  # a ModelOutput: an ordered mapping that indexes like a tuple
    return type(output)(**{**output, first: hidden})


def _layer(layers: Sequence[nn.Module], index: int) -> nn.Module:
    if not 0 <= index < len(layers):
        raise IndexError(f"layer {index} does not exist; this model's decoder layers are 0 to {len(layers) - 1}")
    return layers[index]
