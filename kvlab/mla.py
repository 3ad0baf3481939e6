"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): a cache keeps one narrow latent for all heads.

Of the hidden state h_t of a token, the layer makes, with kv_a_proj_with_mqa (W_DKV above W_KR):

    c_t = RMSNorm(W_DKV h_t)      the latent, kv_lora_rank numbers                   -> a cache stores it as the key
    r_t = RoPE(W_KR h_t)          one turned key for all heads, qk_rope_head_dim     -> a cache stores it as the value

and of each latent, for head i, with its rows of kv_b_proj (W_UK and W_UV):

    k_t,i = [W_UK,i c_t ; r_t]    v_t,i = W_UV,i c_t    q_t,i = [qn_t,i ; RoPE(qr_t,i)]
    score = q_t,i . k_s,i / sqrt(qk_nope_head_dim + qk_rope_head_dim)

r_t stands apart because a rotation between W_UK and the query would not let the two be multiplied with each other.
A product may be bracketed in two ways, so there are two forms, equal but for rounding:

    expanded   k_s,i and v_s,i are made of every latent in view: then plain attention with num_attention_heads heads
    absorbed   qn . (W_UK c) = (W_UK^T qn) . c : W_UK goes into the query, W_UV waits for the weighted sum of latents,
               and attention is MQA, all heads over the one key [c_s ; r_s] with the value c_s

Expanded pays for each token in view, absorbed for each new one, but its heads are kv_lora_rank wide. So a decode step
is cheaper absorbed, a long prompt expanded. The layer counts both (cost.latent_flops) and takes the cheaper. With all
tokens new, S = T, expanded wins where 2 kv_lora_rank > qk_nope_head_dim + v_head_dim, as in DeepSeek-V2 and V3; over
many tokens in view, absorbed wins up to about T = kv_lora_rank / (2 kv_lora_rank / (qk_nope + v) - 1) new ones.
Neither needs more stored: 61 layers of 512 + 64 numbers in fp16 are the 70,272 bytes a token of DeepSeek-V3. For the
time of a layer's step, absorbed joins c and r in one temporary (attend() takes one key tensor; a fused kernel reads
them as they lie), expanded makes keys and values for all heads.

Shapes: B rows, T new tokens, S in view, C hidden_size, H heads, R kv_lora_rank.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from kvlab import cost
from kvlab.attention import View, attend, rope
from kvlab.config import ModelConfig
from kvlab.linear import Linear

if TYPE_CHECKING:
    from kvlab.model import Pass

NORM_EPS = 1e-6  # of the two inner norms, whatever rms_norm_eps is: as DeepSeek's own code has it


class LatentAttention(nn.Module):
    """Attention of a GPT whose ModelConfig has kv_lora_rank. Submodules carry the names of a DeepSeek checkpoint.

    form: "absorbed", "expanded", or None: at each call the one that takes fewer FLOPs. set_form() sets it everywhere.
    """

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        c, C, H, R = config, config.hidden_size, config.num_attention_heads, config.kv_lora_rank
        self.config, self.layer, self.window = config, layer, config.window(layer)
        self.owner = config.kv_owner[layer]  # the layer whose latents are used here, nearly always this one
        self.form: str | None = None
        self.q_width = [c.qk_nope_head_dim, c.qk_rope_head_dim]
        self.scale = sum(self.q_width) ** -0.5
        if c.q_lora_rank is None:
            self.q_proj = Linear(C, H * sum(self.q_width), bias=False)
        else:
            self.q_a_proj = Linear(C, c.q_lora_rank, bias=c.attention_bias)
            self.q_a_layernorm = nn.RMSNorm(c.q_lora_rank, eps=NORM_EPS)
            self.q_b_proj = Linear(c.q_lora_rank, H * sum(self.q_width), bias=False)
        if self.owner == layer:
            self.kv_a_proj_with_mqa = Linear(C, R + c.qk_rope_head_dim, bias=c.attention_bias)
            self.kv_a_layernorm = nn.RMSNorm(R, eps=NORM_EPS)
        self.kv_b_proj = Linear(R, H * (c.qk_nope_head_dim + c.v_head_dim), bias=False)
        self.o_proj = Linear(H * c.v_head_dim, C, bias=c.attention_bias)

    def forward(self, x: Tensor, now: Pass) -> Tensor:
        (B, T, _), cache = x.shape, now.cache
        if self.config.q_lora_rank is None:
            q = self.q_proj(x)
        else:
            q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        q_nope, q_rope = q.view(B, T, -1, sum(self.q_width)).transpose(1, 2).split(self.q_width, -1)
        q_rope = rope(q_rope, now.angles)  # (B, H, T, qk_rope_head_dim)
        if self.owner == self.layer:
            latent, k_rope = self.latent(x, now)
            view = (
                cache.append(self.layer, latent, k_rope, now.pos)
                if cache is not None
                else View(latent, k_rope, now.pos)
            )
            if self.layer in now.followed:
                now.views[self.layer] = view
        else:
            view = now.views[self.owner]
        if view.k.shape[1] != 1:
            raise ValueError(f"the view has {view.k.shape[1]} heads; a latent model's has one, which serves all heads")
        mask = now.mask(view, self.window)
        wanted = cache is not None and cache.wants_weights
        form = self.form or cost.cheaper_form(self.config, T, view.k.shape[2])
        attention = self.absorbed if form == "absorbed" else self.expanded
        y, weights = attention(q_nope, q_rope, view, mask, wanted)  # (B, H, T, v_head_dim), (B, n, T, S)
        if wanted:
            cache.observe(self.owner, weights.sum(1, keepdim=True))  # one stored head serves all query heads
        return self.o_proj(y.transpose(1, 2).reshape(B, T, -1))

    def latent(self, x: Tensor, now: Pass) -> tuple[Tensor, Tensor]:
        """What a cache stores of x (B, T, C): latents (B, 1, T, R) and turned keys (B, 1, T, qk_rope_head_dim)."""
        R = self.config.kv_lora_rank
        latent, k_rope = self.kv_a_proj_with_mqa(x)[:, None].split([R, self.config.qk_rope_head_dim], -1)
        return self.kv_a_layernorm(latent), rope(k_rope, now.angles)

    def unfolding(self) -> tuple[Tensor, Tensor]:
        """kv_b_proj by heads: W_UK (H, qk_nope_head_dim, R) and W_UV (H, v_head_dim, R)."""
        c = self.config
        both = self.kv_b_proj.weight.view(c.num_attention_heads, -1, c.kv_lora_rank)
        return both.split([c.qk_nope_head_dim, c.v_head_dim], 1)

    def absorbed(self, q_nope, q_rope, view: View, mask, wanted: bool):
        """MQA over latents: what is per head goes into the query and the output."""
        w_uk, w_uv = self.unfolding()
        q = torch.cat((per_head(q_nope, w_uk), q_rope), -1)  # (B, H, T, R + qk_rope_head_dim)
        y, weights = self.attend(q, view, torch.cat((view.k, view.v), -1), view.k, mask, wanted)
        return per_head(y, w_uv.transpose(1, 2)), weights

    def expanded(self, q_nope, q_rope, view: View, mask, wanted: bool):
        """MHA: keys and values of every head, made of the latents in view."""
        c, (B, _, S, _) = self.config, view.k.shape
        widths = [c.qk_nope_head_dim, c.v_head_dim]
        kv = self.kv_b_proj(view.k).view(B, S, c.num_attention_heads, sum(widths)).transpose(1, 2)
        k_nope, v = kv.split(widths, -1)
        k = torch.cat((k_nope, view.v.expand(-1, c.num_attention_heads, -1, -1)), -1)  # (B, H, S, nope + rope)
        return self.attend(torch.cat((q_nope, q_rope), -1), view, k, v, mask, wanted)

    def attend(self, q, view: View, k, v, mask, wanted: bool):
        scale = self.scale if view.scale is None else view.scale  # not 1/sqrt of the width that q happens to have
        found = attend(q, replace(view, k=k, v=v, scale=scale), mask, want_weights=wanted)
        return found if wanted else (found, None)


