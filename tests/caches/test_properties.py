"""The promises that every cache keeps, on generated cases, with logits in float64."""

import numpy as np
import pytest
import torch
from cases import CASES, COUNTS, assert_bytes, free_everything
from oracles import (
    assert_logits,
    call,
    causal_logits,
    dense_logits,
    feed,
    ids_for,
    in_chunks,
    rule_of,
    spy,
    toy,
)

EXACT = [case for case in CASES if case.kind in ("growing", "full", "paged", "offloaded")]
SOME = CASES[::6]


def test_at_least_500_cases_and_every_kind_of_them():
    """A generator that lost a branch would still be green; so its variety is counted."""
    assert len(CASES) == sum(COUNTS.values()) >= 500
    print(f"{len(CASES)} generated cases")
    sliding = [case for case in CASES if case.kind == "sliding"]
    for offset in (-1, 0, 1):
        assert sum(dict(c.options)["window"] == c.chunk + offset for c in sliding) >= 10
    for window in (1, 2):
        assert sum(dict(c.options)["window"] == window for c in sliding) >= 10
    assert all(max(c.lengths) > 3 * dict(c.options)["window"] for c in sliding)
    for place in ("text", "cache"):
        assert sum(dict(c.options)["sinks_at"] == place and dict(c.options)["sinks"] > 0 for c in sliding) >= 20
    for kind in COUNTS:
        ours = [case for case in CASES if case.kind == kind]
        for n_kv in (1, 2, 4):
            assert sum(dict(c.model)["num_key_value_heads"] == n_kv for c in ours) >= 10
        for padding in ("left", "right", "scattered"):
            assert sum(c.padding == padding and len(set(c.lengths)) > 1 for c in ours) >= 5
        assert sum("sliding_window" in dict(c.model) for c in ours) >= 10
        assert sum("layer_types" in dict(c.model) for c in ours) >= 5
        for B in (1, 2, 3):
            assert sum(len(c.lengths) == B for c in ours) >= 10
    quantized = [dict(case.options) for case in CASES if case.kind == "quantized"]
    for bits in (8, 4, 2, "fp8", "fp8_e5m2", 16):
        assert sum(o["k_bits"] == bits for o in quantized) >= 5
        assert sum(o["v_bits"] == bits for o in quantized) >= 5


