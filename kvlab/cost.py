"""What a generation costs and holds, in closed form: the prediction that the counters are then checked against.

A Llama-style layer multiplies each token by seven matrices (q, k, v, o and SwiGLU's gate, up, down); a matrix product
of an (m x k) with a (k x n) matrix is 2*m*k*n FLOPs. Attention of T queries over S keys is two such products per head,
q @ k.T and weights @ v: 4 * T * S * heads * head_dim. It is counted dense, masked pairs included, as the hardware does
it without a causal kernel. Latent attention has two forms that differ in both terms: latent_flops().
Norms, RoPE, softmax and activations are left out: they grow with T, not with T * S * d.
Loads no torch.
"""

from __future__ import annotations

from typing import NamedTuple

from .config import ModelConfig

FORMS = ("absorbed", "expanded")  # of latent attention
KINDS = ("none", "growing", "full", "sliding", "quantized", "paged")


class Flops(NamedTuple):
    """FLOPs in their two terms: `projections` grow with the tokens computed, `attention` with the pairs."""

    projections: int
    attention: int

    @property
    def total(self) -> int:
        return self.projections + self.attention


def layer_flops(config: ModelConfig) -> int:
    """FLOPs of the seven matrices of a layer with its own keys and values, for one token; of a latent's, absorbed."""
    return attention_flops(config, 1, 1, "absorbed").projections + 6 * config.hidden_size * config.intermediate_size


def attention_flops(config: ModelConfig, new: int, seen: int, form: str | None = None) -> Flops:
    """One layer's attention, `new` queries (T) over `seen` keys (S). form: of latent attention, see latent_flops()."""
    c = config
    if c.kv_lora_rank is not None:
        return latent_flops(c, new, seen, form)
    queries, keys = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    return Flops(2 * new * c.hidden_size * (2 * queries + 2 * keys), 4 * new * seen * queries)  # q and o; k and v


def spared_flops(config: ModelConfig, new: int) -> int:
    """What the layers that follow another (kv_owner) need not compute: the projections to keys and values."""
    heads, key, value = config.kv_shape
    return (config.num_hidden_layers - len(config.kv_layers)) * 2 * new * config.hidden_size * heads * (key + value)


def latent_flops(config: ModelConfig, new: int, seen: int, form: str | None = None) -> Flops:
    """One layer's latent attention, `new` queries over `seen` latents; form: "absorbed", "expanded", None: the cheaper.

    kv_b_proj unfolds a latent into keys and values. Absorbed multiplies it with each of the `new` queries and outputs,
    expanded with each of the `seen` latents; in return an absorbed head compares and sums whole latents, kv_lora_rank
    wide, an expanded one its own narrow keys and values. Raises ValueError for another form.
    """
    c, H = config, config.num_attention_heads
    form = cheaper_form(c, new, seen) if form is None else form
    if form not in FORMS:
        raise ValueError(f"form={form!r} must be 'absorbed', 'expanded' or None (the cheaper one)")
    key = c.qk_nope_head_dim + c.qk_rope_head_dim
    q = c.hidden_size * H * key if c.q_lora_rank is None else c.q_lora_rank * (c.hidden_size + H * key)
    always = q + c.hidden_size * (c.kv_lora_rank + c.qk_rope_head_dim) + H * c.v_head_dim * c.hidden_size
    unfold = c.kv_lora_rank * H * (c.qk_nope_head_dim + c.v_head_dim)
    if form == "absorbed":
        return Flops(2 * new * (always + unfold), 2 * new * seen * H * (2 * c.kv_lora_rank + c.qk_rope_head_dim))
    return Flops(2 * (new * always + seen * unfold), 2 * new * seen * H * (key + c.v_head_dim))


def cheaper_form(config: ModelConfig, new: int, seen: int) -> str:
    """The form of latent attention with fewer FLOPs; expanded where they are equal."""
    absorbed, expanded = (latent_flops(config, new, seen, form).total for form in FORMS)
    return "absorbed" if absorbed < expanded else "expanded"


def forward_flops(config: ModelConfig, new: int, seen: int, logits: int = 1) -> Flops:
    """One forward pass: `new` tokens (T) over `seen` keys (S, the new ones included), giving `logits` logit rows."""
    c = config
    head = logits * 2 * c.hidden_size * c.vocab_size
    attention, mlp = attention_flops(c, new, seen), 6 * new * c.hidden_size * c.intermediate_size
    projections = c.num_hidden_layers * (attention.projections + mlp) - spared_flops(c, new)
    return Flops(projections + head, c.num_hidden_layers * attention.attention)


def step_flops(config: ModelConfig, kind: str, length: int, window: int | None = None) -> Flops:
    """FLOPs to compute the token after `length` tokens, everything before it being cached where the kind caches.

    kind "none" recomputes all `length` tokens; the others compute one row over `length` keys, "sliding" over
    at most `window`. Batch 1. Raises ValueError for an unknown kind or a window below 1.
    """
    _check(kind, window)
    if kind == "none":
        return forward_flops(config, length, length)
    return forward_flops(config, 1, min(window, length) if kind == "sliding" else length)


def generation_flops(config: ModelConfig, kind: str, prompt: int, new: int, window: int | None = None) -> Flops:
    """FLOPs to generate `new` tokens after `prompt` tokens: the prefill yields the first, new - 1 steps the others.

    Step i (0 .. new-1) has prompt + i tokens behind it. Without a cache each step recomputes them; with one, step 0 is
    the prefill (prompt x prompt pairs, in a sliding cache too: the chunk sees itself) and the others compute one row.
    The sums are closed: no loop over steps, but for latent attention, whose form may change from step to step.
    """
    _check(kind, window)
    if prompt < 1 or new < 1:
        raise ValueError(f"prompt={prompt} and new={new} must both be at least 1")
    if config.kv_lora_rank is not None:
        steps = [step_flops(config, kind, n, window) for n in range(prompt + 1, prompt + new)]
        return Flops(*map(sum, zip(forward_flops(config, prompt, prompt), *steps)))
    last = prompt + new - 1  # tokens behind the last step
    if kind == "none":
        tokens, pairs = _sum(last) - _sum(prompt - 1), _squares(last) - _squares(prompt - 1)
    else:
        tokens, pairs = prompt + new - 1, prompt**2
        if kind == "sliding":
            grows = max(min(last, window), prompt)  # below the window a step sees all there is
            pairs += _sum(grows) - _sum(prompt) + (last - grows) * window
        else:
            pairs += _sum(last) - _sum(prompt)
    unit = forward_flops(config, 1, 1, logits=0)
    head = new * 2 * config.hidden_size * config.vocab_size
    return Flops(tokens * unit.projections + head, pairs * unit.attention)


def held_bytes(config: ModelConfig, kind: str, length: int, window: int | None = None, itemsize: float = 2) -> float:
    """Bytes of keys and values held after `length` tokens of one sequence; nothing else is counted."""
    _check(kind, window)
    if kind == "none":
        return 0
    return (min(length, window) if kind == "sliding" else length) * config.kv_bytes_per_token(1) * itemsize


def _check(kind: str, window: int | None) -> None:
    if kind not in KINDS:
        raise ValueError(f"kind {kind!r} is none of {', '.join(KINDS)}")
    if kind == "sliding" and (window is None or window < 1):
        raise ValueError(f"window={window} must be at least 1 for a sliding cache")


def _sum(n: int) -> int:
    return n * (n + 1) // 2


def _squares(n: int) -> int:
    return n * (n + 1) * (2 * n + 1) // 6
