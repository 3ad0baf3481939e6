"""Latent attention written a second time, from the formulas of DeepSeek-V2 (arXiv 2405.04434, section 2.1): token by
token, head by head, every key and value formed. Nothing here uses kvlab.mla, kvlab.attention or a cache."""

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
    layers, freq = range(c.num_hidden_layers), model.rope_freq.double()
    evicts = isinstance(rule, Eviction)
    plain = Rule() if rule is None or evicts else rule
    assert plain.sinks_at == "text"
    latents, turned, kept = [[] for _ in layers], [[] for _ in layers], [[] for _ in layers]
    drawn = [dict.fromkeys(range(S), 0.0) for _ in layers]  # the attention that each token has drawn so far
    given = [torch.zeros(S, S, dtype=torch.float64) for _ in layers]

    def linear(x, name):
        y = w[name + ".weight"] @ x
        return y + w[name + ".bias"] if name + ".bias" in w else y

    out = []
    for p, token in enumerate(ids):
        x = w["embed_tokens.weight"][token]
        for i in layers:
            at, mix, owner = f"layers.{i}.", f"layers.{i}.self_attn.", c.kv_owner[i]
            h = _norm(x, w[at + "input_layernorm.weight"], c.rms_norm_eps)
            if c.q_lora_rank is None:
                q = linear(h, mix + "q_proj")
            else:
                q = linear(_norm(linear(h, mix + "q_a_proj"), w[mix + "q_a_layernorm.weight"], 1e-6), mix + "q_b_proj")
            if owner == i:
                down = linear(h, mix + "kv_a_proj_with_mqa")
                latents[i].append(_norm(down[:R], w[mix + "kv_a_layernorm.weight"], 1e-6))
                turned[i].append(turn(down[None, None, R:], [p], freq)[0, 0])
                if evicts and len(kept[i]) == rule.budget_of(i, 0):  # one stored head, so one list of tokens
                    kept[i].remove(rule.victim(i, 0, p, kept[i], drawn[i]))
                kept[i].append(p)
            source = owner if plain.owners is None else plain.owners[owner]
            window = c.window(i)
            tokens = (
                [t for t in kept[owner] if window is None or p - t < window]
                if evicts
                else keys_for(p, plain, window)[0]
            )
            n = sum(t < rounded_for(p, plain) for t in tokens)  # tokens are in order: the first n are rounded
            cs, rs = torch.stack(latents[source])[:, None], torch.stack(turned[source])[:, None]
            old_cs = rounded(cs, plain.k_bits, plain.key_axis, plain.group) if n else cs
            old_rs = rounded(rs, plain.v_bits, "token", plain.group) if n else rs
            cs = torch.cat((old_cs[tokens[:n]], cs[tokens[n:]]))[:, 0]
            rs = torch.cat((old_rs[tokens[:n]], rs[tokens[n:]]))[:, 0]
            heads = []
            q = q.view(H, nope + rope)
            q_turned = turn(q[None, :, nope:], [p], freq)[0]
            for mine, mine_turned, w_kv in zip(q[:, :nope], q_turned, w[mix + "kv_b_proj.weight"].view(H, -1, R)):
                keys, values = cs @ w_kv[:nope].T, cs @ w_kv[nope:].T
                scores = keys @ mine + rs @ mine_turned
                share = torch.exp((scores - scores.max()) / math.sqrt(nope + rope))
                share = share / share.sum()
                heads.append(share @ values)
                given[i][p, tokens] += share
                for t, part in zip(tokens, share.tolist() if evicts else ()):
                    drawn[owner][t] += part
            x = x + linear(torch.cat(heads), mix + "o_proj")
            h = _norm(x, w[at + "post_attention_layernorm.weight"], c.rms_norm_eps)
            gate = linear(h, at + "mlp.gate_proj")
            x = x + linear(gate / (1 + torch.exp(-gate)) * linear(h, at + "mlp.up_proj"), at + "mlp.down_proj")
        x = _norm(x, w["norm.weight"], c.rms_norm_eps)
        out.append((w["embed_tokens.weight"] if c.tie_word_embeddings else w["lm_head.weight"]) @ x)
    if weights is not None:
        weights.extend(given)
    return torch.stack(out)
