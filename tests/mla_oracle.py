"""Latent attention written a second time, from the formulas of DeepSeek-V2 (arXiv 2405.04434, section 2.1): query by
query, head by head, every key and value formed. Nothing here uses kvlab.mla, kvlab.attention or a cache."""

from __future__ import annotations

import math

import torch
from eviction_oracle import Eviction
from oracles import Rule, _norm, keys_for, rounded, rounded_for, toy, turn

LATENT = {"num_key_value_heads": None, "kv_lora_rank": 16, "qk_nope_head_dim": 6, "qk_rope_head_dim": 8,
          "v_head_dim": 10}  # fmt: skip


def latent_toy(**changes):
    """The toy of oracles.py with latent attention; low-rank queries unless q_lora_rank says None."""
    return toy(**{**LATENT, "q_lora_rank": 12, **changes})


@torch.no_grad()
def latent_logits(
    model, ids: list[int], rule: Rule | Eviction | None = None, weights: list | None = None
) -> torch.Tensor:
    """Logits (S, vocab) in float64 of one row, without a cache, under the rule.

    Latents are rounded by rule.k_bits, turned keys by rule.v_bits. weights: takes, layer by layer, (S, S): what each
    query gives each token, summed over all heads.
    """
    c, w = model.config, {name: x.double() for name, x in model.state_dict().items()}
    S, H, R, nope, rope = len(ids), c.num_attention_heads, c.kv_lora_rank, c.qk_nope_head_dim, c.qk_rope_head_dim
    freq, stored = model.rope_freq.double(), {}
    evicts = isinstance(rule, Eviction)
    plain = Rule() if rule is None or evicts else rule
    assert plain.sinks_at == "text" and not (evicts and len(set(c.kv_owner)) < c.num_hidden_layers)

    def linear(x, name):
        y = x @ w[name + ".weight"].T
        return y + w[name + ".bias"] if name + ".bias" in w else y

    x = w["embed_tokens.weight"][ids]
    for i in range(c.num_hidden_layers):
        at, mix = f"layers.{i}.", f"layers.{i}.self_attn."
        h = _norm(x, w[at + "input_layernorm.weight"], c.rms_norm_eps)
        if c.q_lora_rank is None:
            q = linear(h, mix + "q_proj")
        else:
            q = linear(_norm(linear(h, mix + "q_a_proj"), w[mix + "q_a_layernorm.weight"], 1e-6), mix + "q_b_proj")
        if c.kv_owner[i] == i:
            down = linear(h, mix + "kv_a_proj_with_mqa")
            latent = _norm(down[:, :R], w[mix + "kv_a_layernorm.weight"], 1e-6)
            key = turn(down[:, None, R:], range(S), freq)[:, 0]
            stored[i] = latent, key
        source = c.kv_owner[i] if plain.owners is None else plain.owners[c.kv_owner[i]]
        latent, key = stored[source]
        latent_round = rounded(latent[:, None], plain.k_bits, plain.key_axis, plain.group)[:, 0]
        key_round = rounded(key[:, None], plain.v_bits, "token", plain.group)[:, 0]
        w_kv = w[mix + "kv_b_proj.weight"].view(H, nope + c.v_head_dim, R)
        seen_by, out = torch.zeros(S, S, dtype=torch.float64), torch.zeros(S, H, c.v_head_dim, dtype=torch.float64)
        kept: list[int] = []
        for p in range(S):
            if evicts:  # one stored head, so one list of tokens; scores are the weights of all queries so far
                if len(kept) == rule.budget_of(i, 0):
                    kept.remove(rule.victim(i, 0, p, kept, dict(enumerate(seen_by.sum(0).tolist()))))
                kept.append(p)
                tokens = [t for t in kept if c.window(i) is None or p - t < c.window(i)]
            else:
                tokens, places = keys_for(p, plain, c.window(i))
                assert places == tokens
            n = sum(t < rounded_for(p, plain) for t in tokens)  # tokens are in order: the first n are rounded
            latents = torch.cat((latent_round[tokens[:n]], latent[tokens[n:]]))
            turned = torch.cat((key_round[tokens[:n]], key[tokens[n:]]))
            for head in range(H):
                mine = q[p].view(H, nope + rope)[head]
                mine_turned = turn(mine[None, None, nope:], [p], freq)[0, 0]
                keys, values = latents @ w_kv[head, :nope].T, latents @ w_kv[head, nope:].T
                scores = (keys @ mine[:nope] + turned @ mine_turned) / math.sqrt(nope + rope)
                share = torch.exp(scores - scores.max())
                share = share / share.sum()
                seen_by[p, tokens] += share
                out[p, head] = share @ values
        if weights is not None:
            weights.append(seen_by)
        x = x + linear(out.reshape(S, -1), mix + "o_proj")
        h = _norm(x, w[at + "post_attention_layernorm.weight"], c.rms_norm_eps)
        gate = linear(h, at + "mlp.gate_proj")
        x = x + linear(gate / (1 + torch.exp(-gate)) * linear(h, at + "mlp.up_proj"), at + "mlp.down_proj")
    x = _norm(x, w["norm.weight"], c.rms_norm_eps)
    return x @ (w["embed_tokens.weight"] if c.tie_word_embeddings else w["lm_head.weight"]).T
