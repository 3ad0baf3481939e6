"""Every cache serves a model with latent attention as it is: the generated cases of all kinds, with such a model."""

import dataclasses
from contextlib import contextmanager

import pytest
import torch
from cases import CASES, assert_bytes
from mla_oracle import LATENT, latent_logits, latent_toy
from oracles import assert_logits, feed, ids_for, in_chunks, rule_of, spy

from kvlab.caches import KINDS, make_cache
from kvlab.memory import ConfigError, estimate
from kvlab.mla import set_form
from kvlab.model import GPT
from kvlab.rounding import held

CHANGED = ("num_key_value_heads", "head_dim", "qkv_bias")  # what a latent model has no place for


def latent(case):
    """The same case for a model with latent attention; queries straight or by way of a narrow layer, biases or none."""
    model = {name: value for name, value in case.model if name not in CHANGED} | LATENT
    model |= {"q_lora_rank": (None, 12)[case.seed % 2], "attention_bias": case.seed % 3 == 0}
    options = dict(case.options)
    if "sinks_at" in options:
        options["sinks_at"] = "text"
    if isinstance(options.get("budget"), tuple):  # one stored head
        options["budget"] = tuple(row[:1] for row in options["budget"])
    return dataclasses.replace(case, model=tuple(model.items()), options=tuple(options.items()))


LATENT_CASES = [latent(case) for case in CASES[::15]]


@contextmanager
def fixed(model, form):
    set_form(model, form)
    try:
        yield
    finally:
        set_form(model, None)  # toys are shared


def fed(case, model, form, schedule=None, rows=None):
    cache = case.make_cache(model)
    with fixed(model, form):
        return feed(model, cache, rows, schedule or case.schedule, case.padding, case.seed)


def test_every_kind_is_there():
    for kind in KINDS:
        assert sum(case.kind == kind for case in LATENT_CASES) >= 3, kind


@pytest.mark.parametrize("case", LATENT_CASES, ids=str)
def test_logits_and_bytes(case):
    """Equal to the dense reference under the same rule, and every byte is that of latents and turned keys."""
    model, rows = case.make_model(), ids_for(case.seed, case.lengths)
    cache = case.make_cache(model)
    log = spy(cache)
    with fixed(model, (None, "absorbed", "expanded")[case.seed // 2 % 3]):
        got = feed(model, cache, rows, case.schedule, case.padding, case.seed)
    for b, logits in enumerate(got):
        assert_logits(logits, latent_logits(model, rows[b], rule_of(case.kind, dict(case.options))), what=f"row {b}")
    assert_bytes(case, model, cache, log)


@pytest.mark.parametrize("case", LATENT_CASES[::5], ids=str)
def test_both_forms_and_any_chunking(case):
    model, rows = case.make_model(), ids_for(case.seed, case.lengths)
    want = fed(case, model, "absorbed", [case.lengths], rows)
    for form, chunk in (("absorbed", 2), ("expanded", 1), ("expanded", 7), (None, 3)):
        for b, got in enumerate(fed(case, model, form, in_chunks(case.lengths, chunk), rows)):
            assert_logits(got, want[b], what=f"{form}, chunks of {chunk}, row {b}")


@pytest.mark.parametrize("case", [c for c in LATENT_CASES if len(c.lengths) > 1][::4], ids=str)
def test_a_row_does_not_depend_on_its_neighbours(case):
    model, rows, others = case.make_model(), ids_for(case.seed, case.lengths), ids_for(case.seed + 1000, case.lengths)
    first = fed(case, model, None, rows=rows)
    for b in range(len(rows)):
        mixed = [rows[i] if i == b else others[i] for i in range(len(rows))]
        assert torch.equal(first[b], fed(case, model, None, rows=mixed)[b]), f"row {b}"


@pytest.mark.parametrize("kind", KINDS)
def test_the_calculator_says_what_the_cache_holds(kind):
    for case in [c for c in LATENT_CASES if c.kind == kind][:4]:
        model, options = case.make_model(torch.float32), dict(case.options)
        cache = make_cache(kind, model, len(case.lengths), case.max_length, **options)
        feed(model, cache, ids_for(case.seed, case.lengths), [case.lengths])
        found = estimate(
            model.config, seq_len=list(case.lengths), kv_dtype="fp32", cache=kind, max_length=case.max_length, **options
        )
        assert found.held_bytes == cache.nbytes, case


def test_bytes_of_rounded_latents():
    model, text = latent_toy(dtype=torch.float32), ids_for(4, [21])
    cache = make_cache("quantized", model, 1, 21, k_bits=4, v_bits=8, group_size=4, residual_length=6)
    feed(model, cache, text, [[21]])
    by = cache.nbytes_by()
    found = held(model.config, 21, 4, group=4, residual=6, itemsize=4, v_bits=8)
    assert found == {"codes": by["keys"] + by["values"], "scales": by["scales"], "tail": by["tail"]}


def test_the_calculator_refuses_sinks_inside_the_cache_too():
    with pytest.raises(ConfigError, match="sinks_at='cache' turns stored keys, and a latent is not one"):
        estimate(latent_toy().config, 1, 8, cache="sliding", window=4, sinks=1, sinks_at="cache")
    with pytest.raises(
        ConfigError, match="kvlab's caches keep no index for sparse attention; this model has one of 128"
    ):
        estimate("deepseek-v3.2", 1, 8, cache="full")
    assert estimate("deepseek-v3", 1, 8, cache="full").held_bytes == 8 * 70272


def test_fork_reorder_and_rewind():
    model = latent_toy()
    text = ids_for(5, [14])[0]
    for kind, options in (("growing", {}), ("full", {}), ("paged", {"block_size": 4}), ("offloaded", {})):
        cache = make_cache(kind, model, 2, 32, **options)
        with torch.no_grad():
            model(torch.tensor([text, text[::-1]]), cache)
            twin = cache.fork()
            cache.reorder([1, 0])
            cache.rewind([3, 5])
            ends = text[::-1][:11] + [7], text[:9] + [8]
            got = model(torch.tensor([[7], [8]]), cache)[:, -1]
            for row, end in zip(got, ends):
                assert_logits(row[None], latent_logits(model, end)[-1:], what=kind)
            assert_logits(
                model(torch.tensor([[3], [3]]), twin)[0], latent_logits(model, [*text, 3])[-1:], what=f"fork of {kind}"
            )


def test_sinks_that_stand_inside_the_cache_are_refused():
    """The key that would have to be turned is stored as the value."""
    with pytest.raises(
        ValueError, match="sinks_at='cache' turns keys, and latent attention keeps its turned ones apart"
    ):
        make_cache("sliding", latent_toy(), 1, 64, window=8, sinks=2, sinks_at="cache")
    make_cache("sliding", latent_toy(), 1, 64, window=8, sinks=2)


def test_codes_must_fill_bytes_in_both_widths():
    with pytest.raises(ValueError, match="head_dim=6 does not fill bytes with 2-bit codes"):
        make_cache("quantized", GPT(latent_toy().config.with_(qk_rope_head_dim=6, head_dim=None)), v_bits=2)
    with pytest.raises(ValueError, match="group_size=12 does not divide head_dim=16"):
        make_cache("quantized", latent_toy(), key_axis="token", group_size=12)
