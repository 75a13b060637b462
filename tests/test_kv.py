"""Slots and prefix cache without a model: against lists, dictionaries and numpy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from reference import prompt_of
from tiny import tiny_model
from torch import Tensor
from transformers import DynamicCache

from traitbasis.engines.kv import BLOCK_TOKENS, PrefixCache, Slots

LAYERS, HEADS, DIM = 2, 2, 3
F32 = torch.float32
CPU = torch.device("cpu")


def states_of(tokens: Sequence[float], layer: int, what: int) -> Tensor:
    """Keys (what 0) or values (1) ``(tokens, heads, head_dim)`` that are different everywhere."""
    cells = np.arange(HEADS * DIM).reshape(HEADS, DIM) / 16 + layer / 4 + what / 8
    return torch.tensor(np.asarray(tokens)[:, None, None] + cells, dtype=F32)


def forward(slots: Slots, rows: Sequence[Sequence[float]]) -> list[tuple[Tensor, Tensor]]:
    """What the attention of each layer gets to read when the rows' new tokens go in, as ``(rows, heads, ...)``."""
    new = [
        [torch.stack([states_of(row, layer, what) for row in rows]).transpose(1, 2) for what in (0, 1)]
        for layer in range(LAYERS)
    ]
    return [layer.update(*states) for layer, states in zip(slots.cache.layers, new, strict=True)]


