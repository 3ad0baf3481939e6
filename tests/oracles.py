"""Reference implementations for the tests. Nothing here uses kvlab.attention or a cache: weights in, logits out.

dense_logits() is a transformer written a second time: rotary positions by complex numbers, and attention as a loop over
the queries that picks each query's keys by hand. What a cache forgets or rounds is a Rule, applied query by query.
causal_logits() is a third one, on torch's own scaled_dot_product_attention(is_causal=True).
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from eviction_oracle import EVICTING, Eviction, evicting_logits, eviction_rule

from kvlab.config import ModelConfig
from kvlab.model import GPT

# ---- toy models


@functools.cache
def toy(seed=0, dtype=torch.float64, **changes) -> GPT:
    """A two-layer GPT whose attention is not flat. Cached: do not change its weights."""
    fields = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    fields |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    model = GPT(ModelConfig(**{**fields, **changes}), seed=seed)
    rng = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() == 2:
                p *= 8
            elif name.endswith("bias"):
                p.copy_(torch.randn(p.shape, generator=rng) * 0.3)
            else:  # the norms' weights
                p.copy_(1 + 0.2 * torch.randn(p.shape, generator=rng))
    return model.to(dtype).requires_grad_(True)


def ids_for(seed: int, lengths: list[int], vocab: int = 50) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocab, n).tolist() for n in lengths]


# ---- what a query sees


@dataclass(frozen=True)
class Rule:
    """What a cache promises. window, sinks: the last and the first keys that a query sees. Then rounding, sharing."""

    window: int | None = None
    sinks: int = 0
    sinks_at: str = "text"
    k_bits: int | str = 16
    v_bits: int | str = 16
    key_axis: str = "channel"
    group: int = 1
    residual: int | None = None  # None: nothing is ever rounded
    owners: tuple[int, ...] | None = None  # for each layer the layer whose keys and values it uses


def rule_of(kind: str, options: dict) -> Rule | Eviction:
    if kind in EVICTING:
        return eviction_rule(kind, options)
    if kind == "sliding":
        return Rule(options["window"], options.get("sinks", 0), options.get("sinks_at", "text"))
    if kind == "quantized":
        o = {"k_bits": 8, "v_bits": 8, "key_axis": "channel", "group_size": 64, "residual_length": 64, **options}
        return Rule(
            k_bits=o["k_bits"],
            v_bits=o["v_bits"],
            key_axis=o["key_axis"],
            group=o["group_size"],
            residual=o["residual_length"],
        )
    if kind == "shared":
        every = options.get("every") or 2
        return Rule(owners=options.get("owners") or tuple(i - i % every for i in range(99)))
    return Rule()


def keys_for(p: int, rule: Rule, layer_window: int | None) -> tuple[list[int], list[int]]:
    """The tokens that the query at position p sees, and the position at which each one's key stands."""
    limits = [w for w in (rule.window, layer_window) if w is not None]
    tokens, places = [], []
    for j in range(p + 1):
        is_sink = j < rule.sinks
        if not is_sink and any(p - j >= w for w in limits):
            continue
        tokens.append(j)
        capacity = (rule.window or 0) + rule.sinks
        if is_sink and rule.sinks_at == "cache" and p >= capacity:
            places.append(p - (capacity - 1 - j))  # StreamingLLM counts positions inside its cache
        else:
            places.append(j)
    return tokens, places


def rounded_for(p: int, rule: Rule) -> int:
    """How many of the first tokens the query at p sees rounded: whole groups outside the newest `residual` before p."""
    if rule.residual is None:
        return 0
    n = 0
    while n + rule.group + rule.residual <= p:
        n += rule.group
    return n


# ---- rounding


def half_below(x: np.ndarray) -> np.ndarray:
    """The largest fp16 number that is not above x."""
    h = x.astype(np.float16)
    return np.where(h.astype(np.float64) > x, np.nextafter(h, np.float16(-np.inf)), h).astype(np.float16)


def round_group(x: np.ndarray, bits: int) -> np.ndarray:
    """Codes for one group along the last axis, with fp16 scale and zero point rounded outwards, and back."""
    x = x.astype(np.float64)
    zero = half_below(x.min(-1, keepdims=True)).astype(np.float64)
    scale = -half_below(-(x.max(-1, keepdims=True) - zero) / (2**bits - 1)).astype(np.float64)
    code = np.clip(np.rint((x - zero) / np.where(scale > 0, scale, 1)), 0, 2**bits - 1)
    return zero + scale * code