@pytest.mark.parametrize("case", CASES, ids=str)
def test_logits_bytes_and_books(case):
    """Equal to the dense reference under the same rule, at the bytes that the docstrings state, and nothing is kept."""
    model, rows = case.make_model(), ids_for(case.seed, case.lengths)
    cache = case.make_cache(model)
    log = spy(cache)
    got = feed(model, cache, rows, case.schedule, case.padding, case.seed)
    for b, logits in enumerate(got):
        assert_logits(logits, dense_logits(model, rows[b], rule_of(case.kind, dict(case.options))), what=f"row {b}")
    assert cache.lengths == list(case.lengths)
    assert_bytes(case, model, cache, log)
    assert 0 < cache.nbytes_in_use <= cache.nbytes
    if case.kind == "paged":
        cache.pool.check([row.table for row in cache.rows])
        assert cache.pool.used_blocks == sum(-(-n // cache.block_size) for n in case.lengths)
        free_everything(cache)


@pytest.mark.parametrize("case", [c for c in EXACT if "sliding_window" not in dict(c.model)][::5], ids=str)
def test_the_two_references_agree(case):
    """Ours, and torch's is_causal; and the model without a cache equals both."""
    model, rows = case.make_model(), ids_for(case.seed, case.lengths)
    for row in rows:
        want = causal_logits(model, row)
        assert_logits(dense_logits(model, row), want)
        with torch.no_grad():
            assert_logits(model(torch.tensor([row]))[0], want)


@pytest.mark.parametrize("case", SOME, ids=str)
def test_any_chunking_equals_one_chunk(case):
    model, rows = case.make_model(), ids_for(case.seed, case.lengths)
    at_once = feed(model, case.make_cache(model), rows, [case.lengths])
    for chunk in (1, 2, 7):
        cut = feed(model, case.make_cache(model), rows, in_chunks(case.lengths, chunk))
        for b, (got, want) in enumerate(zip(cut, at_once)):
            assert_logits(got, want, what=f"chunks of {chunk}, row {b}")


@pytest.mark.parametrize("case", [c for c in CASES if len(c.lengths) > 1][::6], ids=str)
def test_a_row_is_the_same_to_the_bit_whatever_its_neighbours_say(case):
    model, rows = case.make_model(), ids_for(case.seed, case.lengths)
    others = ids_for(case.seed + 1000, case.lengths)
    for b in range(len(rows)):
        mixed = [rows[i] if i == b else others[i] for i in range(len(rows))]
        first = feed(model, case.make_cache(model), rows, case.schedule, case.padding, case.seed)[b]
        again = feed(model, case.make_cache(model), mixed, case.schedule, case.padding, case.seed)[b]
        assert torch.equal(first, again), f"row {b}"


@pytest.mark.parametrize("case", [c for c in CASES if len(c.lengths) > 1][::6], ids=str)
def test_a_row_says_the_same_alone_and_in_a_batch(case):
    model, rows = case.make_model(), ids_for(case.seed, case.lengths)
    together = feed(model, case.make_cache(model), rows, case.schedule, case.padding, case.seed)
    for b, row in enumerate(rows):
        (alone,) = feed(model, case.make_cache(model, 1), [row], [[len(row)]])
        assert_logits(together[b], alone, what=f"row {b}")


@pytest.mark.parametrize("case", [c for c in CASES if c.kind not in ("quantized", "heavy_hitter")][::5], ids=str)
def test_float32_stays_within_1e_5(case):
    """The second gate. Codes and victims may flip in float32: test_quantized.py and test_evicting.py have their own."""
    model, rows = case.make_model(torch.float32), ids_for(case.seed, case.lengths)
    got = feed(model, case.make_cache(model), rows, case.schedule, case.padding, case.seed)
    for b, logits in enumerate(got):
        want = dense_logits(model, rows[b], rule_of(case.kind, dict(case.options)))
        assert_logits(logits, want, 1e-5, what=f"row {b}")


@pytest.mark.parametrize("kind", COUNTS)
def test_a_row_that_went_wrong_does_not_poison_its_neighbours(kind):
    """Token 7 has an embedding of NaN. A row without it must not notice, even where blocks are shared out anew."""
    model = toy(seed=9)
    with torch.no_grad():
        kept = model.embed_tokens.weight[7].clone()
        model.embed_tokens.weight[7] = float("nan")
    try:
        from kvlab.caches import make_cache

        options = {"sliding": {"window": 4}, "quantized": {"group_size": 2, "residual_length": 2}}
        options |= {"heavy_hitter": {"budget": 4}, "random": {"budget": 4}, "first_last": {"budget": 4, "first": 1}}
        options = {**options, "paged": {"block_size": 4, "num_blocks": 4}}.get(kind, {})
        bad, good = [1, 7, 3, 4, 5, 6, 8, 9, 10, 11, 12, 13], [1, 2, 3]
        cache = make_cache(kind, model, 2, 20, **options)
        with torch.no_grad():
            logits = call(model, cache, [good, bad], [0, 0])
            assert torch.isnan(logits[1]).any()
            assert_logits(logits[0], dense_logits(model, good, rule_of(kind, options)), what="beside a bad row")
            if kind == "paged":  # its blocks go to other rows
                cache.free_row(1)
                cache.add_row()
                got = call(model, cache, [[4, 5, 6, 8, 9], [2]], [3, 0])
                assert_logits(got[0], dense_logits(model, good + [4, 5, 6, 8, 9])[3:], what="in a used block")
                assert_logits(got[1], dense_logits(model, [2]), what="in a used block, partly filled")
    finally:
        with torch.no_grad():
            model.embed_tokens.weight[7] = kept


def test_the_generator_repeats_itself():
    from cases import generate_case

    assert [generate_case(c.kind, c.seed) for c in CASES[::50]] == CASES[::50]
    assert np.random.default_rng(3).integers(1000) == np.random.default_rng(3).integers(1000)
