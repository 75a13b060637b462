"""Getting the most out of a CPU: threads, the layout of weights, and which dtype is faster here."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
from torch import Tensor, nn

# bfloat16 must be faster than float32 by this much to be worth its rounding.
_WORTH_IT = 1.3
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


def lay_out_weights(modules: Iterable[nn.Module]) -> int:
    """Store the float32 weights of linear layers column by column, in place; returns how many.

    The same numbers, shape and state dict, another memory order: a product with few rows runs 1.1 to 1.4 times as fast
    (docs/performance.md), and torch re-orders nothing at each call. bfloat16 gains nothing by it and is left alone.
    """
    changed = 0
    for module in modules:
        for linear in module.modules():
            if (
                type(linear) is nn.Linear
                and linear.weight.dtype == torch.float32
                and linear.weight.device.type == "cpu"
            ):
                linear.weight.data = column_major(linear.weight.data)
                changed += 1
    return changed


def column_major(weight: Tensor) -> Tensor:
    """`weight` with its columns contiguous in memory."""
    return weight.t().contiguous().t()


def faster_dtype(width: int, rows: int = 8, repeats: int = 5) -> torch.dtype:
    """bfloat16 where products of a `width`-sized model are at least 1.3 times as fast in it here, else float32.

    Measured on matrices that together exceed the caches, in turns, by medians; takes less than a second.
    """
    count = max(1, 2**26 // (width * width))
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
