"""The size of a recurrent layer's state, family by family. Loads no torch.

Each returns a State: parts of (units, values a unit), where a unit is a head or a channel. A causal convolution of
width k needs the k - 1 newest inputs (transformers keeps k of them, llama.cpp k - 1). All in fp32.
"""

from __future__ import annotations

from .layers import State
from .reading import ConfigError, find, whole
from .spellings import HEADS, HIDDEN, SSM_CONV, SSM_EXPAND, SSM_GROUPS, SSM_HEAD_DIM, SSM_HEADS, SSM_STATE


def recurrent_state(config: dict, family: str) -> State:
    """The state of one recurrent layer; ConfigError when the keys that size it are missing."""
    hidden = whole(config, *HIDDEN)
    if family == "rwkv":  # RWKV-4: two shifted inputs, and numerator, denominator and maximum of the running average
        return State(((hidden, 2), (whole(config, "attention_hidden_size", default=hidden), 3)))
    if family == "recurrent_gemma":  # a gated linear recurrence per channel, and its convolution
        width = whole(config, "lru_width", default=hidden)
        return State(((width, 1 + whole(config, "conv1d_width", default=4) - 1),))
    if family == "xlstm":
        return _xlstm(config, hidden)
    if "linear_num_value_heads" in config:
        return _gated_delta_net(config)
    if "linear_num_heads" in config or isinstance(config.get("linear_attn_config"), dict):
        return _kimi(config)
    if find(config, *SSM_STATE)[0]:
        return _mamba(config, hidden, family)
    if family.startswith("minimax"):  # lightning attention: one head_dim x head_dim matrix a head
        heads = whole(config, *HEADS)
        dim = whole(config, "head_dim", default=hidden // heads)
        return State(((heads, dim * dim),))
    raise ConfigError(
        f"model_type {family!r} has recurrent layers whose state this calculator cannot size from its keys"
    )


def conv_state(config: dict) -> State:
    """LFM2: a gated short convolution in place of attention."""
    return State(((whole(config, *HIDDEN), whole(config, "conv_L_cache") - 1),))


def _mamba(config: dict, hidden: int, family: str) -> State:
    state = whole(config, *SSM_STATE)
    conv = whole(config, *SSM_CONV) - 1
    head_keys = [k for k in SSM_HEAD_DIM if family == "mamba2" or k != "head_dim"]
    if find(config, *head_keys)[0]:  # Mamba-2: heads share the inputs B and C in groups
        heads = whole(config, *[k for k in SSM_HEADS if family == "mamba2" or k != "num_heads"])
        if find(config, *head_keys)[1] == "auto":  # Bamba, Granite 4, Falcon-H1: the inner width shared out
            inner = config.get("mamba_d_ssm") or whole(config, *SSM_EXPAND) * hidden
            head_dim = inner // heads
        else:
            head_dim = whole(config, *head_keys)
        groups = whole(config, *SSM_GROUPS, default=1)
        return State(((heads, head_dim * (state + conv)), (groups, 2 * state * conv)))
    if family.startswith("mamba") or family == "falcon_mamba":
        inner = whole(config, "intermediate_size", default=None)
    else:
        inner = None  # a hybrid's intermediate_size is its MLP's
    _, expand = find(config, *SSM_EXPAND)
    inner = inner or max(1, int((2 if expand is None else expand) * hidden))
    return State(((inner, state + conv),))


def _gated_delta_net(config: dict) -> State:
    """Qwen3-Next and Qwen3.5: a key_dim x value_dim matrix a value head; the convolution runs over q, k and v."""
    k_heads, v_heads = whole(config, "linear_num_key_heads"), whole(config, "linear_num_value_heads")
    k_dim, v_dim = whole(config, "linear_key_head_dim"), whole(config, "linear_value_head_dim")
    conv = whole(config, "linear_conv_kernel_dim") - 1
    return State(((v_heads, k_dim * v_dim + conv * v_dim), (k_heads, 2 * conv * k_dim)))


def _kimi(config: dict) -> State:
    """Kimi delta attention: a square matrix a head; one convolution each over q, k and v."""
    own = config.get("linear_attn_config")  # the published files nest them, transformers' own do not
    if own:
        heads, dim, width = whole(own, "num_heads"), whole(own, "head_dim"), whole(own, "short_conv_kernel_size")
    else:
        heads, dim = whole(config, "linear_num_heads"), whole(config, "linear_head_dim")
        width = whole(config, "linear_conv_kernel_dim")
    conv = width - 1
    return State(((heads, dim * dim + 3 * conv * dim),))


def _xlstm(config: dict, hidden: int) -> State:
    """mLSTM: a qk_dim x v_dim matrix, a qk_dim normaliser and one maximum a head."""
    heads = whole(config, "num_heads")
    qk = int(hidden * (config.get("qk_dim_factor") or 0.5)) // heads
    v = int(hidden * (config.get("v_dim_factor") or 1.0)) // heads
    return State(((heads, qk * v + qk + 1),))
