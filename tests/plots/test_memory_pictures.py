"""The memory pictures say what the calculator says."""

import pytest

from kvlab.memory import estimate, fits, max_batch, max_seq_len, memory_bytes
from kvlab.plots import charts, figures, memory


@pytest.mark.parametrize("model", memory.MODELS)
@pytest.mark.parametrize("batch, length, kv, weights", [(1, 128, "fp16", "fp16"), (256, 131072, "q8_0:q4_0", "int4")])
def test_the_verdict_is_the_calculators(model, batch, length, kv, weights):
    explorer = memory.MemoryExplorer(model, "a100-80gb", strict=True)
    explorer.set(batch=batch, length=length, kv_dtype=kv, weights=weights)
    options = {"kv_dtype": kv, "weights_dtype": weights}
    sentence, room = explorer.snapshot().sentence, memory_bytes("a100-80gb")
    assert sentence.startswith("It fits") == bool(fits(model, room, batch, length, **options))
    longest, most = max_seq_len(model, room, batch, **options), max_batch(model, room, length, **options)
    if longest == 0:
        assert "Not even the shortest" in sentence
    else:
        assert (f"length {longest:,} at" if longest else "no length at") in sentence
        assert f"batch {most:,} at" in sentence


def test_lines_are_estimates_and_the_limit_is_the_cards_memory():
    explorer = memory.MemoryExplorer("llama-3.1-8b", "l4")
    length, batch = explorer.data(explorer.values)["panels"]
    for panel in (length, batch):
        assert panel["limits"][0]["value"] == memory_bytes("l4")
    for n, total, weights, cache in zip(length["series"][0]["x"], *(s["y"] for s in length["series"])):
        e = estimate("llama-3.1-8b", 4, n, weights_dtype="fp16")
        assert (total, weights, cache) == (e.total_bytes, e.weights_bytes, e.kv_cache_bytes)
    assert batch["series"][2]["y"][3] == estimate("llama-3.1-8b", 8, 2048).kv_cache_bytes


def test_a_cell_of_the_map_is_filled_where_it_fits():
    data = memory.fit_map("llama-3.1-8b", "t4", weights_dtype="int4", kv_dtype="fp8")
    for n, row in zip(memory.LENGTHS, data["values"]):
        for b, share in zip(memory.BATCHES, row):
            fit = fits("llama-3.1-8b", "t4", b, n, weights_dtype="int4", kv_dtype="fp8")
            assert (share is not None) == bool(fit)
            if share is not None:
                assert share == fit.estimate.total_bytes / memory_bytes("t4")
    assert "int4" in data["title"] and "fp8" in data["title"] and "T4" in data["label"]


@pytest.mark.parametrize("model", ["llama-7b", "llama-3.1-8b", "gemma-3-27b", "deepseek-v3"])
@pytest.mark.parametrize("dtype, batch, cards", [("fp16", 1, 1), ("int4", 1, 1), ("int4", 8, 1), ("int4", 8, 4)])
def test_the_length_at_which_the_cache_passes_the_weights(model, dtype, batch, cards):
    n = memory.passing_length(model, dtype, batch, cards)
    at, before = (estimate(model, batch, k, weights_dtype=dtype, tensor_parallel=cards) for k in (n, max(n - 1, 1)))
    assert at.kv_cache_bytes > at.weights_bytes
    assert before.kv_cache_bytes <= before.weights_bytes


def test_a_model_without_a_cache_never_passes():
    assert memory.passing_length("mamba-2.8b", "int4") is None


def test_bars_and_levels_draw():
    rows = [("MHA", "full", "llama-7b"), ("GQA", "shared", "llama-3.1-8b")]
    bars = memory.token_bars("One token", rows)
    assert [b["values"] for b in bars["bars"]] == [[524288], [131072]] and "4 times" in bars["sentence"]
    held = memory.held_bars("Held", [("full", "full", {"keys": 8, "values": 8, "positions": 4, "tables": 0})])
    assert held["bars"][0]["values"] == [8, 8, 4]
    levels = memory.weights_and_cache("llama-7b", (1, 8), [("int4", "int4", 1), ("int4, 8 cards", "int4", 8)])
    assert len(levels["series"]) == 4 and levels["series"][2]["y"][0] == estimate(
        "llama-7b", weights_dtype="int4"
    ).weights_bytes  # fmt: skip
    for data in (bars, held, levels, memory.fit_map("llama-7b", "t4")):
        assert charts.draw(data).startswith("<svg") and figures.draw(data).png()[:4] == b"\x89PNG"
