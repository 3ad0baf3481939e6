"""One GPT: RMSNorm, RoPE, SwiGLU, and MHA, GQA, MQA or MLA (mla.py). It never knows which cache it has.

Submodules carry Hugging Face's names, so that a Llama checkpoint's tensors fit by name.
Shapes: B rows, T new tokens, C hidden_size, H query heads, n_kv KV heads, D head_dim.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kvlab.attention import View, attend, narrower, rope, rope_angles, rope_frequencies, visible
from kvlab.caches.base import KVCache
from kvlab.config import ModelConfig
from kvlab.linear import Linear
from kvlab.mla import LatentAttention
from kvlab.words import kind_of


class Attention(nn.Module):
    """Self-attention. All that a cache changes is where the keys and values come from: one line."""

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        C, H, n_kv, D = config.hidden_size, config.num_attention_heads, config.num_key_value_heads, config.head_dim
        bias = config.attention_bias or config.qkv_bias
        self.layer, self.head_dim, self.window = layer, D, config.window(layer)
        self.owner = config.kv_owner[layer]  # the layer whose keys and values are used here, nearly always this one
        self.q_proj = Linear(C, H * D, bias=bias)
        if self.owner == layer:
            self.k_proj = Linear(C, n_kv * D, bias=bias)
            self.v_proj = Linear(C, n_kv * D, bias=bias)
        self.o_proj = Linear(H * D, C, bias=config.attention_bias)

    def forward(self, x: Tensor, now: Pass) -> Tensor:
        B, T, _ = x.shape
        q = self.q_proj(x).view(B, T, -1, self.head_dim).transpose(1, 2)  # (B, H, T, D)
        q, cache = rope(q, now.angles), now.cache
        if self.owner == self.layer:
            k = self.k_proj(x).view(B, T, -1, self.head_dim).transpose(1, 2)  # (B, n_kv, T, D)
            v = self.v_proj(x).view(B, T, -1, self.head_dim).transpose(1, 2)
            k = rope(k, now.angles)
            view = cache.append(self.layer, k, v, now.pos) if cache is not None else View(k, v, now.pos)
            if self.layer in now.followed:
                now.views[self.layer] = view
        else:
            view = now.views[self.owner]
        mask = now.mask(view, self.window)
        if cache is not None and cache.wants_weights:
            y, weights = attend(q, view, mask, want_weights=True)
            cache.observe(self.owner, weights)
        else:
            y = attend(q, view, mask)
        return self.o_proj(y.transpose(1, 2).reshape(B, T, -1))


class MLP(nn.Module):
    """SwiGLU (arXiv 2002.05202)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        C, F_, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = Linear(C, F_, bias=bias)
        self.up_proj = Linear(C, F_, bias=bias)
        self.down_proj = Linear(F_, C, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = (Attention if config.kv_lora_rank is None else LatentAttention)(config, layer)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, now: Pass) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), now)
        return x + self.mlp(self.post_attention_layernorm(x))


class Pass:
    """What the layers of one forward pass share: positions, their angles, the cache, masks made once, and the views of
    layers that others follow (no others: a view may be a large temporary)."""

    def __init__(
        self, pos: Tensor, angles: tuple[Tensor, Tensor], cache: KVCache | None, followed: frozenset = frozenset()
    ):
        self.pos, self.angles, self.cache, self.followed = pos, angles, cache, followed
        self.masks, self.views = {}, {}

    def mask(self, view: View, layer_window: int | None) -> Tensor | None:
        window = narrower(layer_window, view.window)
        if view.all_visible and window == view.window:
            return None
        key = (id(view.pos), window, view.sinks)
        if key not in self.masks:  # keep view.pos alive with the mask: its id must not be used again
            self.masks[key] = view.pos, visible(self.pos, view.pos, window, view.sinks)
        return self.masks[key][1]