def assert_slot_holds(slots: Slots, slot: int, tokens: Sequence[float]) -> None:
    stored = slots.read(slot, 0, len(tokens))
    for number, states in enumerate(stored):
        assert torch.equal(states, states_of(tokens, number // 2, number % 2))


# --- slots ---


@pytest.mark.parametrize("seed", range(6))
def test_slots_hold_and_show_what_lists_of_tokens_would(seed: int) -> None:
    """Contract 3: 150 random joins, prefix copies, steps, moves and clears; each row reads its own tokens only."""
    rng = np.random.default_rng(seed)
    slots, rows = Slots(LAYERS), list[list[float]]()
    fresh = iter(range(1, 10**6))  # every token is another number
    done = dict.fromkeys(("join", "step", "leave", "copy"), 0)
    for _ in range(150):
        action = rng.choice(["join", "step", "step", "leave"])
        if action == "join" and len(rows) < 7:
            row, known = [float(next(fresh)) for _ in range(rng.integers(1, 100))], 0
            slots.reserve(len(rows) + 1, len(row))
            if rows and rng.random() < 0.5:  # begins like another row
                source = int(rng.integers(len(rows)))
                known = int(rng.integers(1, len(rows[source]) + 1))
                row = rows[source][:known] + row
                half = known // 2
                slots.reserve(len(rows) + 1, len(row))
                slots.write(len(rows), [slots.read(source, 0, half), slots.read(source, half, known)])
                done["copy"] += 1
            slots.prefill(len(rows), known)
            for layer, read in enumerate(forward(slots, [row[known:]])):
                for what in (0, 1):
                    assert torch.equal(read[what][0].transpose(0, 1), states_of(row, layer, what))
            rows.append(row)
        elif action == "step" and rows:
            lengths = [len(row) for row in rows]
            slots.reserve(len(rows), max(lengths) + 1)
            mask = slots.decode(lengths, F32, CPU)
            for row in rows:
                row.append(float(next(fresh)))
            for layer, read in enumerate(forward(slots, [row[-1:] for row in rows])):
                for what in (0, 1):
                    assert read[what].shape == (len(rows), HEADS, mask.shape[-1], DIM)
                    for i, row in enumerate(rows):
                        seen = read[what][i].transpose(0, 1)[mask[i, 0, 0] == 0]
                        assert torch.equal(seen, states_of(row, layer, what))
        elif action == "leave" and rows:
            place, last = int(rng.integers(len(rows))), rows.pop()
            if place < len(rows):
                slots.move(len(rows), place, len(last))
                rows[place] = last
            if rng.random() < 0.5:  # else the next owner comes upon what was left there
                slots.clear(len(rows))
                assert not any(stored.any() for stored in slots.read(len(rows), 0, 10**6))
        else:
            continue
        done[action] += 1
        for i, row in enumerate(rows):
            assert_slot_holds(slots, i, row)
    assert min(done.values()) > 5, done


@pytest.mark.parametrize("lengths", [[1], [5, 63, 64], [64, 1, 130, 7], [63]])
def test_a_step_masks_everything_behind_a_rows_own_tokens(lengths: list[int]) -> None:
    """Contract 3: the new token at column ``length`` is the last that counts."""
    slots = Slots(LAYERS)
    slots.reserve(len(lengths), max(lengths) + 1)
    for dtype in (torch.float32, torch.bfloat16):
        mask = slots.decode(lengths, dtype, CPU)
        assert mask.dtype == dtype
        assert mask.shape[:3] == (len(lengths), 1, 1)
        assert mask.shape[-1] > max(lengths)
        for row, length in zip(mask[:, 0, 0], lengths, strict=True):
            assert (row[: length + 1] == 0).all()
            assert (row[length + 1 :] == torch.finfo(dtype).min).all()


def test_room_grows_and_what_is_there_stays() -> None:
    """Rows and columns, together and one by one; smaller wishes change nothing."""
    slots = Slots(LAYERS)
    slots.reserve(1, 3)
    slots.prefill(0, 0)
    forward(slots, [[1.0, 2.0, 3.0]])
    sizes = [slots.bytes]
    for rows, columns in ((2, 3), (2, 500), (9, 501), (20, 3000), (1, 1), (20, 3000)):
        slots.reserve(rows, columns)
        assert_slot_holds(slots, 0, [1.0, 2.0, 3.0])
        assert slots.bytes >= rows * columns * LAYERS * 2 * HEADS * DIM * 4
        sizes.append(slots.bytes)
        slots.prefill(rows - 1, 0)
        if rows > 1:
            forward(slots, [[7.0] * columns])
            assert_slot_holds(slots, rows - 1, [7.0] * columns)
    assert sizes == sorted(sizes)
    assert sizes[-1] == sizes[-2] == sizes[-3]


def test_clearing_a_slot_removes_what_is_not_a_number_and_touches_no_other() -> None:
    """Contract 6. A slot that does not exist yet is clear already."""
    slots = Slots(LAYERS)
    slots.reserve(2, 10)
    for slot, token in ((0, 5.0), (1, float("nan"))):
        slots.prefill(slot, 0)
        forward(slots, [[token] * 10])
    slots.clear(1)
    slots.clear(17)
    assert not any(stored.any() for stored in slots.read(1, 0, 10))  # nan is true
    assert_slot_holds(slots, 0, [5.0] * 10)


def test_what_was_read_is_a_copy() -> None:
    """Contract 4: cached blocks do not change when the slot's next owner writes."""
    slots = Slots(LAYERS)
    slots.reserve(1, 4)
    slots.prefill(0, 0)
    forward(slots, [[1.0, 2.0, 3.0, 4.0]])
    kept = slots.read(0, 1, 3)
    slots.prefill(0, 0)
    forward(slots, [[9.0, 9.0, 9.0, 9.0]])
    for number, states in enumerate(kept):
        assert torch.equal(states, states_of([2.0, 3.0], number // 2, number % 2))


def test_a_prefill_tells_transformers_the_sizes_its_own_cache_would() -> None:
    """The masks of a prefill in two pieces are made from these."""
    slots, own = Slots(LAYERS), DynamicCache()
    slots.reserve(3, 40)
    for start, count in ((0, 11), (11, 1), (12, 20)):
        slots.prefill(2, start)
        keys = states_of([0.0] * count, 0, 0)[None].transpose(1, 2)
        assert slots.cache.get_seq_length() == start
        assert slots.cache.get_mask_sizes(count, 0)[0] == start + count
        if start:
            assert slots.cache.get_seq_length() == own.get_seq_length()
            assert tuple(slots.cache.get_mask_sizes(count, 0)) == tuple(own.get_mask_sizes(count, 0))
        own.update(keys, keys, 0)
        forward(slots, [[0.0] * count])


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_a_model_leaves_the_keys_and_values_it_leaves_in_transformers_own_cache(architecture: str) -> None:
    """Also in two pieces, and in another slot than the first."""
    lm, ids = tiny_model(architecture), prompt_of(90)
    own = DynamicCache(config=lm.model.config)
    with torch.inference_mode():
        lm.forward(torch.tensor([ids]), None, own, positions=torch.arange(90)[None])
        slots = Slots(len(own.layers))
        slots.reserve(3, 90)
        for start, stop in ((0, 64), (64, 90)):
            slots.prefill(2, start)
            positions = torch.arange(start, stop)[None]
            lm.forward(torch.tensor([ids[start:stop]]), None, slots.cache, positions=positions)
    expected = [states[0].transpose(0, 1) for layer in own.layers for states in (layer.keys, layer.values)]
    for stored, states in zip(slots.read(2, 0, 90), expected, strict=True):
        torch.testing.assert_close(stored, states, rtol=1e-5, atol=1e-4)


# --- prefix cache ---

SIZE = 4  # tokens a block
BYTES = 24  # of a block's states below


class Reads:
    """``read`` for one sequence: states that say which tokens they are of, and a note of what was asked for."""

    def __init__(self, ids: Sequence[int]) -> None:
        self.ids = ids
        self.asked: list[tuple[int, int]] = []

    def __call__(self, start: int, stop: int) -> list[Tensor]:
        self.asked.append((start, stop))
        return states_for(self.ids[:stop])


def states_for(prefix: Sequence[int]) -> list[Tensor]:
    """24 bytes that belong to a prefix's last block and its whole past."""
    mark = torch.tensor([float(hash(tuple(prefix)) % 10**6), *prefix[-SIZE:]], dtype=F32)
    return [mark[:2], mark[1:]]


def put(cache: PrefixCache, ids: Sequence[int]) -> list[tuple[int, int]]:
    reads = Reads(ids)
    cache.insert(ids, reads)
    return reads.asked


def found(cache: PrefixCache, ids: Sequence[int]) -> int:
    """Number of blocks a match finds, each one checked to be that prefix's own."""
    blocks = cache.match(ids)
    for number, states in enumerate(blocks, 1):
        for got, expected in zip(states, states_for(ids[: number * SIZE]), strict=True):
            assert torch.equal(got, expected)
    return len(blocks)


class RecentPrefixes:
    """The reference: whole prefixes in a dictionary, with the time they were used; a longer one counts as older."""

    def __init__(self, limit: int) -> None:
        self.limit, self.evictions, self.clock = limit, 0, 0
        self.used: dict[tuple[int, ...], tuple[int, int]] = {}

    def prefixes(self, ids: Sequence[int]) -> list[tuple[int, ...]]:
        return [tuple(ids[:stop]) for stop in range(SIZE, len(ids) + 1, SIZE)]

    def use(self, prefixes: Sequence[tuple[int, ...]]) -> None:
        self.clock += 1
        self.used.update({prefix: (self.clock, -len(prefix)) for prefix in prefixes})

    def match(self, ids: Sequence[int]) -> int:
        known = []
        for prefix in self.prefixes(ids):
            if prefix not in self.used:
                break
            known.append(prefix)
        self.use(known)
        return len(known)

    def insert(self, ids: Sequence[int]) -> None:
        chain: list[tuple[int, ...]] = []
        for prefix in self.prefixes(ids):
            while prefix not in self.used and (len(self.used) + 1) * BYTES > self.limit:
                others = self.used.keys() - set(chain)
                if not others:
                    self.use(chain)
                    return
                del self.used[min(others, key=lambda other: self.used[other])]
                self.evictions += 1
            self.used.setdefault(prefix, (self.clock, -len(prefix)))
            chain.append(prefix)
        self.use(chain)


@pytest.mark.parametrize("blocks", [1, 2, 5, 12, 40])
def test_thousands_of_random_prompts_leave_what_a_dictionary_of_prefixes_would(blocks: int) -> None:
    """Same blocks found, same bytes, same evictions, and never a byte over the limit."""
    rng = np.random.default_rng(blocks)
    limit = blocks * BYTES + 5
    cache, reference = PrefixCache(limit, SIZE), RecentPrefixes(limit)
    hits = 0
    for _ in range(4000):
        ids = rng.integers(0, 2, rng.integers(0, 30)).repeat(2).tolist()[: rng.integers(0, 30)]
        if rng.random() < 0.5:
            depth = found(cache, ids)
            assert depth == reference.match(ids)
            hits += depth > 0
        else:
            put(cache, ids)
            reference.insert(ids)
        assert cache.bytes == len(reference.used) * BYTES <= limit
        assert cache.evictions == reference.evictions
    assert hits > 100
    assert cache.evictions > 100


def test_a_block_is_found_only_behind_the_same_prefix() -> None:
    """Its keys and values depend on everything before them."""
    cache = PrefixCache(10**6, SIZE)
    a, b, c = [1] * SIZE, [2] * SIZE, [3] * SIZE
    put(cache, a + b)
    put(cache, c)
    assert found(cache, a + b) == 2
    assert found(cache, c + b) == 1
    assert found(cache, b) == 0
    assert found(cache, a + c) == 1
    put(cache, c + b)  # the same tokens behind another prefix are another block
    assert found(cache, c + b) == 2
    assert found(cache, a + b) == 2


def test_only_whole_blocks_are_kept_and_only_missing_ones_are_read() -> None:
    cache = PrefixCache(10**6, SIZE)
    ids = list(range(11))
    assert put(cache, ids[:3]) == []
    assert put(cache, ids) == [(0, 4), (4, 8)]
    assert put(cache, ids) == []
    assert put(cache, [*ids, 11]) == [(8, 12)]
    assert [found(cache, ids[:n]) for n in (0, 3, 4, 7, 8, 11)] == [0, 0, 1, 1, 2, 2]


def test_the_least_recently_used_block_goes_first_and_of_a_chain_its_end() -> None:
    """The first block of a chain is of use without the others; the others are of no use without it."""
    chain, a, b = list(range(12)), [20] * SIZE, [30] * SIZE
    cache = PrefixCache(4 * BYTES, SIZE)
    put(cache, chain)
    put(cache, a)
    put(cache, b)  # the fifth block
    assert cache.evictions == 1
    assert found(cache, chain) == 2
    put(cache, [40] * SIZE)  # the match made the chain recent, so it is a's turn
    assert [found(cache, ids) for ids in (a, b, chain)] == [0, 1, 2]
    for token in range(50, 53):
        put(cache, [token] * SIZE)
    assert found(cache, chain) == 1
    put(cache, [60] * SIZE)
    assert found(cache, chain) == 1


def test_a_prompt_longer_than_the_cache_keeps_its_beginning() -> None:
    cache = PrefixCache(3 * BYTES, SIZE)
    put(cache, [9] * SIZE)
    ids = list(range(5 * SIZE))
    assert put(cache, ids)[:3] == [(0, 4), (4, 8), (8, 12)]
    assert found(cache, ids) == 3
    assert cache.bytes == 3 * BYTES


@pytest.mark.parametrize("limit", [0, BYTES - 1])
def test_a_limit_below_one_block_keeps_nothing(limit: int) -> None:
    cache = PrefixCache(limit, SIZE)
    asked = put(cache, list(range(12)))
    assert asked == ([] if limit == 0 else [(0, SIZE)])  # 0 is off: nothing is even copied
    assert found(cache, list(range(12))) == cache.bytes == cache.evictions == 0


def test_cleared_it_is_empty_and_usable() -> None:
    cache = PrefixCache(2 * BYTES, SIZE)
    ids = list(range(8))
    put(cache, ids)
    cache.clear()
    assert found(cache, ids) == cache.bytes == 0
    assert put(cache, ids) == [(0, 4), (4, 8)]
    assert found(cache, ids) == 2
    assert cache.bytes == 2 * BYTES


def test_a_failed_copy_leaves_a_usable_cache() -> None:
    """Contract 6: the blocks before it are whole, the one that failed is not there."""
    cache = PrefixCache(10**6, SIZE)
    ids = list(range(12))
    reads = Reads(ids)

    def fail_in_the_second(start: int, stop: int) -> list[Tensor]:
        if start == SIZE:
            raise MemoryError
        return reads(start, stop)

    with pytest.raises(MemoryError):
        cache.insert(ids, fail_in_the_second)
    assert cache.bytes == BYTES
    assert found(cache, ids) == 1
    assert put(cache, ids) == [(4, 8), (8, 12)]


def test_blocks_have_the_documented_size() -> None:
    """32 tokens unless told otherwise: what a design of prompts can count on."""
    cache, ids = PrefixCache(10**6), list(range(3 * 32 + 31))
    assert BLOCK_TOKENS == 32
    assert put(cache, ids) == [(0, 32), (32, 64), (64, 96)]
