"""Memory against quality: bytes are those of a real fp16 cache, and nothing on the frontier is beaten."""

import pytest
import torch

from kvlab.caches import make_cache
from kvlab.check import tiny_model
from kvlab.config import ModelConfig
from kvlab.frontier import Point, equal_window, fp16_bytes, points, undominated, verdict
from kvlab.model import GPT
from kvlab.quality import evaluate
from kvlab.quality.result import Spread

IDS = torch.randint(0, 499, (70,), generator=torch.Generator().manual_seed(0)).tolist()
OPTIONS = {"k_bits": 4, "v_bits": 4, "group_size": 8, "residual_length": 8}
SPECS = {
    "full": ("full", {}),
    "window": ("sliding", {"window": 9, "sinks": 4}),
    "cache": ("sliding", {"window": 9, "sinks": 4, "sinks_at": "cache"}),
    "heavy": ("heavy_hitter", {"budget": 12}),
    "uneven": ("heavy_hitter", {"budget": [[9, 15], [12, 12]]}),
    "random": ("random", {"budget": 12}),
    "shared": ("shared", {"every": 2}),
    "int4": ("quantized", OPTIONS),
    "fp8": ("quantized", {**OPTIONS, "k_bits": "fp8", "v_bits": "fp8"}),
}


@pytest.mark.parametrize("name", SPECS)
def test_the_bytes_are_those_of_an_fp16_models_cache(name):
    kind, options = SPECS[name]
    double = tiny_model()
    found = evaluate(double, IDS, {name: SPECS[name]}, progress=False)[name]
    half = GPT(double.config, seed=1).half()
    cache = make_cache(kind, half, 1, len(IDS), **options)
    with torch.no_grad():
        half(torch.tensor([IDS]), cache, logits_to_keep=1)
    wide = cache.nbytes_by().get("scores", 0)  # scores are fp32 at least: in float64 they are twice as wide
    assert fp16_bytes(found, 8) - found.nbytes_by.get("scores", 0) == cache.nbytes - wide


def test_points_carry_what_was_measured():
    found = evaluate(tiny_model(), IDS, {"full": "full", "heavy": SPECS["heavy"]}, progress=False)
    full, heavy = points(found, {"full": ("full", "", "full"), "heavy": ("eviction", "heavy", "heavy_hitter")}, 8)
    assert (full.title, heavy.title) == ("full", "eviction, heavy")
    assert full.kl == 0 and full.top1 == 1 and full.nbytes == 70 * 2 * 2 * 2 * 8 * 2
    assert heavy.perplexity == found["heavy"].perplexity and heavy.kl > 0 and heavy.nbytes < full.nbytes


def test_the_equal_window_is_the_largest_that_fits():
    config = ModelConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, vocab_size=9)
    one = config.kv_bytes_per_token(4)
    for nbytes, window in ((10 * one, 6), (10 * one + one - 1, 6), (5 * one, 1)):
        assert equal_window(config, nbytes, 4, 4) == window
        cache = make_cache("sliding", GPT(config), 1, 20, window=window, sinks=4)
        cache.append(0, *torch.zeros(2, 1, 4, 1, 8), torch.tensor([[0]]))
        cache.append(1, *torch.zeros(2, 1, 4, 1, 8), torch.tensor([[0]]))
        assert nbytes - one < cache.nbytes <= nbytes
    with pytest.raises(ValueError, match="no window is left beside 4 sinks"):
        equal_window(config, 4 * one, 4, 4)


def point(name, nbytes, perplexity):
    return Point(name, "", "full", nbytes, perplexity, 0.0, 1.0)


def test_nothing_on_the_frontier_is_beaten_and_all_else_is():
    named = [point("full", 1000, 10), point("good", 300, 11), point("bad", 310, 12), point("worse", 900, 10.5)]
    assert [p.line for p in undominated(named)] == ["good", "worse", "full"]
    close = [point("a", 100, 12), point("b", 102, 11)]  # bytes within 3 % count as equal
    assert [p.line for p in undominated(close)] == ["b"]
    assert [p.line for p in undominated(close, slack=0)] == ["a", "b"]


@pytest.mark.parametrize(
    "low, high, words", [(0.8, 0.95, "better than"), (1.1, 1.3, "worse than"), (0.9, 1.1, "not to be told apart from")]
)
def test_the_verdict_is_the_intervals(low, high, words):
    said = verdict("this", "that", Spread((low + high) / 2, low, high))
    assert f"this is {words} that" in said and f"{low:.3f} to {high:.3f}" in said
