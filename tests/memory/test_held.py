"""The calculator against real caches: 200 random models and batches for every kind of cache, byte for byte."""

import random
from types import SimpleNamespace

import pytest
import torch

from kvlab.caches import KINDS, make_cache
from kvlab.config import ModelConfig
from kvlab.memory import ConfigError, estimate
from kvlab.memory.architecture import model_config
from kvlab.model import GPT

DTYPES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
MODELS = 200


@pytest.fixture(autouse=True)
def one_thread():
    """Thousands of tiny tensors: threads only get in each other's way."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def draw(seed):
    """A random model, batch, lengths and dtype, and options for each kind of cache."""
    r = random.Random(seed)
    kv = r.choice([1, 2, 3])
    config = ModelConfig(
        vocab_size=64,
        hidden_size=64,
        num_hidden_layers=r.choice([1, 2, 3]),
        num_attention_heads=kv * r.choice([1, 2, 4]),
        num_key_value_heads=kv,
        head_dim=r.choice([8, 16, 24, 32]),
    )
    rows = r.choice([1, 2, 3])
    lengths = [r.randint(1, 60) for _ in range(rows)]
    if r.random() < 0.5:
        lengths = [lengths[0]] * rows
    dtype = r.choice(list(DTYPES))
    options = {
        "growing": {},
        "full": {},
        "sliding": {"window": r.randint(1, 40), "sinks": r.choice([0, 1, 4]), "sinks_at": r.choice(["text", "cache"])},
        "quantized": {
            "k_bits": r.choice([8, 4, 2, 16, "fp8", "fp8_e5m2"]),
            "v_bits": r.choice([8, 4, 2, 16, "fp8"]),
            "key_axis": r.choice(["channel", "token"]),
            "group_size": r.choice([8, 64]),
            "residual_length": r.choice([0, 8, 20]),
        },
        "paged": {"block_size": r.choice([1, 4, 16]), **({"num_blocks": 200} if r.random() < 0.2 else {})},
    }
    max_length = max(lengths) + r.choice([0, 1, 17])
    options |= {
        kind: {"budget": draw_budget(r, config, max_length)} for kind in ("heavy_hitter", "random", "first_last")
    }
    options["first_last"]["first"] = 0
    return config, lengths, max_length, dtype, options


def draw_budget(r, config, max_length):
    """One for all heads or one for each; in half of the cases near max_length, where little is evicted or nothing."""
    least, most = r.choice([(1, 40), (max_length - 3, max_length + 3)])
    if r.random() < 0.5:
        return max(1, r.randint(least, most))
    heads = range(config.num_key_value_heads)
    return [[max(1, r.randint(least, most)) for _ in heads] for _ in range(config.num_hidden_layers)]


def filled(kind, config, lengths, max_length, dtype, options):
    """A cache of this kind after `lengths` tokens in its rows, fed as the model feeds it."""
    model = SimpleNamespace(config=config, rope_freq=torch.ones(config.head_dim // 2))
    cache = make_cache(kind, model, len(lengths), max_length, **options)
    left = list(lengths)
    while any(left):
        pos = cache.next_positions(left)
        pos = pos[:, : cache.max_chunk(pos.shape[1])]
        shape = (len(lengths), config.num_key_value_heads, pos.shape[1], config.head_dim)
        for layer in config.kv_layers:
            cache.append(layer, torch.rand(shape).to(dtype), torch.rand(shape).to(dtype), pos)
        cache.advance(pos)
        left = [n - int((row >= 0).sum()) for n, row in zip(left, pos)]
    assert cache.lengths == lengths
    return cache


def tokens_stored(kind, lengths, max_length, options):
    """Rows x tokens that the article's formula is to count for this kind."""
    rows = len(lengths)
    if kind == "growing":
        return rows * max(lengths)
    if kind == "full":
        return rows * max_length
    if kind == "sliding":
        return rows * (options["window"] + options["sinks"])
    block = options["block_size"]
    return block * options.get("num_blocks", rows * -(-max_length // block))


@pytest.mark.parametrize("kind", list(draw(0)[4]))
def test_held_bytes_equal_the_real_cache(kind):
    for seed in range(MODELS):
        config, lengths, max_length, dtype, options = draw(seed)
        cache = filled(kind, config, lengths, max_length, dtype, options[kind])
        by = cache.nbytes_by()
        found = estimate(
            config, seq_len=lengths, kv_dtype=DTYPES[dtype], cache=kind, max_length=max_length, **options[kind]
        )
        assert found.held_bytes == sum(by.values()) == cache.nbytes, (seed, kind, by)
        if "budget" in options[kind]:
            budget, dim = options[kind]["budget"], config.head_dim
            table = [[budget] * config.num_key_value_heads] * config.num_hidden_layers
            slots = sum(min(n, max_length) for row in (table if isinstance(budget, int) else budget) for n in row)
            assert by["keys"] == by["values"] == len(lengths) * slots * dim * dtype.itemsize
            assert by["positions"] == len(lengths) * slots * 4 == by.get("scores", by["positions"])
        elif kind != "quantized":
            heads, dim = config.num_key_value_heads, config.head_dim
            one = config.num_hidden_layers * 2 * heads * dim * dtype.itemsize
            assert by["keys"] + by["values"] == tokens_stored(kind, lengths, max_length, options[kind]) * one


def test_quantized_keys_and_values_are_bits_times_values():
    for seed in range(20):
        config, lengths, max_length, dtype, options = draw(seed)
        options = {**options["quantized"], "k_bits": 4, "v_bits": 8}
        by = filled("quantized", config, lengths, max_length, dtype, options).nbytes_by()
        sealed = max_length // options["group_size"] * options["group_size"]
        values = len(lengths) * sealed * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
        assert (by["keys"], by["values"]) == (values * 4 // 8, values)


def test_the_formula_and_the_padded_cache_are_one():
    config, *_ = draw(0)
    cache = filled("full", config, [24, 24], 24, torch.float16, {})
    assert estimate(config, 2, 24).kv_cache_bytes == cache.nbytes_by()["keys"] + cache.nbytes_by()["values"]


def test_every_kind_is_known():
    """A kind that make_cache learns must be learnt here too."""
    config, *_ = draw(1)
    for kind in KINDS:
        assert estimate(config, 1, 8, cache=kind).held_bytes > 0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"cache": "magic"}, "magic"),
        ({"cache": "full", "window": 3}, "no option 'window'"),
        ({"window": 3}, "need cache=kind"),
        ({"cache": "full", "kv_dtype": "q8_0"}, "quantized"),
        ({"cache": "full", "max_length": 4}, "max_length=4"),
        ({"cache": "heavy_hitter", "max_length": 4, "budget": 6}, "max_length=4"),
        ({"cache": "random", "budget": [[3]]}, r"budget=\[\[3\]\] must be an int, or a table"),
    ],
)
def test_refusals(change, words):
    config, *_ = draw(1)
    with pytest.raises(ConfigError, match=words):
        estimate(config, 1, 8, **change)


