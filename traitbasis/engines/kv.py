"""Keys and values: the slots that running requests write to, and the prefix cache of clean blocks.

Slots are left-aligned: token t of a row stands in column t, whoever else runs. So joining and leaving move nobody's
columns, padding is only ever behind a row's own tokens, and a row's place in the batch means nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

# Columns are used in multiples of this, so that kernels see few different shapes.
_STRIDE = 64
BLOCK_TOKENS = 32


class Slots:
    """Preallocated keys and values, one slot a running request, behind transformers' cache interface.

    Per layer ``(slots, columns, heads, head_dim)``: a token's keys lie together, so that writing one and copying a
    prefix touch contiguous memory. Both sizes grow when asked for; what they hold is kept.
    """

    def __init__(self, n_layers: int) -> None:
        self._layers = [_SlotLayer(self) for _ in range(n_layers)]
        self.cache = Cache(layers=self._layers)
        self._rows = self._columns = 0
        self._slot = self._start = 0  # where a prefill writes
        self._places: Tensor | None = None  # where a decode step writes, flat over slots and columns; None in a prefill
        self._width = 0  # columns that a decode step reads

    @property
    def bytes(self) -> int:
        return sum(store.nbytes for store in self._stores())

    def reserve(self, rows: int, columns: int) -> None:
        """Make room for so many slots of so many tokens."""
        if rows <= self._rows and columns <= self._columns:
            return
        rows = max(self._rows, 1 << (rows - 1).bit_length())
        if columns > self._columns:
            columns = _up(max(columns, self._columns * 3 // 2))
        columns = max(columns, self._columns)
        grown = [_grown(store, rows, columns) for store in self._stores()]  # all, before any is let go
        for layer, keys, values in zip(self._filled(), grown[::2], grown[1::2], strict=True):
            layer.keys, layer.values = keys, values
        self._rows, self._columns = rows, columns

    def release(self) -> None:
        """Give all memory back; what the slots held is lost."""
        for layer in self._layers:
            layer.keys, layer.values = None, None  # type: ignore[assignment]
        self._rows = self._columns = 0

    def prefill(self, slot: int, start: int) -> None:
        """The next forward is one row that writes to `slot` from column `start` on."""
        self._slot, self._start, self._places = slot, start, None

    def decode(self, lengths: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """The next forward is one token for each of the first slots, at column ``lengths[slot]``.

        Returns the additive attention mask ``(rows, 1, 1, columns)`` of that forward.
        """
        self._width = min(_up(max(lengths) + 1), self._columns)
        own = torch.tensor(lengths)
        self._places = (torch.arange(len(lengths)) * self._columns + own).to(device)
        hidden = torch.arange(self._width)[None] > own[:, None]
        mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, torch.finfo(dtype).min)
        return mask[:, None, None].to(device)

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` tokens of a slot to another."""
        for store in self._stores():
            store[target, :length] = store[source, :length]

    def clear(self, slot: int) -> None:
        """Zero a slot. Masked columns count nothing, but not-a-number times nothing is not-a-number."""
        for store in self._stores():
            if slot < len(store):
                store[slot].zero_()

    def read(self, slot: int, start: int, stop: int) -> list[Tensor]:
        """Copies of a slot's keys and values ``(tokens, heads, head_dim)``, layer by layer."""
        return [store[slot, start:stop].clone() for store in self._stores()]

    def write(self, slot: int, blocks: Sequence[Sequence[Tensor]]) -> None:
        """Fill a slot from column 0 on with what ``read`` returned."""
        if not self._filled():  # they were given back since; the blocks say what they looked like
            used = [layer for layer in self._layers if layer.is_initialized]
            for layer, keys, values in zip(used, blocks[0][::2], blocks[0][1::2], strict=True):
                layer.keys = keys.new_zeros(self._rows, self._columns, *keys.shape[1:])
                layer.values = values.new_zeros(self._rows, self._columns, *values.shape[1:])
        for number, store in enumerate(self._stores()):
            parts = [block[number] for block in blocks]
            torch.cat(parts, out=store[slot, : sum(len(part) for part in parts)])

    def put(self, store: Tensor, states: Tensor) -> Tensor:
        """Write new keys or values ``(rows, heads, tokens, head_dim)``; returns all that the forward attends to."""
        if self._places is None:
            stop = self._start + states.shape[2]
            store[self._slot, self._start : stop] = states[0].transpose(0, 1)
            return store[self._slot : self._slot + 1, :stop].transpose(1, 2)
        flat = store.view(-1, *store.shape[2:])
        flat.index_copy_(0, self._places.to(store.device), states[:, :, 0])
        return store[: len(states), : self._width].transpose(1, 2)

    def empty(self, states: Tensor) -> Tensor:
        """A store for states ``(rows, heads, tokens, head_dim)`` like these."""
        return states.new_zeros(self._rows, self._columns, states.shape[1], states.shape[3])

    @property
    def past(self) -> int:
        """Columns in front of the tokens of the next forward, as transformers' own masks need to know."""
        return self._start if self._places is None else self._width - 1

    def _filled(self) -> list[_SlotLayer]:
        return [layer for layer in self._layers if layer.keys is not None]

    def _stores(self) -> list[Tensor]:
        return [store for layer in self._filled() for store in (layer.keys, layer.values) if store is not None]


