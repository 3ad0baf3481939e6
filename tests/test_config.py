"""ModelConfig: derived fields, what cannot be a model, and no torch."""

import subprocess
import sys

import pytest

from kvlab.config import ModelConfig


def test_derived_fields():
    c = ModelConfig(hidden_size=96, num_attention_heads=6, num_hidden_layers=3)
    assert (c.num_key_value_heads, c.head_dim, c.intermediate_size) == (6, 16, 256)
    assert c.layer_types == ("full_attention",) * 3 and c.group_size == 1
    assert ModelConfig(hidden_size=96, num_attention_heads=6, num_key_value_heads=2).group_size == 3
    assert ModelConfig(hidden_size=100, num_attention_heads=6, head_dim=32).head_dim == 32


def test_windows_by_layer():
    c = ModelConfig(num_hidden_layers=2, sliding_window=5)
    assert [c.window(i) for i in (0, 1)] == [5, 5]
    c = ModelConfig(num_hidden_layers=2, sliding_window=5, layer_types=["full_attention", "sliding_attention"])
    assert [c.window(i) for i in (0, 1)] == [None, 5] and isinstance(c.layer_types, tuple)


def test_bytes_of_a_token():
    """LLaMA-7B: 32 layers of 32 heads of 128, half precision: 512 KiB a token, so 512 MiB at 1,024 tokens."""
    llama = ModelConfig(hidden_size=4096, num_hidden_layers=32, num_attention_heads=32)
    assert llama.kv_bytes_per_token() * 1024 == 512 * 2**20
    gqa = llama.with_(num_key_value_heads=8)
    assert gqa.kv_bytes_per_token() == llama.kv_bytes_per_token() // 4
    assert gqa.kv_bytes_per_token(1) == gqa.kv_bytes_per_token() // 2


@pytest.mark.parametrize(
    "changes,message",
    [
        ({"num_key_value_heads": 3}, "num_key_value_heads=3 must divide num_attention_heads=4"),
        ({"num_key_value_heads": 8}, "num_key_value_heads=8 must divide num_attention_heads=4"),
        ({"hidden_size": 66}, "hidden_size=66 is not a multiple of num_attention_heads=4; state head_dim"),
        ({"head_dim": 7}, "head_dim=7 must be even: RoPE turns pairs"),
        ({"vocab_size": 0}, "vocab_size=0 must be at least 1"),
        ({"num_hidden_layers": -1}, "num_hidden_layers=-1 must be at least 1"),
        ({"sliding_window": 0}, "sliding_window=0 must be at least 1"),
        ({"layer_types": ["full_attention"]}, "layer_types names 1 layers, num_hidden_layers=4"),
        ({"layer_types": ["linear_attention"] * 4}, "layer type 'linear_attention' is neither"),
        ({"layer_types": ["sliding_attention"] * 4}, "sliding_window must say how many keys"),
    ],
    ids=str,
)
def test_what_cannot_be_a_model(changes, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig(**changes)


@pytest.mark.parametrize("value", [2.0, "4", True])
def test_sizes_are_ints(value):
    with pytest.raises(TypeError, match=f"num_attention_heads={value!r} must be an int"):
        ModelConfig(num_attention_heads=value)


def test_with_names_an_unknown_field():
    with pytest.raises(ValueError, match="ModelConfig has no field n_heads"):
        ModelConfig().with_(n_heads=3)
    c = ModelConfig()
    with pytest.raises(AttributeError):
        c.hidden_size = 3


def test_kvlab_and_its_config_load_no_torch():
    code = "import sys, kvlab, kvlab.config; assert 'torch' not in sys.modules; kvlab.ModelConfig(); dir(kvlab); "
    code += "assert 'torch' not in sys.modules; kvlab.GPT; assert 'torch' in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_unknown_name_of_the_package():
    import kvlab

    with pytest.raises(AttributeError, match="module 'kvlab' has no attribute 'Cache'"):
        kvlab.Cache  # noqa: B018


def test_a_copy_with_fewer_layers_needs_no_word_about_kv_owner():
    config = ModelConfig(num_hidden_layers=4)
    assert config.with_(num_hidden_layers=2, layer_types=None).kv_owner == (0, 1)
    shared = config.with_(kv_owner=(0, 0, 2, 2))
    assert shared.with_(hidden_size=64, head_dim=None).kv_owner == (0, 0, 2, 2)
    with pytest.raises(ValueError, match="kv_owner names 4 layers"):
        shared.with_(num_hidden_layers=2, layer_types=None)
