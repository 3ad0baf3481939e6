"""The dense reference of the caches that evict: a transformer that goes token by token and keeps lists of tokens.

No tensor of a cache, no mask, no slot: for each layer and KV head a plain list of the tokens kept and a dict of their
scores, and for each query a loop over its heads.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import torch

EVICTING = {  # the kinds, with their defaults
    "heavy_hitter": {"budget": 256, "recent": 0.5, "grace": 0},
    "random": {"budget": 256, "recent": 0.5, "grace": 0, "seed": 0},
    "first_last": {"budget": 256, "first": 4},
}


@dataclass(frozen=True)
class Eviction:
    """What one of those caches promises. budget: an int, or one for each layer and head."""

    kind: str
    budget: object
    recent: int | float = 1
    grace: int = 0
    seed: int = 0
    first: int = 0

    def budget_of(self, layer: int, head: int) -> int:
        return self.budget if isinstance(self.budget, int) else self.budget[layer][head]

    def safe(self, budget: int) -> int:
        """Newest tokens that stay, the one being added included."""
        recent = math.floor(budget * self.recent) if isinstance(self.recent, float) else self.recent
        return max(recent, 1 + self.grace)

    def victim(self, layer: int, head: int, p: int, kept: list[int], scores: dict[int, float]) -> int:
        """Which of the tokens in `kept` makes room for token p."""
        candidates = sorted(t for t in kept if t + self.safe(self.budget_of(layer, head)) <= p)
        if self.kind == "heavy_hitter":
            lowest = min(scores[t] for t in candidates)
            return next(t for t in candidates if scores[t] == lowest)  # of equal scores the oldest
        if self.kind == "random":
            x = random.Random(f"{self.seed} {layer} {head} {p}").random()
            return candidates[math.floor(len(candidates) * x)]
        return next(t for t in candidates if t >= self.first)


def eviction_rule(kind: str, options: dict) -> Eviction:
    return Eviction(kind, **{**EVICTING[kind], **options})


@torch.no_grad()
def evicting_logits(model, ids: list[int], rule: Eviction, history: list | None = None) -> torch.Tensor:
    """Logits (S, vocab) in float64 of one row. history: filled with {(layer, head): tokens kept} for each query."""
    c, w = model.config, {name: x.double() for name, x in model.state_dict().items()}
    H, n_kv, D = c.num_attention_heads, c.num_key_value_heads, c.head_dim
    freq = model.rope_freq.double()
    heads = [(layer, h) for layer in range(c.num_hidden_layers) for h in range(n_kv)]
    kept, score = {at: [] for at in heads}, {at: {} for at in heads}
    keys, values = {at: {} for at in heads}, {at: {} for at in heads}

    def linear(x, name):
        y = w[name + ".weight"] @ x
        return y + w[name + ".bias"] if name + ".bias" in w else y

    def norm(x, name):
        return x / torch.sqrt((x * x).mean() + c.rms_norm_eps) * w[name + ".weight"]

    def turned(x, p):  # pairs (i, i + D/2) as complex numbers
        z = torch.complex(x[..., : D // 2], x[..., D // 2 :]) * torch.exp(1j * p * freq)
        return torch.cat((z.real, z.imag), -1)

    out = []
    for p, token in enumerate(ids):
        x = w["embed_tokens.weight"][token]
        for layer in range(c.num_hidden_layers):
            name, owner, window = f"layers.{layer}.", c.kv_owner[layer], c.window(layer)
            h = norm(x, name + "input_layernorm")
            q = turned(linear(h, name + "self_attn.q_proj").view(H, D), p)
            if owner == layer:
                k = turned(linear(h, name + "self_attn.k_proj").view(n_kv, D), p)
                v = linear(h, name + "self_attn.v_proj").view(n_kv, D)
                for head in range(n_kv):
                    at = layer, head
                    if len(kept[at]) == rule.budget_of(*at):
                        kept[at].remove(rule.victim(layer, head, p, kept[at], score[at]))
                    kept[at].append(p)
                    keys[at][p], values[at][p], score[at][p] = k[head], v[head], 0.0
            y = torch.empty(H, D, dtype=torch.float64)
            for i in range(H):
                at = owner, i // (H // n_kv)
                seen = [t for t in kept[at] if window is None or p - t < window]
                dots = torch.stack([q[i] @ keys[at][t] for t in seen]) / math.sqrt(D)
                part = torch.exp(dots - dots.max())
                part = part / part.sum()
                y[i] = sum(a * values[at][t] for a, t in zip(part, seen))
                for a, t in zip(part.tolist(), seen):
                    score[at][t] += a
            x = x + linear(y.reshape(-1), name + "self_attn.o_proj")
            h = norm(x, name + "post_attention_layernorm")
            gate = linear(h, name + "mlp.gate_proj")
            x = x + linear(gate * torch.sigmoid(gate) * linear(h, name + "mlp.up_proj"), name + "mlp.down_proj")
        x = norm(x, "norm")
        out.append((w["embed_tokens.weight"] if c.tie_word_embeddings else w["lm_head.weight"]) @ x)
        if history is not None:
            history.append({at: sorted(tokens) for at, tokens in kept.items()})
    return torch.stack(out)
