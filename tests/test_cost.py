"""The closed forms against a loop over steps, and against what a GPT really multiplies."""

import pytest
import torch

from kvlab import cost
from kvlab.config import ModelConfig
from kvlab.measure import count_flops
from kvlab.model import GPT

CONFIG = ModelConfig(hidden_size=96, num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=2, head_dim=20,
                     intermediate_size=160, vocab_size=50)  # fmt: skip


@pytest.mark.parametrize("prompt, new", [(1, 1), (1, 9), (7, 1), (5, 12)])
@pytest.mark.parametrize(
    "kind, window", [("none", None), ("full", None), ("sliding", 1), ("sliding", 4), ("sliding", 99)]
)
def test_a_generation_is_the_sum_of_its_steps(kind, window, prompt, new):
    steps = [cost.forward_flops(CONFIG, prompt, prompt)]
    for behind in range(prompt + 1, prompt + new):
        if kind == "none":
            steps.append(cost.forward_flops(CONFIG, behind, behind))
        else:
            steps.append(cost.forward_flops(CONFIG, 1, min(behind, window or behind)))
    got = cost.generation_flops(CONFIG, kind, prompt, new, window)
    assert got == (sum(s.projections for s in steps), sum(s.attention for s in steps))


@pytest.mark.parametrize("T", [1, 2, 13])
def test_a_forward_pass_costs_what_is_counted(T):
    model = GPT(CONFIG)
    with torch.no_grad(), count_flops(model) as counted:
        model(torch.zeros(1, T, dtype=torch.long), logits_to_keep=1)
    assert (counted.projections, counted.attention) == cost.forward_flops(CONFIG, T, T)


def test_llama_7b_holds_512_mib_at_1024_tokens():
    llama = ModelConfig(hidden_size=4096, num_hidden_layers=32, num_attention_heads=32)
    assert cost.held_bytes(llama, "full", 1024) == 512 * 2**20
    assert cost.held_bytes(llama, "none", 1024) == 0
    assert cost.held_bytes(llama, "sliding", 4096, window=1024) == 512 * 2**20
    assert cost.held_bytes(llama, "quantized", 1024, itemsize=(64 * 4 / 8 + 4) / 64) == 512 * 2**20 * 0.28125


def test_slopes_approach_three_two_and_one():
    def order(kind):  # of the attention term, between two long generations
        a, b = (cost.generation_flops(CONFIG, kind, 1, n, 64).attention for n in (2**16, 2**17))
        return b / a

    assert order("none") == pytest.approx(8, rel=1e-3)
    assert order("full") == pytest.approx(4, rel=1e-3)
    assert order("sliding") == pytest.approx(2, rel=1e-3)


@pytest.mark.parametrize("kind, kwargs, word", [("ring", {}, "'ring'"), ("sliding", {}, "window=None"),
                                                ("sliding", {"window": 0}, "window=0")])  # fmt: skip
def test_bad_input_is_named(kind, kwargs, word):
    with pytest.raises(ValueError, match=word):
        cost.generation_flops(CONFIG, kind, 1, 4, **kwargs)
    with pytest.raises(ValueError, match="prompt=0"):
        cost.generation_flops(CONFIG, "none", 0, 4)
