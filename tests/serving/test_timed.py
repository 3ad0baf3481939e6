"""Paging against reservation on a clock: the steps are those of the simulation, the texts are the same."""

import pytest

from kvlab.config import ModelConfig
from kvlab.model import GPT
from kvlab.serving.rivals import simulate
from kvlab.serving.timed import time_rivals
from kvlab.workloads import workload

CONFIG = ModelConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
LENGTHS = {"prompt_median": 8, "output_median": 8, "max_model_len": 64}


def test_both_sides_take_the_simulated_steps_and_write_the_same(capsys):
    made = workload(14, rate=0.6, **LENGTHS)
    sides = time_rivals(GPT(CONFIG, seed=0).double(), made, 176, max_model_len=64, max_num_batched_tokens=32)
    assert [side.name for side in sides] == ["paged-16", "reserved"]
    assert sides[0].outputs == sides[1].outputs
    assert {id: len(ids) for id, ids in sides[0].outputs.items()} == {a.id: a.output_tokens for a in made}
    for side in sides:
        found = simulate(side.name, made, 176, max_model_len=64, max_num_batched_tokens=32)
        shown = side.to_dict()
        for name in ("model_steps", "mean_requests", "peak_requests", "tokens_per_step"):
            assert shown[name] == getattr(found, name), (side.name, name)
        assert shown["tokens"] == found.emitted and side.feed.clock == found.steps
        assert len(side.seconds) == found.model_steps and min(side.seconds) > 0
        assert shown["seconds"] == sum(side.seconds)
    assert capsys.readouterr().out == ""


def test_bad_input_is_named():
    model = GPT(CONFIG)
    with pytest.raises(ValueError, match="60 slots have no room for one request of max_model_len=64"):
        time_rivals(model, workload(2, **LENGTHS), 60, max_model_len=64)
    with pytest.raises(ValueError, match="arrivals is empty"):
        time_rivals(model, [], 64, max_model_len=64)
    with pytest.raises(ValueError, match="block_size=0 must be at least 1"):
        time_rivals(model, workload(2, **LENGTHS), 64, max_model_len=64, block_size=0)
    with pytest.raises(ValueError, match="60 slots have no room"):
        time_rivals(model, workload(2, **LENGTHS), 60, max_model_len=32, block_size=64)
    with pytest.raises(ValueError, match="request r0 has .* tokens, more than max_model_len=8"):
        time_rivals(model, workload(2, **LENGTHS), 64, max_model_len=8)
