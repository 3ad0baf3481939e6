"""The pictures of paging: both twins draw, and what they show is counted from the caches and the simulation."""

import xml.etree.ElementTree as ET

import pytest
import torch

from kvlab.caches.paged import PagedCache
from kvlab.caches.pool import BlockPool
from kvlab.plots import charts, figures, paged
from kvlab.serving.first_fit import FirstFit
from kvlab.serving.padded import padded_batches
from kvlab.serving.rivals import compare
from kvlab.workloads import Arrival, workload

TEXTS = [(5, 12), (14, 3), (9, 8), (2, 17)]


def write(cache, ids, rows=None):
    """Rows of a cache without a model: keys and values are zeros."""
    ids = torch.tensor(ids)
    x = torch.zeros(*ids.shape, 1, 2).transpose(1, 2)
    pos = cache.next_positions([ids.shape[1]] * len(ids))
    cache.append(0, x, x, pos)
    cache.advance(pos)


def forked():
    cache = PagedCache(1, pool=BlockPool(6, 4))
    write(cache, [list(range(10))])
    cache.commit(0, range(10))
    cache.fork_row(0)
    return cache


def pictures():
    memory = FirstFit(32)
    names = {memory.allocate(8): name for name in "ABCD"}
    memory.release(8)
    del names[8]
    cache = forked()
    found = compare(workload(12, max_model_len=64, prompt_median=10, output_median=10), 256, max_model_len=64)
    yield paged.padded_batch(TEXTS)
    yield paged.reservation(TEXTS, 32)
    yield paged.first_fit(memory, names, "A memory")
    yield paged.block_pool(dict(zip("AB", cache.rows)), cache.pool, "A pool")
    yield paged.chain({"A": range(10), "B": [0, 1, 2, 3, 9, 9, 9, 9]}, 4)
    yield paged.boundary([3, 4, 5], 4)
    yield paged.shares(found)
    yield paged.at_once({"paged-16": [1, 2, 3], "doubling": [1, 2, 2, 1], "reserved": [1] * 300})
    yield paged.block_sizes([1, 16, 256], [0, 0.02, 0.3], [900, 90, 9])


@pytest.mark.parametrize("data", list(pictures()), ids=lambda d: d["title"])
def test_both_twins_draw_and_say_numbers(data):
    ET.fromstring(charts.draw(data))
    picture = figures.draw(data)
    assert any(c.isdigit() for c in picture.alt) and picture.png()[:4] == b"\x89PNG"


def test_padding_is_what_the_padded_batch_holds_at_its_end():
    data = paged.padded_batch(TEXTS)
    arrivals = [Arrival(f"r{i}", prompt, new) for i, (prompt, new) in enumerate(TEXTS)]
    *_, last = padded_batches(arrivals, 4 * 64, max_model_len=64)
    cells = [c for row in data["rows"] for c in row["cells"]]
    assert len(cells) == last.slots + 4  # the last new token of a row is shown and never fed
    assert sum(c.get("state") != "reserved" for c in cells) == sum(map(sum, TEXTS)) == 70
    assert data["sentence"].startswith("70 of 124 slots hold a token: 43.5 % is padding")


def test_what_is_reserved_and_empty():
    data = paged.reservation([(5, 6), (14, 2)], 32)
    assert [len(row["cells"]) for row in data["rows"]] == [32, 32]
    assert [sum(c.get("state") == "reserved" for c in row["cells"]) for row in data["rows"]] == [21, 16]
    assert "27 of 64" in data["sentence"]


def test_a_first_fit_memory_shows_every_slot_and_its_gaps():
    memory = FirstFit(64)
    names = {memory.allocate(8): name for name in "ABCDEFGH"}
    for start in (8, 24, 40, 56):
        memory.release(start)
        del names[start]
    assert memory.allocate(16) is None and memory.free == 32
    data = paged.first_fit(memory, names, "x")
    shown = "".join(c.get("text") or "." for row in data["rows"] for c in row["cells"])
    assert shown == "".join(f"{name * 8}{'.' * 8}" for name in "ACEG")
    assert data["sentence"] == ("32 of 64 slots are free (8 to 15, 24 to 31, 40 to 47, 56 to 63); the longest gap: 8.")


def rows_of(data):
    return {row["label"]: row["cells"] for row in data["rows"]}