class GPT(nn.Module):
    """A Llama-style decoder with random weights (normal, std 0.02, from `seed`).

    model(ids, cache=None, pos=None, logits_to_keep=0) -> logits (B, T, vocab), or only the last logits_to_keep of T.
    """

    def __init__(self, config: ModelConfig, seed: int = 0):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, i) for i in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.embed_tokens.weight = self.lm_head.weight
        self.rope_freq = rope_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
        self._freq: dict[tuple, Tensor] = {}
        self.followed = frozenset(owner for layer, owner in enumerate(config.kv_owner) if owner != layer)
        self.init_weights(seed)
        self.eval()

    def init_weights(self, seed: int) -> None:
        rng = torch.Generator().manual_seed(seed)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                if module.weight.device.type != "meta":  # by rows, however the weight is stored
                    module.weight.data.copy_(torch.empty(module.weight.shape).normal_(std=0.02, generator=rng))
                if getattr(module, "bias", None) is not None:
                    nn.init.zeros_(module.bias)

    @property
    def device(self) -> torch.device:
        return self.embed_tokens.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embed_tokens.weight.dtype

    def forward(
        self, ids: Tensor, cache: KVCache | None = None, pos: Tensor | None = None, logits_to_keep: int = 0
    ) -> Tensor:
        """ids (B, T) -> logits (B, T, vocab).

        cache: keys and values of earlier tokens come from here, those of `ids` go into it. None: `ids` is all there is.
        pos: (B, T) absolute positions, -1 = padding (its logits mean nothing); default: each row goes on where it is.
        logits_to_keep: n > 0 gives logits for the last n columns alone: prefill needs one of them.
        If a layer or the head raises, the cache is as it was before the call (or says that it is unusable).
        """
        self.check_ids(ids)
        if not isinstance(logits_to_keep, int) or logits_to_keep < 0:
            raise ValueError(f"logits_to_keep={logits_to_keep!r} must be 0 (all) or a number of columns")
        B, T = ids.shape
        if cache is not None and not isinstance(cache, KVCache):
            raise TypeError(f"cache is {kind_of(cache)}; derive it from KVCache, or wrap it: kvlab.caches.adopt(it)")
        if cache is not None and cache.batch_size != B:
            raise ValueError(f"{B} rows of tokens for a cache of {cache.batch_size} rows: make it with batch_size={B}")
        if pos is None:
            pos = cache.next_positions(T) if cache is not None else torch.arange(T).expand(B, T)
        elif not isinstance(pos, Tensor) or pos.dtype not in (torch.int64, torch.int32):
            raise ValueError(f"pos must be an integer tensor (B, T), not {getattr(pos, 'dtype', type(pos).__name__)}")
        elif pos.shape != ids.shape:
            raise ValueError(f"pos has shape {tuple(pos.shape)}, ids {tuple(ids.shape)}: they must agree")
        pos = pos.to(ids.device)

        def head(x: Tensor) -> Tensor:
            return self.lm_head(self.norm(x[:, -logits_to_keep:] if logits_to_keep else x))

        return head(self.run(ids, pos, None)) if cache is None else self.run_in_chunks(ids, pos, cache, head)

    def run(self, ids: Tensor, pos: Tensor, cache: KVCache | None) -> Tensor:
        """Embedding and layers -> hidden states (B, T, C)."""
        x = self.embed_tokens(ids)
        now = Pass(pos, rope_angles(pos, self.freq_on(pos.device, x.dtype), x.dtype), cache, self.followed)
        for block in self.layers:
            x = block(x, now)
        return x

    def freq_on(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        """rope_freq where it is needed, moved there once: float64 for a float64 model, else float32."""
        exact = torch.float64 if dtype == torch.float64 else torch.float32
        if (device, exact) not in self._freq:
            self._freq[device, exact] = self.rope_freq.to(exact).to(device)
        return self._freq[device, exact]

    def run_in_chunks(self, ids: Tensor, pos: Tensor, cache: KVCache, head=lambda x: x) -> Tensor:
        """As run(), split where the cache's rule is per token or per group; callers never see it -> head(all states).

        The last step counts once the head is done: memory runs out for its logits as easily as for a layer.
        """
        cache.check_room(pos)  # all of it fits, or nothing changes
        outs, done, T = [], 0, ids.shape[1]
        while done < T:
            n = cache.max_chunk(T - done)
            part = slice(done, done + n)
            try:
                outs.append(self.run(ids[:, part], pos[:, part], cache))
                if done + n == T:
                    out = head(outs[0] if len(outs) == 1 else torch.cat(outs, 1))
            except BaseException:
                cache.abort(earlier_chunks=done > 0)
                raise
            cache.advance(pos[:, part])
            done += n
        return out

    def check_ids(self, ids: Tensor) -> None:
        if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.dtype not in (torch.int64, torch.int32):
            what = f"{ids.dtype} of shape {tuple(ids.shape)}" if isinstance(ids, Tensor) else f"a {type(ids).__name__}"
            raise ValueError(f"ids must be an integer tensor (B, T), not {what}")
        if ids.numel() == 0:
            raise ValueError(f"ids is empty (shape {tuple(ids.shape)}): there must be at least one token")
        if ids.device != self.device:
            raise ValueError(f"ids are on {ids.device}, the model is on {self.device}: move one of them with .to()")
        if ids.device.type == "meta":
            return
        low, high = torch.stack(ids.aminmax()).tolist()
        if low < 0 or high >= self.config.vocab_size:
            bad = low if low < 0 else high
            raise ValueError(
                f"token id {bad} is outside the vocabulary: ids run from 0 to {self.config.vocab_size - 1}"
            )