WRONG = [
    ("sliding", {"window": 0}),
    ("sliding", {"window": -5}),
    ("sliding", {"sinks": -3}),
    ("sliding", {"sinks_at": "here"}),
    ("quantized", {"k_bits": 3}),
    ("quantized", {"v_bits": 8.0}),
    ("quantized", {"key_axis": "row"}),
    ("quantized", {"group_size": 0}),
    ("quantized", {"group_size": 5}),
    ("quantized", {"residual_length": -1}),
    ("paged", {"block_size": 0}),
    ("paged", {"block_size": "16"}),
    ("paged", {"num_blocks": 0}),
    ("heavy_hitter", {"budget": 0}),
    ("heavy_hitter", {"budget": 2.5}),
    ("heavy_hitter", {"budget": "many"}),
    ("random", {"budget": -1}),
    ("random", {"budget": [[1, 1], [1, 0]]}),
    ("first_last", {"budget": [3, 3], "first": 0}),
    ("shared", {"every": 0}),
]


@pytest.mark.parametrize(("kind", "options"), WRONG, ids=str)
def test_what_make_cache_refuses_has_no_bytes(kind, options):
    config = ModelConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    with pytest.raises((ValueError, TypeError)):
        make_cache(kind, GPT(config), 1, 8, **options)
    with pytest.raises(ConfigError, match=next(iter(options)) if options != {"group_size": 5} else "groups of 5"):
        estimate(config, 1, 8, cache=kind, **options)


def test_a_window_that_is_switched_off_is_no_default():
    """Qwen2.5 states a sliding_window and does not use it."""
    raw = {"model_type": "qwen2", "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    raw |= {"num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 40, "use_sliding_window": False}
    for use, slots in ((False, 256), (True, 40)):
        config = {**raw, "use_sliding_window": use, "max_window_layers": 0}
        cache = make_cache("sliding", GPT(model_config(config)), 1, 8)
        assert cache.slots == slots
        assert estimate(config, 1, 8, cache="sliding").held_bytes == slots * estimate(config, 1, 1).kv_bytes_per_token


def test_models_that_kvlab_caches_cannot_hold():
    with pytest.raises(ConfigError, match="state layer"):
        estimate("mamba-130m", 1, 8, cache="full")
