"""What a further token costs: counted FLOPs against the closed form, and the bookkeeping of timed steps."""

import pytest
import torch

from kvlab import GPT, ModelConfig
from kvlab.cost import KINDS, step_flops
from kvlab.growth import (
    count_steps,
    decode_step,
    every_step,
    half_octaves,
    one_pass,
    running_sum,
    uncached_steps,
)

OPTIONS = {"sliding": {"window": 5}, "quantized": {"residual_length": 4, "group_size": 4}, "paged": {"block_size": 4}}


@pytest.fixture(scope="module")
def model():
    return GPT(ModelConfig(hidden_size=16, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2))


@pytest.fixture(scope="module")
def ids():
    return torch.randint(0, 256, (1, 24), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("kind", KINDS)
def test_counted_steps_equal_the_closed_form(model, ids, kind):
    counted = count_steps(model, ids, kind, [1, 5, 6, 24], **OPTIONS.get(kind, {}))
    assert counted == {n: step_flops(model.config, kind, n, 5) for n in (1, 5, 6, 24)}


def test_every_step_of_every_variant_is_timed(model, ids):
    kinds = [kind for kind in KINDS if kind != "none"]
    times = every_step(model, ids, {kind: OPTIONS.get(kind, {}) for kind in kinds}, repeats=2)
    assert list(times) == kinds
    assert all(len(steps) == 24 and min(steps) > 0 for steps in times.values())


def test_uncached_steps_are_sampled(model, ids):
    sampled = uncached_steps(model, ids, half_octaves(24), repeats=1)
    assert sampled.lengths == (1, 2, 3, 4, 6, 8, 11, 16, 23, 24)
    lengths, sums = sampled.cumulative()
    assert lengths == list(range(1, 25)) and sums == sorted(sums)


def test_half_octaves_and_running_sums():
    assert half_octaves(64, 16) == [16, 23, 32, 45, 64]
    assert half_octaves(1) == [1]
    assert running_sum([1.0, 2.0, 3.0]) == [1.0, 3.0, 6.0]


def test_a_decode_step_names_the_bytes_it_must_read(model):
    row = decode_step(model, "full", length=10, repeats=3)
    # the warm-up and three repeats read 11, 12, 13 and 14 tokens
    assert row["cache"] == model.config.kv_bytes_per_token(4) * (11 + 12 + 13 + 14) / 4
    assert row["weights"] == sum(p.numel() * p.element_size() for p in model.parameters())
    assert row["seconds"] == row["timing"].median > 0 and "10 tokens" in row["label"]


def test_one_pass_is_timed(model):
    assert len(one_pass(model, 8, repeats=2).times) == 2


@pytest.mark.parametrize("shape", [(2, 4), (1, 0), (4,)])
def test_ids_of_another_shape_are_refused(model, shape):
    with pytest.raises(ValueError, match="one sequence"):
        count_steps(model, torch.zeros(shape, dtype=torch.long), "full", [1])
