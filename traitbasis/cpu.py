"""Getting the most out of a CPU: threads, the layout of weights, and which dtype is faster here."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import cast

import torch
from torch import Tensor, nn

# bfloat16 must be faster than float32 by this much to be worth its rounding.
_WORTH_IT = 1.3
# Products with more rows than this gain nothing from packed weights.
_MOST_ROWS = 64
_MEMORY_SHARE = 0.25
_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def set_threads(threads: int | None = None) -> int:
    """Set the threads of torch's operators; by default one for each CPU this process may use. Returns their number.

    Torch counts the machine's cores even where affinity or a container's quota allows fewer, and threads that take
    turns on a core make every operator wait for the slowest. OMP_NUM_THREADS, where set, is left alone.
    """
    if threads is None:
        if os.environ.get("OMP_NUM_THREADS"):
            return torch.get_num_threads()
        threads = min(torch.get_num_threads(), usable_cpus())
    torch.set_num_threads(threads)
    return threads


def usable_cpus(quota: Path = _QUOTA) -> int:
    """CPUs this process may use, by its affinity and its control group's quota."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        allowed, period = quota.read_text().split()
        count = min(count, max(1, int(allowed) // int(period)))
    except (OSError, ValueError):  # no such file, or "max"
        pass
    return count


def prepare_weights(modules: Iterable[nn.Module], embedding: Tensor | None = None) -> int:
    """Store the weights of linear layers on the CPU the way few-row products want them; returns how many are packed.

    A decode step multiplies one row a running request, and torch's operators re-order the weights at every such call.
    float32 weights are stored column by column, in place: the same numbers, shape and state dict, in an order that one
    row reads straight through. Beside that each layer keeps a copy packed for 2 to 64 rows (bfloat16: 1 to 64), by
    operators of oneDNN and MKL that torch.compile uses, too; where they are missing or wrong, or the copies would take
    more than a quarter of the free memory, there are none. What it gains: docs/performance.md.
    embedding: a weight that is looked up by rows, too, and therefore stays in place.
    """
    linears = [
        linear
        for module in modules
        for linear in module.modules()
        # A quantised or adapted linear layer is another class, and laid out its own way.
        if type(linear) is nn.Linear and linear.weight.device.type == "cpu" and linear.weight.dtype in _PACKERS
    ]
    size = sum(linear.weight.nbytes for linear in linears)
    packing = size <= free_memory() * _MEMORY_SHARE and all(_packs_right(linear.weight) for linear in linears[:1])
    for linear in linears:
        if linear.weight.dtype == torch.float32 and linear.weight is not embedding:
            linear.weight.data = column_major(linear.weight.data)
        if packing:
            linear.__class__ = PackedLinear
            cast(PackedLinear, linear).pack()
    return len(linears) if packing else 0


class PackedLinear(nn.Linear):
    """A linear layer with a copy of its weight for products with few rows, used within ``packed_products`` only."""

    _packed: _Packed | None = None

    def pack(self) -> None:
        self._packed = _Packed(self.weight)

    def forward(self, input: Tensor) -> Tensor:
        packed = self._packed
        if packed is not None and getattr(_thread, "packed", False) and packed.suits(self.weight, input):
            return packed(self.weight, self.bias, input)
        return nn.functional.linear(input, self.weight, self.bias)


_thread = threading.local()


@contextmanager
def packed_products() -> Iterator[None]:
    """In this thread, use packed weights. Everybody else's forwards read the weights themselves: whoever trains, merges
    or edits a model sees what they did at once. An engine calls ``repack`` before it begins."""
    _thread.packed = True
    try:
        yield
    finally:
        _thread.packed = False


def repack(model: nn.Module) -> int:
    """Pack weights again that have changed since they were packed; returns how many.

    A change is noticed by one row and one column of each weight: reading all of them at every start would cost a step.
    """
    changed = 0
    for module in model.modules():
        if not isinstance(module, PackedLinear):
            continue
        weight = module.weight
        if weight.device.type != "cpu" or weight.dtype not in _PACKERS:  # moved, or cast, since
            changed += module._packed is not None
            module._packed = None
        elif module._packed is None or module._packed.stale(weight):
            module.pack()
            changed += 1
    return changed


class _Packed:
    """A packed weight. Copies and pickles of it are left out: their layer is packed again when an engine starts."""

    def __init__(self, weight: Tensor) -> None:
        weight = weight.detach()
        self._states = _PACKERS[weight.dtype](weight)
        self._dtype = weight.dtype
        self._sample = _cross(weight).clone()

    def stale(self, weight: Tensor) -> bool:
        return weight.dtype != self._dtype or not torch.equal(_cross(weight.detach()), self._sample)

    def suits(self, weight: Tensor, input: Tensor) -> bool:
        """Whether the input is of the right kind and has few rows."""
        # A single float32 row reads the column-major weight itself as fast as anything can.
        fewest = 2 if weight.dtype == torch.float32 else 1
        rows = input.numel() // input.shape[-1]
        return fewest <= rows <= _MOST_ROWS and input.dtype == weight.dtype == self._dtype

    def __call__(self, weight: Tensor, bias: Tensor | None, input: Tensor) -> Tensor:
        if weight.dtype == torch.float32:
            flat = input.reshape(-1, input.shape[-1])
            product: Tensor = torch.ops.mkl._mkl_linear(flat, self._states, weight, bias, len(flat))
            return product.view(*input.shape[:-1], -1)
        product = torch.ops.mkldnn._linear_pointwise(input, self._states, bias, "none", [], "")
        return product

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


def _cross(weight: Tensor) -> Tensor:
    """The middle row and column."""
    rows, columns = weight.shape
    return torch.cat([weight[rows // 2], weight[:, columns // 2]])


_PACKERS: dict[torch.dtype, Callable[[Tensor], Tensor]] = {
    torch.float32: lambda weight: torch.ops.mkl._mkl_reorder_linear_weight(weight.contiguous(), 32),
    torch.bfloat16: lambda weight: torch.ops.mkldnn._reorder_linear_weight(weight, 32),
}


def _packs_right(weight: Tensor) -> bool:
    """Try the private operators: they may be missing, or mean something else by now."""
    try:
        with torch.inference_mode():
            x = torch.randn(3, weight.shape[1]).to(weight.dtype)
            found, expected = _Packed(weight)(weight, None, x).float(), nn.functional.linear(x, weight).float()
        return bool((found - expected).norm() <= 0.01 * expected.norm())
    except (RuntimeError, AttributeError, TypeError):
        return False


def free_memory() -> float:
    """Bytes of memory that can be had without swapping, where the system says; else infinite."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return 1024.0 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration, ValueError):
        return float("inf")


def column_major(weight: Tensor) -> Tensor:
    """`weight` with its columns contiguous in memory."""
    return weight.t().contiguous().t()


def faster_dtype(width: int, rows: int = 8, repeats: int = 5) -> torch.dtype:
    """bfloat16 where products of a `width`-sized model are at least 1.3 times as fast in it here, else float32.

    Measured on matrices that together exceed the caches, in turns, by medians; takes less than a second.
    """
    count = min(256, max(1, 2**26 // (width * width)))  # a tiny model fits a cache whatever is done
    times: dict[torch.dtype, list[float]] = {torch.float32: [], torch.bfloat16: []}
    with torch.inference_mode():
        weights = {torch.float32: [column_major(torch.ones(width, width)) for _ in range(count)]}
        weights[torch.bfloat16] = [torch.ones(width, width, dtype=torch.bfloat16) for _ in range(count)]
        for _ in range(repeats):
            for dtype, taken in times.items():
                x = torch.randn(rows, width).to(dtype)
                start = perf_counter()
                for weight in weights[dtype]:
                    nn.functional.linear(x, weight)
                taken.append(perf_counter() - start)
    ratio = median(times[torch.float32]) / median(times[torch.bfloat16])
    return torch.bfloat16 if ratio >= _WORTH_IT else torch.float32
