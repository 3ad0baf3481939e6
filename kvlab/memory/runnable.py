"""Which config.json kvlab's own GPT can run, and the ModelConfig it becomes: the Llama family. Loads no torch.

The GPT knows RMSNorm, rotary positions over the whole head, SwiGLU, and MHA, GQA or MQA with optional biases and
windows; and DeepSeek's latent attention, as long as no layer is a mixture of experts. A configuration that needs
anything else is refused by name; the calculator still counts its bytes.
"""

from __future__ import annotations

from kvlab.config import ModelConfig, check_owners

from .reading import ConfigError, find, flag, load_config, whole

# model_type -> what transformers assumes where the key is missing (its configuration classes, version 5)
_FAMILIES = {
    "llama": {"max_position_embeddings": 2048},
    "mistral": {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": {"max_position_embeddings": 32768, "num_key_value_heads": 32, "sliding_window": 4096},
    "deepseek_v2": {"max_position_embeddings": 2048, "first_k_dense_replace": 0},
    "deepseek_v3": {"max_position_embeddings": 4096, "first_k_dense_replace": 3},
}
LATENT = ("deepseek_v2", "deepseek_v3")
_LATENT_SIZES = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
SUPPORTED = (
    "Llama, SmolLM, TinyLlama, Mistral, Qwen2 or Qwen2.5 (model_type llama, mistral or qwen2), and a DeepSeek-V2 or V3 "
    "without experts (deepseek_v2, deepseek_v3)"
)

# key that makes a model something else -> what that is called
_FOREIGN = {
    "num_local_experts": "a mixture of experts",
    "num_experts": "a mixture of experts",
    "n_routed_experts": "a mixture of experts",
    "kv_lora_rank": "multi-head latent attention (MLA)",
    "use_qk_norm": "normalised queries and keys (qk-norm)",
    "qk_norm": "normalised queries and keys (qk-norm)",
    "no_rope_layers": "layers without rotary positions (NoPE)",
    "vision_config": "an image encoder",
    "quantization_config": "quantized weights",
}


def model_config(config) -> ModelConfig:
    """The ModelConfig of a Llama-family configuration: a dict, a config.json or a folder holding one.

    Reads attention_bias, mlp_bias, Qwen2's qkv bias, use_sliding_window with max_window_layers, layer_types, and rotary
    scaling in both spellings (rope_scaling with rope_theta; rope_parameters of transformers 5): linear and llama3.
    Raises ConfigError, which names what kvlab's GPT cannot run and what it can.
    """
    config = load_config(config)
    family = config.get("model_type")
    if isinstance(family, str):
        family = family.removeprefix("kvlab_")
    if family not in _FAMILIES:
        raise ConfigError(f"kvlab's GPT cannot run model_type={family!r}; it runs {SUPPORTED}")
    latent = _latent(config, family) if family in LATENT else {}
    for key, what in _FOREIGN.items():
        if config.get(key) and not (latent and key in ("kv_lora_rank", "n_routed_experts")):
            raise ConfigError(f"kvlab's GPT cannot run {what} ({key}={_short(config[key])}); it runs {SUPPORTED}")
    if config.get("hidden_act", "silu") not in ("silu", "swish"):
        raise ConfigError(
            f"kvlab's GPT cannot run hidden_act={config['hidden_act']!r}; its MLP is SwiGLU, hidden_act 'silu'"
        )

    defaults = _FAMILIES[family]
    layers, heads = whole(config, "num_hidden_layers"), whole(config, "num_attention_heads")
    theta, scaling = rope(config)
    window, layer_types = _windows(config, family, layers)
    try:
        return ModelConfig(
            vocab_size=whole(config, "vocab_size"),
            hidden_size=whole(config, "hidden_size"),
            intermediate_size=whole(config, "intermediate_size"),
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=whole(
                config, "num_key_value_heads", default=defaults.get("num_key_value_heads", heads)
            ),
            head_dim=whole(config, "head_dim", default=None),
            **latent,
            max_position_embeddings=whole(
                config, "max_position_embeddings", default=defaults["max_position_embeddings"]
            ),
            rms_norm_eps=_number("rms_norm_eps", config.get("rms_norm_eps", 1e-6)),
            rope_theta=theta,
            rope_scaling=scaling,
            attention_bias=family in ("llama", *LATENT) and flag(config, "attention_bias"),
            qkv_bias=family == "qwen2",
            mlp_bias=family != "deepseek_v3" and flag(config, "mlp_bias"),
            tie_word_embeddings=flag(config, "tie_word_embeddings"),
            sliding_window=window,
            layer_types=layer_types,
            kv_owner=owners_in(config, layers),
            bos_token_id=_token(config, "bos_token_id"),
            eos_token_id=_token(config, "eos_token_id"),
            pad_token_id=_token(config, "pad_token_id"),
        )
    except (ValueError, TypeError) as error:
        raise error if isinstance(error, ConfigError) else ConfigError(str(error)) from None


def _latent(config: dict, family: str) -> dict:
    """The sizes of DeepSeek's latent attention. ConfigError where a layer has experts, or scores another scale.

    transformers fills in the same sizes where the file is silent; there a q_lora_rank of null means plain queries.
    """
    dense = whole(config, "first_k_dense_replace", default=_FAMILIES[family]["first_k_dense_replace"], least=0)
    if config.get("n_routed_experts", True) and dense < whole(config, "num_hidden_layers"):
        raise ConfigError(
            f"kvlab's GPT cannot run a mixture of experts, which this {family} has from layer {dense} on "
            f"(first_k_dense_replace={dense}); it runs {SUPPORTED}"
        )
    for name in ("rope_parameters", "rope_scaling"):  # YaRN's mscale; where there is no scaling it does nothing
        given = config.get(name)
        kind = (given.get("rope_type") or given.get("type") or "default") if isinstance(given, dict) else "default"
        if kind != "default" and given.get("mscale_all_dim"):
            raise ConfigError(
                f"kvlab's GPT cannot run {name} of type {kind!r} with mscale_all_dim={given['mscale_all_dim']!r}: it "
                "changes the scale of the scores"
            )
    sizes = {name: whole(config, name, default=value) for name, value in _LATENT_SIZES.items()}
    return {**sizes, "q_lora_rank": whole(config, "q_lora_rank", default=None) if "q_lora_rank" in config else 1536}


def owners_in(config: dict, layers: int) -> tuple[int, ...] | None:
    """For each layer the layer whose keys and values it uses, if the configuration says so (kvlab's own key)."""
    if config.get("kv_owner") is None:
        return None
    try:
        return check_owners(config["kv_owner"], layers)
    except (ValueError, TypeError) as error:
        raise ConfigError(str(error)) from None


def rope(config: dict) -> tuple[float, dict | None]:
    """(theta, scaling): scaling is None or a dict whose rope_type is "linear" or "llama3"; both spellings are read."""
    name = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    scaling = _merged(config.get("rope_parameters") or {}, config.get("rope_scaling") or {})
    if any(isinstance(value, dict) for value in scaling.values()):
        raise ConfigError(f"kvlab's GPT cannot run {name} that differs between layer types: {_short(scaling)}")
    kind = scaling.pop("type", None)
    kind = scaling.pop("rope_type", kind) or "default"
    inner = scaling.pop("rope_theta", None)
    _, theta = find(
        {"rope_theta": config.get("rope_theta"), f"{name}.rope_theta": inner}, "rope_theta", f"{name}.rope_theta"
    )
    part = scaling.pop("partial_rotary_factor", config.get("partial_rotary_factor"))
    if part not in (None, 1, 1.0):
        raise ConfigError(f"kvlab's GPT cannot run partial_rotary_factor={part!r}; it turns the whole head")
    theta = _number("rope_theta", 10000.0 if theta is None else theta)
    needed = {
        "default": (),
        "linear": ("factor",),
        "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    }
    if kind not in needed:
        raise ConfigError(f"kvlab's GPT cannot run rope_type={kind!r}; it runs default, linear and llama3")
    if kind == "default":
        return theta, None
    for key in needed[kind]:
        if key not in scaling:
            raise ConfigError(f"{name} of rope_type {kind!r} has no {key}")
    return theta, {"rope_type": kind, **{key: _number(f"{name}.{key}", scaling[key]) for key in needed[kind]}}


def _merged(new: dict, old: dict) -> dict:
    """Some files carry rope_parameters and rope_scaling side by side: allowed as long as they agree."""
    for name, value in (("rope_parameters", new), ("rope_scaling", old)):
        if not isinstance(value, dict):
            raise ConfigError(
                f"{name}={_short(value)} must be an object such as {{'rope_type': 'linear', 'factor': 2.0}}"
            )
    for key in set(new) & set(old):
        if new[key] != old[key]:
            raise ConfigError(f"rope_parameters.{key}={new[key]!r} contradicts rope_scaling.{key}={old[key]!r}")
    return {**old, **new}


def _windows(config: dict, family: str, layers: int) -> tuple[int | None, tuple[str, ...] | None]:
    """(sliding_window, layer_types) as transformers reads them for this family."""
    types = config.get("layer_types")
    if family == "llama" or family in LATENT:
        types = None if types and set(types) == {"full_attention"} else types
        if types:
            raise ConfigError(f"a {family} configuration has only full attention, not layer_types={_short(types)}")
        return None, None
    default = None if "sliding_window" in config else _FAMILIES[family]["sliding_window"]
    window = whole(config, "sliding_window", default=default)
    if family == "qwen2" and not flag(config, "use_sliding_window"):
        window = None  # Qwen2 and 2.5 state a window and switch it off
    if window is None:
        return None, None
    if types is None and family == "qwen2":
        first = whole(config, "max_window_layers", default=28, least=0)  # the layers below it attend to everything
        types = ["sliding_attention" if layer >= first else "full_attention" for layer in range(layers)]
    return window, None if types is None else tuple(types)


def _number(name: str, value) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise ConfigError(f"{name}={value!r} must be a positive number")
    return value


def _token(config: dict, name: str):
    value = config.get(name)
    return tuple(value) if isinstance(value, list) else value


def _short(value) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