def test_a_pool_shows_tables_counts_and_positions():
    cache = forked()
    names = dict(zip("AB", cache.rows))
    was = {name: row.length for name, row in names.items()}
    before = rows_of(paged.block_pool(names, cache.pool, "x", was))
    assert [c["text"] for c in before["table of A"]] == ["0", "1", "2"] == [c["text"] for c in before["table of B"]]
    assert [c["text"] for c in before["reference count"]] == ["2", "2", "2", "0", "0", "0"]
    assert {c["group"] for c in before["table of A"]} == {paged.SHARED}
    write(cache, [[50], [51]])
    after = rows_of(paged.block_pool(names, cache.pool, "x", was))
    assert [c["text"] for c in after["table of A"]] == ["0", "1", "3"]
    assert [c["text"] for c in after["reference count"]] == [str(ref) for ref in cache.pool.ref]
    assert [c.get("text", "") for c in after["slot 2"]] == ["2", "6", "10", "10", "", ""]
    assert [c["state"] for c in after["slot 2"]] == ["held", "held", "new", "new", "free", "free"]
    assert [c["group"] for c in after["slot 0"]][:4] == [paged.SHARED, paged.SHARED, 1, 0]


def test_freed_blocks_show_what_can_be_found_and_who_goes_first():
    cache = forked()
    cache.free_row(1)
    cache.free_row(0)
    shown = rows_of(paged.block_pool({}, cache.pool, "x"))
    assert [c["state"] for c in shown["slot 0"]] == ["reserved", "reserved", "free", "free", "free", "free"]
    order = [int(c["text"]) for c in shown["taken next, order"]]
    assert [order.index(i + 1) for i in range(6)] == list(cache.pool.free) == [3, 4, 5, 2, 1, 0]


def test_equal_keys_have_equal_colours_up_to_the_first_difference():
    a, b = [1, 2, 3, 4, 5, 6, 7, 8, 9, 9, 9, 9, 1], [1, 2, 3, 4, 5, 6, 7, 0, 9, 9, 9, 9]
    (_, keys_a, _, keys_b) = (row["cells"] for row in paged.chain({"a": a, "b": b}, 4)["rows"])
    assert [x["text"] == y["text"] for x, y in zip(keys_a, keys_b)] == [True, False, False]
    assert [x["group"] == y["group"] for x, y in zip(keys_a, keys_b)] == [True, False, False]
    assert keys_a[3]["text"] == "none" and keys_a[0]["text"] == BlockPool.chain(b"", a[:4]).hex()[:6]


def test_the_boundary_says_when_a_block_is_taken():
    labels = [row["label"] for row in paged.boundary([3, 4, 5, 8], 4)["rows"]]
    assert labels == [
        "3 tokens, 1 block",
        "4 tokens, 1 block, +1 now",
        "5 tokens, 2 blocks",
        "8 tokens, 2 blocks, +1 now",
    ]


def test_shares_add_up_to_the_memory():
    found = compare(workload(12, max_model_len=64, prompt_median=10, output_median=10), 256, max_model_len=64)
    for bar, f in zip(paged.shares(found)["bars"], found, strict=True):
        assert sum(bar["values"]) == pytest.approx(1) and bar["values"][0] == f.memory_in_use
        held = sum(bar["values"][:2])
        assert bar["values"][0] / held == pytest.approx(f.utilization) and min(bar["values"]) >= 0


def test_means_of_a_long_run_keep_its_end():
    lines = paged.at_once({"reserved": [2] * 600 + [1] * 10, "paged-16": [4] * 100})["series"]
    for line, most, steps in zip(lines, (2, 4), (610, 100)):
        assert len(line["x"]) < 40 and line["y"][0] == most and line["x"] == sorted(line["x"])
        assert line["y"][-2:] == [0, 0] and line["x"][-2:] == [steps, 610]  # nobody runs from its end to the last one's


def test_a_block_just_written_and_not_full_is_pale():
    from kvlab.plots import charts, theme

    cells = [{"text": "1", "state": "new", "group": 1, "full": full} for full in (True, False)]
    for shown, pale in zip(cells, (False, True)):
        data = {"kind": "slots", "title": "t", "rows": [{"label": "r", "cells": [shown]}]}
        assert (theme.slot_fill("reserved", 1) in charts.draw(data, 600)) == pale
