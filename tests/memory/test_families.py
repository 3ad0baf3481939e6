"""Every decoder that transformers knows: our layers against the caches that its own models fill.

transformers_caches.json was measured on transformers 5.24.0: each class's default model on the meta device, nine tokens
in, then the shapes in its cache (values a token, values of states with k - 1 convolution columns, windows, parameters).
"""

import json

import pytest

from kvlab.memory import ConfigError, architecture, number_format
from kvlab.memory.params import parameter_count

from .facts import HERE
from .families_from_transformers import FILE, families

transformers = pytest.importorskip("transformers", reason="transformers is not installed: its classes are the oracle")
MEASURED = json.loads((HERE / "transformers_caches.json").read_text())
SAME_VERSION = transformers.__version__ == MEASURED["transformers"]
needs_version = pytest.mark.skipif(
    not SAME_VERSION, reason=f"measured on transformers {MEASURED['transformers']}, not {transformers.__version__}"
)
FP16 = number_format("fp16")

# families whose default model keeps something else than its architecture needs, or cannot be read without a guess
KNOWN_DIFFERENCES = {
    "cpmant": "its cache also holds the 32 prompt tokens that the model adds itself",
    "deepseek_v4": "keys and values are one tensor, which the measurement counts twice",
    "florence2": "its wrapper feeds one start token in place of those given",
    "minimax": "its lightning states are kept outside of the cache's layers",
    "mistral_large4": "nine layers leave the index to a neighbour, which its configuration does not say",
}
REFUSED = {
    "glm4_moe": "head_dim must be given",
    "glm4v_moe": "head_dim must be given",
    "zaya": "state of their own",
    "unlimited_ocr": "reference_sliding_attention",
}


@pytest.fixture(scope="module")
def classes():
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return CONFIG_MAPPING


def default_config(classes, family):
    config = classes[family]().to_dict()
    return {**config, "is_decoder": True} if "is_decoder" in config else config


@needs_version
def test_the_table_says_what_transformers_says():
    assert json.loads(FILE.read_text()) == json.loads(json.dumps(families()))


@needs_version
def test_most_families_are_measured():
    assert len(MEASURED["caches"]) >= 220


@needs_version
@pytest.mark.parametrize("family", sorted(set(MEASURED["caches"]) - set(KNOWN_DIFFERENCES) - set(REFUSED)))
def test_layers_equal_the_real_cache(classes, family):
    measured = MEASURED["caches"][family]
    arch = architecture(default_config(classes, family))
    own = [layer for layer in arch.layers if "cross" not in measured or layer.kind != "cross"]
    values = sum(layer.kv_bytes(1, FP16, FP16) for layer in own if layer.kind != "cross") // 2
    assert values == measured["values"]
    assert sum(layer.state_bytes() for layer in own) // 4 == measured["state"]
    windows = {}
    for layer in own:
        layer = getattr(layer, "attention", layer)
        if window := getattr(layer, "window", None) or getattr(layer, "chunk", None):
            windows[str(window)] = windows.get(str(window), 0) + 1
    expected = {} if family == "gpt_neo" else measured["windows"]  # transformers masks its local layers, and keeps all
    assert (windows if family != "gpt_neo" else {}) == expected
    if "cross" in measured:
        cross = sum(layer.token_bytes(FP16, FP16) for layer in arch.layers if layer.kind == "cross") // 2
        assert cross == measured["cross"]
    assert not arch.warnings


@needs_version
@pytest.mark.parametrize("family", sorted(REFUSED))
def test_what_cannot_be_read_is_refused(classes, family):
    with pytest.raises(ConfigError, match=REFUSED[family]):
        architecture(default_config(classes, family))


@needs_version
def test_parameters_within_two_percent_or_not_given(classes):
    counted = 0
    for family, measured in MEASURED["caches"].items():
        if "params" not in measured or family in REFUSED:
            continue
        arch = architecture(default_config(classes, family))
        count = parameter_count(arch)
        if count is None or classes[family]().to_dict().get("text_config"):  # a wrapper has an image encoder besides
            continue
        assert count == pytest.approx(measured["params"], rel=0.02), family
        counted += 1
    assert counted >= 80


@needs_version
def test_every_decoder_is_computed_or_refused_in_a_sentence(classes):
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    refused = []
    for family in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        try:
            config = default_config(classes, family)
        except Exception:  # gemma4_assistant cannot be made without arguments
            continue
        try:
            assert architecture(config).layers
        except ConfigError as error:
            refused.append(family)
            assert "\n" not in str(error)
    assert set(refused) <= {"blt", "reformer", "xlnet", "glm4_moe", "zaya"}


def test_one_model_is_run_here_and_now():
    """Not from the file: a small hybrid model of the installed version, on the meta device."""
    import torch

    config = transformers.Qwen2Config(
        hidden_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, intermediate_size=96
    )
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        cache = model(torch.zeros((1, 9), dtype=torch.long, device="meta"), use_cache=True).past_key_values
    kept = sum(layer.keys.numel() + layer.values.numel() for layer in cache.layers)
    assert kept == sum(layer.kv_bytes(9, FP16, FP16) for layer in architecture(config).layers) // 2
