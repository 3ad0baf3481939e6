"""The only mask and the only attention in this project, and the rotary positions that both rest on.

Shapes: B rows, T new tokens (queries), S keys in view, D head_dim, H query heads, n_kv KV heads, G = H // n_kv.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass
class View:
    """Everything that this step's queries may look at, in any order.

    k, v: (B, n_kv, S, D); their last dimensions may differ.
    pos: (B, S) absolute position of each key, or (B, n_kv, S) where heads keep different tokens; -1 = nothing here.
    window, sinks: what a cache that forgets promises to show: the last `window` keys and the first `sinks`.
    scale: factor on q.k; None means 1/sqrt(D).
    all_visible: every key is visible to every query under `window` and `sinks`, so that no mask need be built.
    """

    k: Tensor
    v: Tensor
    pos: Tensor
    window: int | None = None
    sinks: int = 0
    scale: float | None = None
    all_visible: bool = False


def narrower(a: int | None, b: int | None) -> int | None:
    """The smaller of two windows, where None means no limit."""
    return b if a is None else a if b is None else min(a, b)


def visible(q_pos: Tensor, k_pos: Tensor, window: int | None = None, sinks: int = 0) -> Tensor:
    """The mask: may the query at q_pos (B, T) see the key at k_pos, (B, S) or (B, n_kv, S)? -> bool (B, 1|n_kv, T, S)

    A key is visible if there is one (position >= 0), if it does not lie in the future, and if it is among the last
    `window` keys, the query's own included, or among the first `sinks`. Positions decide, never lengths: so one
    mask serves full, ring, paged, padded and evicted caches alike.
    """
    q = q_pos[:, None, :, None]
    k = k_pos[:, None, None, :] if k_pos.dim() == 2 else k_pos[:, :, None, :]
    mask = (k >= 0) & (k <= q)
    if window is not None:
        near = (q - k) < window
        mask &= (near | (k < sinks)) if sinks else near
    return mask


def attend(q: Tensor, view: View, mask: Tensor | None = None, want_weights: bool = False):
    """Softmax attention of q (B, H, T, D) over a view -> (B, H, T, Dv), and the weights (B, n_kv, T, S) if wanted.

    The G query heads that share a KV head are folded into the query axis, so that keys and values are never
    repeated. A query that sees nothing (padding) gets a finite answer: a NaN there would poison the row.
    Weights, where wanted, are summed over the group.
    """
    (B, H, T, D), (n_kv, S) = q.shape, view.k.shape[1:3]
    G = H // n_kv
    q = q.reshape(B, n_kv, G * T, D)
    if mask is not None:
        mask = mask | ~mask.any(-1, keepdim=True)  # nothing to see: look at everything, harmlessly
        if G > 1:
            mask = mask[:, :, None].expand(-1, -1, G, -1, -1).reshape(B, mask.shape[1], G * T, S)
    if not want_weights:
        y = F.scaled_dot_product_attention(q, view.k, view.v, attn_mask=mask, scale=view.scale)
        return y.view(B, H, T, -1)
    scores = (q @ view.k.transpose(2, 3)) * (view.scale or D**-0.5)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    weights = scores.softmax(-1)
    y = (weights @ view.v).view(B, H, T, -1)
    return y, weights.view(B, n_kv, G, T, S).sum(2)


def rope_frequencies(head_dim: int, theta: float = 10000.0, scaling: dict | None = None) -> Tensor:
    """Radians per position of each pair of channels -> float64 (head_dim/2,)  (RoFormer, arXiv 2104.09864)

    scaling: None, "linear" (position interpolation) or "llama3" (only the slow pairs are stretched, Llama 3.1).
    The values are rounded to float32 first, as Hugging Face does, so that both libraries turn by the same angle.
    """
    freq = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    kind = "default" if not scaling else scaling.get("rope_type", scaling.get("type", "default"))
    needed = {"linear": {"factor"}, "llama3": {"factor", "original_max_position_embeddings", "low_freq_factor",
                                               "high_freq_factor"}}.get(kind, set())  # fmt: skip
    if missing := needed - set(scaling or ()):
        raise ValueError(f"rope_scaling={scaling} lacks {', '.join(sorted(missing))}")
    if kind == "linear":
        freq = freq / scaling["factor"]
    elif kind == "llama3":
        factor, old = scaling["factor"], scaling["original_max_position_embeddings"]
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        turns = old * freq / (2 * torch.pi)  # full turns within the length the model was first trained on
        keep = ((turns - low) / (high - low)).clamp(0, 1)  # 0: a slow pair, stretched; 1: a fast pair, left alone
        freq = (1 - keep) * freq / factor + keep * freq
    elif kind != "default":
        raise ValueError(f"rope_scaling type {kind!r} is not supported; known are 'default', 'linear' and 'llama3'")
    return freq.double()


def rope_angles(pos: Tensor, freq: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and signed sine for positions (B, T) -> two tensors (B, 1, T, D), for rope()."""
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    angle = pos[:, None, :, None].to(exact) * freq.to(exact).to(pos.device)
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


def rope(x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """Turn each pair of channels (i, i + D/2) of x (B, H, T, D) by its angle. Turning twice adds the angles."""
    cos, sin = angles
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)