def round_fp8(x: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """The nearest of the 256 numbers that the type has."""
    values = torch.arange(256, dtype=torch.uint8).view(dtype).double().numpy()
    values = np.unique(values[np.isfinite(values)])
    right = np.searchsorted(values, x).clip(1, len(values) - 1)
    low, high = values[right - 1], values[right]
    return np.where(x - low < high - x, low, high)


def rounded(x: torch.Tensor, bits, axis: str, group: int) -> torch.Tensor:
    """Keys or values (S, n_kv, D) with every complete group of tokens rounded; the tokens after it as they are."""
    if bits == 16:
        return x
    out, a = x.detach().double().numpy().copy(), x.detach().double().numpy()
    D = a.shape[-1]
    for start in range(0, len(a) // group * group, group):
        part = a[start : start + group]
        if bits in ("fp8", "fp8_e4m3", "fp8_e5m2"):
            new = round_fp8(part, torch.float8_e5m2 if bits == "fp8_e5m2" else torch.float8_e4m3fn)
        elif axis == "channel":
            new = np.moveaxis(round_group(np.moveaxis(part, 0, -1), bits), -1, 0)
        else:
            g = min(group, D)
            new = round_group(part.reshape(*part.shape[:-1], D // g, g), bits).reshape(part.shape)
        out[start : start + group] = new
    return torch.from_numpy(out).to(x.dtype)


# ---- two transformers


def turn(x: torch.Tensor, places, freq: torch.Tensor) -> torch.Tensor:
    """Rotate the channel pairs (i, i + D/2) of x (S, n, D), seen as complex numbers, by place * freq."""
    half = x.shape[-1] // 2
    angle = torch.as_tensor(places).to(freq)[:, None, None] * freq
    z = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat((z.real, z.imag), -1)


def _norm(x, weight, eps):
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


@torch.no_grad()
def _forward(model: GPT, ids: list[int], attention, owners=None) -> torch.Tensor:
    c, w = model.config, {k: v.double() for k, v in model.state_dict().items()}
    S, H, n_kv, D = len(ids), c.num_attention_heads, c.num_key_value_heads, c.head_dim
    stored = {}  # layer -> keys, not turned yet, and values (S, n_kv, D)

    def linear(x, name):
        y = x @ w[name + ".weight"].T
        return y + w[name + ".bias"] if name + ".bias" in w else y

    x = w["embed_tokens.weight"][ids]
    for i in range(c.num_hidden_layers):
        at = f"layers.{i}."
        h = _norm(x, w[at + "input_layernorm.weight"], c.rms_norm_eps)
        if c.kv_owner[i] == i:
            stored[i] = [linear(h, f"{at}self_attn.{n}_proj").view(S, -1, D) for n in "kv"]
        source = c.kv_owner[i] if owners is None else owners[c.kv_owner[i]]
        q, (k, v) = linear(h, at + "self_attn.q_proj").view(S, -1, D), stored[source]
        y = attention(q, k, v, model.rope_freq.double(), c.window(i))
        assert y.shape == (S, H, D) and k.shape[1] == n_kv
        x = x + linear(y.reshape(S, -1), at + "self_attn.o_proj")
        h = _norm(x, w[at + "post_attention_layernorm.weight"], c.rms_norm_eps)
        gate = linear(h, at + "mlp.gate_proj")
        x = x + linear(gate / (1 + torch.exp(-gate)) * linear(h, at + "mlp.up_proj"), at + "mlp.down_proj")
    x = _norm(x, w["norm.weight"], c.rms_norm_eps)
    return x @ (w["embed_tokens.weight"] if c.tie_word_embeddings else w["lm_head.weight"]).T


def dense_logits(model: GPT, ids: list[int], rule: Rule | Eviction = Rule()) -> torch.Tensor:
    """Logits (S, vocab) in float64 of one row, without any cache, under the rule."""
    if isinstance(rule, Eviction):
        return evicting_logits(model, ids, rule)

    def attention(q, k, v, freq, layer_window):
        S, H, D = q.shape
        n_kv = k.shape[1]
        q = turn(q, range(S), freq).view(S, n_kv, H // n_kv, D)
        own = turn(k, range(S), freq)
        k_round = rounded(own, rule.k_bits, rule.key_axis, rule.group)
        v_round = rounded(v, rule.v_bits, "token", rule.group)
        out = []
        for p in range(S):
            tokens, places = keys_for(p, rule, layer_window)
            n = sum(t < rounded_for(p, rule) for t in tokens)  # tokens are in order: the first n are rounded
            keys = (
                torch.cat((k_round[tokens[:n]], own[tokens[n:]])) if places == tokens else turn(k[tokens], places, freq)
            )
            values = torch.cat((v_round[tokens[:n]], v[tokens[n:]]))
            scores = q[p] @ keys.permute(1, 2, 0) / math.sqrt(D)  # (n_kv, G, n)
            weights = torch.exp(scores - scores.amax(-1, keepdim=True))
            weights = weights / weights.sum(-1, keepdim=True)
            out.append((weights @ values.transpose(0, 1)).reshape(H, D))
        return torch.stack(out)

    return _forward(model, ids, attention, rule.owners)


def causal_logits(model: GPT, ids: list[int]) -> torch.Tensor:
    """The same for the plain rule, on torch's is_causal, with keys and values repeated for each query head."""

    def attention(q, k, v, freq, layer_window):
        assert layer_window is None
        S, H, _ = q.shape
        q, k = turn(q, range(S), freq), turn(k, range(S), freq)
        k, v = (x.repeat_interleave(H // x.shape[1], 1) for x in (k, v))
        y = F.scaled_dot_product_attention(*(x.transpose(0, 1)[None] for x in (q, k, v)), is_causal=True)
        return y[0].transpose(0, 1)

    return _forward(model, ids, attention)


# ---- feeding a model through a cache

PADDINGS = ("left", "right", "scattered")


@dataclass
class SubStep:
    """One forward pass over the layers, as the cache saw it."""

    start: list[int]
    after: list[int]
    T: int


def spy(cache) -> list[SubStep]:
    """Record every forward pass that the cache completes."""
    log, advance = [], cache.advance

    def advance_and_note(pos):
        start = list(cache.lengths)
        advance(pos)
        log.append(SubStep(start, list(cache.lengths), pos.shape[1]))

    cache.advance = advance_and_note
    return log


def call(model, cache, new: list[list[int]], start: list[int], padding: str = "left", rng=None) -> list[torch.Tensor]:
    """One call with new[b] more tokens in row b, which has start[b] -> logits (len(new[b]), vocab) of each row.

    Positions are made here. Padding columns carry some real id, which must not matter.
    """
    rng = rng or np.random.default_rng(0)
    T = max(map(len, new))
    extra = int(rng.integers(0, 2)) if padding == "scattered" else 0
    ids, pos, columns = rng.integers(0, 50, (len(new), T + extra)), np.full((len(new), T + extra), -1), []
    for b, row in enumerate(new):
        n = len(row)
        if padding == "left":
            at = np.arange(T - n, T)
        elif padding == "right":
            at = np.arange(n)
        else:
            at = np.sort(rng.choice(T + extra, n, replace=False))
        ids[b, at], pos[b, at] = row, np.arange(start[b], start[b] + n)
        columns.append(at)
    with torch.no_grad():
        logits = model(torch.from_numpy(ids), cache, torch.from_numpy(pos))
    return [logits[b, at] for b, at in enumerate(columns)]


def feed(model, cache, rows: list[list[int]], schedule: list[list[int]], padding="left", seed=0) -> list[torch.Tensor]:
    """All of rows through the cache, schedule[i][b] tokens of row b in call i -> logits (length, vocab) of each row."""
    rng = np.random.default_rng(seed)
    done, out = [0] * len(rows), [[] for _ in rows]
    for counts in schedule:
        new = [row[d : d + n] for row, d, n in zip(rows, done, counts)]
        for b, logits in enumerate(call(model, cache, new, done, padding, rng)):
            out[b].append(logits)
        done = [d + n for d, n in zip(done, counts)]
    assert done == [len(row) for row in rows], "the schedule must feed every token"
    return [torch.cat(parts) if parts else None for parts in out]


def in_chunks(lengths: list[int], chunk: int) -> list[list[int]]:
    """A schedule that feeds `chunk` tokens of every row per call while it has any."""
    return [[max(0, min(chunk, n - s)) for n in lengths] for s in range(0, max(lengths), chunk)]


# ---- the assertions


def assert_logits(got: torch.Tensor, want: torch.Tensor, tolerance: float = 1e-12, what: str = "logits") -> None:
    """Fails with the first position that differs."""
    assert got.shape == want.shape, f"{what}: shape {tuple(got.shape)} instead of {tuple(want.shape)}"
    assert torch.isfinite(got).all(), f"{what}: not finite"
    error = (got.double() - want.double()).abs().amax(-1)
    bad = torch.nonzero(error > tolerance)
    assert not len(bad), f"{what}: position {bad[0].tolist()} is off by {error.max():.3g}, tolerance {tolerance}"


def assert_equals_oracle(model, cache, rows, schedule, rule: Rule, padding="left", tolerance=1e-12, seed=0) -> None:
    """The property that every cache is held to: fed in any way, each row's logits are those of the dense reference."""
    for b, got in enumerate(feed(model, cache, rows, schedule, padding, seed)):
        assert_logits(got, dense_logits(model, rows[b], rule), tolerance, f"row {b}")