def per_head(x: Tensor, w: Tensor) -> Tensor:
    """x (B, H, T, n) times w (H, n, m), a matrix for each head, read once for all rows -> (B, H, T, m)."""
    B, H, T, n = x.shape
    return torch.bmm(x.transpose(0, 1).reshape(H, B * T, n), w).view(H, B, T, -1).transpose(0, 1)


def set_form(model: nn.Module, form: str | None) -> None:
    """Fix the form of every latent layer of a GPT, or let each call choose again (None). ValueError if it has none."""
    layers = [m for m in model.modules() if isinstance(m, LatentAttention)]
    if form not in (None, *cost.FORMS):
        raise ValueError(f"form={form!r} must be 'absorbed', 'expanded' or None (the cheaper one)")
    if not layers:
        raise ValueError("this model has no latent attention: its ModelConfig has no kv_lora_rank")
    for layer in layers:
        layer.form = form


class Sharing(NamedTuple):
    """One way of sharing keys and values. Bytes of all layers; FLOPs of one decode step, of all layers' attention."""

    name: str
    config: ModelConfig
    bytes_per_token: int
    projections: int
    attention: int


def compare_sharing(config: ModelConfig, seen: int, groups: int, itemsize: int = 2) -> list[Sharing]:
    """MHA, GQA, MQA and MLA in both forms with the hidden size, layers and heads of an MLA config -> one Sharing each.

    The first three have heads of v_head_dim, as in the paper's Table 1; GQA has `groups` KV heads. FLOPs are those of
    the attention layers (not MLP, not logits) for one new token over `seen` tokens in view, itself included.
    Raises ValueError unless config has kv_lora_rank and `groups` divides its heads.
    """
    if config.kv_lora_rank is None:
        raise ValueError("config has no kv_lora_rank: the comparison starts from a model with latent attention")
    H, n, rows = config.num_attention_heads, config.num_hidden_layers, []

    def row(name: str, c: ModelConfig, one: cost.Flops) -> Sharing:
        projections = n * one.projections - cost.spared_flops(c, 1)
        return Sharing(name, c, c.kv_bytes_per_token(itemsize), projections, n * one.attention)

    gone = dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    for name, kv_heads in (("MHA", H), (f"GQA, {groups} KV heads", groups), ("MQA", 1)):
        plain = config.with_(**gone, head_dim=config.v_head_dim, num_key_value_heads=kv_heads)
        rows.append(row(name, plain, cost.attention_flops(plain, 1, seen)))
    for form in cost.FORMS:
        rows.append(row(f"MLA, {form}", config, cost.latent_flops(config, 1, seen, form)))
    return rows