class _SlotLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer of the slots, as transformers' attention sees it."""

    is_sliding = False

    def __init__(self, slots: Slots) -> None:
        super().__init__()
        self._slots = slots

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor | None = None) -> None:
        values = key_states if value_states is None else value_states
        self.keys, self.values = self._slots.empty(key_states), self._slots.empty(values)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if self.keys is None:
            self.lazy_initialization(key_states, value_states)
        return self._slots.put(self.keys, key_states), self._slots.put(self.values, value_states)

    def get_seq_length(self) -> int:
        return self._slots.past

    def get_mask_sizes(self, query: Any) -> tuple[int, int]:
        # The number of new tokens; in early 5.x their positions.
        return self._slots.past + (query if isinstance(query, int) else len(query)), 0

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length  # its name in early 5.x


_Key = tuple[int, tuple[int, ...]]  # number of the block before (0: none), tokens


@dataclass(eq=False)
class _Block:
    number: int
    states: list[Tensor]
    bytes: int


class PrefixCache:
    """Clean keys and values of prompts, in blocks of tokens, least recently used out first.

    A block is found by its tokens and the block before it, so a match is a match of the whole prefix. Only what was
    prefilled unsteered is ever put in; therefore it serves every trait alike (contract 4).
    limit: bytes of tensors; 0 turns the cache off.
    """

    def __init__(self, limit: int, block_tokens: int = BLOCK_TOKENS) -> None:
        self.limit = limit
        self.bytes = self.evictions = 0
        self._size = block_tokens
        self._blocks: OrderedDict[_Key, _Block] = OrderedDict()
        self._made = 0

    def match(self, ids: Sequence[int]) -> list[list[Tensor]]:
        """The longest known prefix of `ids`, as blocks of states for ``Slots.write``."""
        found: dict[_Key, _Block] = {}
        parent = 0
        for chunk in self._chunks(ids):
            block = self._blocks.get((parent, chunk))
            if block is None:
                break
            found[parent, chunk] = block
            parent = block.number
        self._touch(found)
        return [block.states for block in found.values()]

    def insert(self, ids: Sequence[int], read: Callable[[int, int], list[Tensor]]) -> None:
        """Add the blocks of `ids` that are not there yet; ``read(start, stop)`` gives their states."""
        chain: dict[_Key, None] = {}  # in order
        parent = 0
        for number, chunk in enumerate(self._chunks(ids)):
            key = parent, chunk
            if key not in self._blocks:
                states = read(number * self._size, (number + 1) * self._size)
                size = sum(tensor.nbytes for tensor in states)
                if not self._make_room(size, keep=chain):
                    break
                self._made += 1
                self._blocks[key] = _Block(self._made, states, size)
                self.bytes += size
            chain[key] = None
            parent = self._blocks[key].number
        self._touch(chain)

    def clear(self) -> None:
        self._blocks.clear()
        self.bytes = 0

    def _chunks(self, ids: Sequence[int]) -> Iterator[tuple[int, ...]]:
        if self.limit:
            for start in range(0, len(ids) - self._size + 1, self._size):
                yield tuple(ids[start : start + self._size])

    def _touch(self, chain: Mapping[_Key, object]) -> None:
        for key in reversed(list(chain)):  # the first block last, since the others are of no use without it
            self._blocks.move_to_end(key)

    def _make_room(self, size: int, keep: Mapping[_Key, object]) -> bool:
        self._touch(keep)
        while self.bytes + size > self.limit:
            if len(self._blocks) <= len(keep):
                return False
            _, block = self._blocks.popitem(last=False)
            self.bytes -= block.bytes
            self.evictions += 1
        return True


def _up(columns: int) -> int:
    return -(-columns // _STRIDE) * _STRIDE


def _grown(store: Tensor, rows: int, columns: int) -> Tensor:
    grown = store.new_zeros(rows, columns, *store.shape[2:])
    grown[: store.shape[0], : store.shape[1]] = store
    return grown
