"""What leaves the window, in float64: one layer forgets at W, n layers reach n (W - 1), to the last bit."""

import pytest
import torch

from kvlab import ModelConfig, make_cache
from kvlab.model import GPT
from kvlab.reach import farthest, heard, reach, toy

T = 40
IDS = torch.randint(0, 64, (1, T), generator=torch.Generator().manual_seed(0))
OTHER = (int(IDS[0, 2]) + 1) % 64


def sliding(model, window, **options):
    return lambda: make_cache("sliding", model, window=window, **options)


@pytest.mark.parametrize("chunk", [1, 5, 40])
@pytest.mark.parametrize("window", [1, 2, 5, 8])
def test_one_layer_forgets_at_its_window(window, chunk):
    model = toy(1)
    changes = heard(model, IDS, 2, OTHER, sliding(model, window), chunk)[-1]  # of the logits
    assert torch.equal(changes[window:], torch.zeros(T - 2 - window, dtype=torch.float64))
    assert (changes[:window] > 1e-6).all()  # up to and including distance W - 1


@pytest.mark.parametrize("layers, window", [(2, 2), (3, 4), (4, 8), (5, 3)])
def test_n_layers_reach_n_windows_and_no_token_more(layers, window):
    model = toy(layers)
    changes = heard(model, IDS, 2, OTHER, sliding(model, window))
    far = reach(layers, window)
    assert far == layers * (window - 1)
    for layer, row in enumerate(changes[:-1], 1):
        n = reach(layer, window)
        assert not row[n + 1 :].any(), f"layer {layer} hears a token more than {n} away"
        assert (row[: n + 1] > 0).all(), f"layer {layer} misses a token at most {n} away"
    assert not changes[-1][far + 1 :].any() and (changes[-1][: far + 1] > 0).all()
    assert farthest(changes) == [reach(n, window) for n in range(1, layers + 1)] + [far]


def test_the_models_own_window_reaches_as_far_without_a_cache():
    model = GPT(ModelConfig(vocab_size=64, hidden_size=32, num_hidden_layers=3, num_attention_heads=4,
                            sliding_window=4)).double()  # fmt: skip
    assert farthest(heard(model, IDS, 2, OTHER)) == [3, 6, 9, 9]


def test_a_full_layer_among_sliding_ones_hears_everything():
    types = ("sliding_attention", "full_attention", "sliding_attention")
    model = GPT(ModelConfig(vocab_size=64, hidden_size=32, num_hidden_layers=3, num_attention_heads=4,
                            sliding_window=4, layer_types=types)).double()  # fmt: skip
    assert farthest(heard(model, IDS, 2, OTHER)) == [3, T - 3, T - 3, T - 3]


def test_a_sink_is_heard_everywhere_and_the_token_after_the_sinks_is_not():
    model = toy(2)
    make = sliding(model, 4, sinks=3)
    assert farthest(heard(model, IDS, 2, OTHER, make))[-1] == T - 3  # token 2 is the last sink
    after = heard(model, IDS, 3, (int(IDS[0, 3]) + 1) % 64, make)
    assert farthest(after) == [3, 6, 6]


def test_a_full_cache_forgets_nothing():
    model = toy(1)
    assert farthest(heard(model, IDS, 2, OTHER, lambda: make_cache("full", model, max_length=T), 7)) == [T - 3, T - 3]


@pytest.mark.parametrize(
    "given, words",
    [
        ({"ids": IDS[0]}, "one text"),
        ({"at": T}, "0 to 39"),
        ({"at": -1}, "not in the text"),
        ({"other": int(IDS[0, 2])}, "another token"),
        ({"other": 64}, "vocabulary"),
        ({"chunk": 0}, "chunk"),
    ],
)
def test_what_cannot_be_is_said(given, words):
    with pytest.raises(ValueError, match=words):
        heard(toy(1), **{"ids": IDS, "at": 2, "other": OTHER, **given})


@pytest.mark.parametrize("layers, window", [(0, 4), (2, 0)])
def test_no_layers_or_no_window_reach_nowhere(layers, window):
    with pytest.raises(ValueError):
        reach(layers, window)


def test_nothing_is_left_on_the_model():
    model = toy(2)
    with pytest.raises(ValueError):
        heard(model, IDS, 2, OTHER, lambda: make_cache("sliding", model, window=0))
    assert all(not block._forward_hooks for block in model.layers)
