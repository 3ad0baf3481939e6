"""The pictures of fewer keys and values: who shares heads, a latent's two forms, layers that share; and an explorer."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .. import cost
from ..config import ModelConfig
from ..memory.capacity import max_seq_len, memory_bytes
from ..memory.catalog import find_gpu, find_model
from ..memory.estimate import PREFILL_TOKENS, estimate
from . import theme
from .explorer import Explorer, choice, slider

LENGTHS = tuple(2**p for p in range(5, 14))  # 32 .. 8,192 tokens
CARDS = ("t4", "l4", "rtx-4090", "a100-40gb", "a100-80gb", "h100-80gb")
TURNED = 64  # qk_rope_head_dim, as in DeepSeek-V2 and V3


def latent_config(name: str) -> ModelConfig:
    """The shape of an MLA model of the catalog, as if all its layers were dense: for closed forms of its attention."""
    config = find_model(name)["config"]
    return ModelConfig(**{k: v for k, v in config.items() if k in ModelConfig.__dataclass_fields__})


def heads_drawn(query_heads: int = 8, groups: int = 2, head_dim: int = 128, rank: int = 512) -> dict:
    """Query heads as cells, coloured by the stored head that they read; the label says what a token stores."""
    rows = []
    for name, n in (("MHA", query_heads), (f"GQA, {groups} KV heads", groups), ("MQA", 1)):
        each = query_heads // n
        cells = [{"text": f"kv {h // each}", "group": h // each} for h in range(query_heads)]
        rows.append({"label": f"{name}: {2 * n * head_dim:,} numbers", "cells": cells})
    latent = [{"text": "c, r", "group": query_heads - 1} for _ in range(query_heads)]
    rows.append({"label": f"MLA: {rank + TURNED:,} numbers", "cells": latent})
    return {"kind": "slots", "title": f"What {query_heads} query heads of {head_dim} channels read, a layer and token",
            "rows": rows, "states": {"held": "a colour is a stored head"}, "size": (8.4, 2.8)}  # fmt: skip


# ---- the explorer ------------------------------------------------------------------------------------------------


class SharingExplorer(Explorer):
    """Heads, latent and layers: bytes that a token adds, and how long a text fits a card.

    A model of `hidden` channels, `layers` layers and `heads` query heads of 128, in fp16. The weights are each
    variant's own; the tokens are those of one text, when the card's memory has given them, activations and context.
    """

    def __init__(self, hidden: int = 4096, layers: int = 32, heads: int = 32, **kw):
        self.base = ModelConfig(vocab_size=32000, hidden_size=hidden, intermediate_size=11008, num_hidden_layers=layers,
                                num_attention_heads=heads, head_dim=128, max_position_embeddings=2**20)  # fmt: skip
        super().__init__(**kw)

    def controls(self):
        heads = [n for n in range(1, self.base.num_attention_heads + 1) if self.base.num_attention_heads % n == 0]
        cards = [(f"{find_gpu(c)['name']}: {theme.bytes_(memory_bytes(c))}", c) for c in CARDS]
        return {
            "kv": slider("KV heads", heads, 8, "num_key_value_heads of the GQA model"),
            "rank": slider("latent rank", [64, 128, 256, 448, 512, 768, 1024], 512, "kv_lora_rank of the MLA model"),
            "every": slider("layers share", [1, 2, 4, 8], 1, "consecutive layers with one layer's keys and values"),
            "card": choice("card", cards, "l4", "whose memory, as its driver reports it"),
        }  # fmt: skip

    def configs(self, values: dict) -> list[tuple[str, str, ModelConfig]]:
        """(variant of the theme, label, shape)."""
        base, every = self.base, values["every"]
        owners = tuple(i // every * every for i in range(base.num_hidden_layers))
        latent = base.with_(num_key_value_heads=None, head_dim=None, kv_lora_rank=values["rank"], v_head_dim=128,
                            qk_nope_head_dim=128, qk_rope_head_dim=TURNED)  # fmt: skip
        shared = f", shared by {every}" if every > 1 else ""
        gqa, kv = base.with_(num_key_value_heads=values["kv"], kv_owner=owners), values["kv"]
        return [
            ("full", f"MHA, {base.num_attention_heads} KV", base),
            ("shared" if every > 1 else "full", f"GQA, {kv} KV{shared}", gqa),
            ("full", "MQA, 1 KV", base.with_(num_key_value_heads=1)),
            ("mla", f"MLA, {values['rank']}{shared}", latent.with_(kv_owner=owners)),
        ]

    def data(self, values: dict) -> dict:
        room, tokens, context = memory_bytes(values["card"]), [], []
        for variant, label, config in self.configs(values):
            one = config.kv_bytes_per_token(2)
            params = estimate(config.with_(kv_owner=None)).params - cost.spared_flops(config, 1) // 2
            fit = longest(config, room, params)
            tokens.append({"variant": variant, "label": label, "values": [one]})
            context.append({"variant": variant, "label": label, "values": [fit] if fit else None})
        card = find_gpu(values["card"])["name"]
        left = {"kind": "bars", "title": "Bytes a token, all layers", "y": {"label": "fp16", "unit": "B"},
                "parts": ["keys and values"], "bars": tokens}  # fmt: skip
        right = {"kind": "bars", "title": f"Longest text, {card}", "parts": ["tokens"], "bars": context,
                 "y": {"label": "tokens, beside weights in fp16", "unit": "SI"}}  # fmt: skip
        least = min(tokens, key=lambda b: b["values"][0])
        said = f"{least['label']}: {tokens[0]['values'][0] / least['values'][0]:.3g} times less than MHA."
        gqa, mla = (b["values"][0] for b in (tokens[1], tokens[3]))
        said += f" MLA takes {mla / gqa:.2f} times the bytes of GQA, and each query head has its own key and value."
        return {"kind": "panels", "title": "Fewer keys and values", "panels": [left, right], "sentence": said,
                "size": (8.8, 3.0)}  # fmt: skip


def longest(config: ModelConfig, room: int, params: int, far: int = 2 * PREFILL_TOKENS) -> int:
    """max_seq_len(), in one estimate where a chunk of prompt fits: from there on tokens add their own bytes alone."""
    free = room - estimate(config, 1, far, "fp16", params=params).total_bytes
    tokens = far + free // config.kv_bytes_per_token(2)
    return tokens if tokens >= PREFILL_TOKENS else max_seq_len(config, room, params=params)


# ---- a latent's two forms ----------------------------------------------------------------------------------------


def form_lines(config: ModelConfig, name: str, lengths: Sequence[int] = LENGTHS) -> dict:
    """FLOPs of both forms of latent attention against tokens in view, for a new token and for a whole prompt; and the
    bytes of keys and values that attention is given, fp16. One layer, closed forms."""
    c, H = config, config.num_attention_heads
    each = {
        "expanded": H * (c.qk_nope_head_dim + c.qk_rope_head_dim + c.v_head_dim),
        "absorbed": c.kv_lora_rank + c.qk_rope_head_dim,
    }

    def panel(title, label, unit, number, scale="log10"):
        series = [
            {"variant": "mla" if form == "absorbed" else "full", "label": form, "x": list(lengths), "points": False,
             "y": [number(form, n) for n in lengths], "dashed": form == "expanded", "solid": form == "absorbed"}
            for form in cost.FORMS
        ]  # fmt: skip
        return {"kind": "lines", "title": title, "series": series, "y": {"label": label, "unit": unit, "scale": scale},
                "x": {"label": "tokens in view", "unit": "tokens", "scale": "log10"}}  # fmt: skip

    return {
        "kind": "panels", "title": f"{name}: one layer in both forms", "size": (10.8, 3.7),
        "panels": [
            panel("One new token", "FLOPs", "FLOP", lambda form, n: cost.latent_flops(c, 1, n, form).total),
            panel("A whole prompt", "FLOPs", "FLOP", lambda form, n: cost.latent_flops(c, n, n, form).total),
            panel("Keys and values to read", "bytes, fp16", "B", lambda form, n: 2 * n * each[form], "log2"),
        ],
    }  # fmt: skip


# ---- layers ------------------------------------------------------------------------------------------------------


def owners_drawn(rows: Sequence[tuple[str, Sequence[int]]]) -> dict:
    """Layer maps: each cell is a layer, its words and colour those of the layer whose keys and values it uses."""
    drawn = []
    for label, owners in rows:
        own = sorted(set(owners))
        cells = [{"text": str(o), "group": own.index(o), "state": "new" if i == o else "held"}
                 for i, o in enumerate(owners)]  # fmt: skip
        drawn.append({"label": label, "cells": cells})
    return {"kind": "slots", "title": "Whose keys and values each layer uses", "rows": drawn,
            "states": {"new": "has its own", "held": "follows the layer named"}}  # fmt: skip


def _dearer(pairs, silence) -> int:
    alone = {p.follower: p.kl for p in silence}
    return sum(p.kl > alone[p.follower] for p in pairs)


def same_type_owners(model: str = "gemma-3n-e4b") -> tuple[int, ...]:
    """Gemma 3n's map, from its config: the last num_kv_shared_layers layers follow the last own one of their type."""
    config = find_model(model)["config"]["text_config"]
    types = config["layer_types"]
    own = len(types) - config["num_kv_shared_layers"]
    last = {kind: max(i for i in range(own) if types[i] == kind) for kind in set(types)}
    return tuple(i if i < own else last[kind] for i, kind in enumerate(types))


def alike_map(keys: Tensor, values: Tensor, note: str = "") -> dict:
    """kvlab.sharing.similarity() of the keys as a heat map, both in words."""
    names = [str(i) for i in range(len(keys))]
    near = [[found[i, i + 1].item() for i in range(len(found) - 1)] for found in (keys, values)]
    return {
        "kind": "heatmap", "title": "Keys of two layers: |cosine|", "rows": names, "columns": names, "lo": 0, "hi": 1,
        "values": [[round(x, 3) for x in row] for row in keys.abs().tolist()], "label": "", "note": note,
        "x": {"label": "layer"}, "y": {"label": "layer"}, "size": (5.4, 3.9),
        "sentence": f"Neighbours on average: keys {sum(near[0]) / len(near[0]):.2f}, "
                    f"values {sum(near[1]) / len(near[1]):.2f}.",
    }  # fmt: skip


def price_lines(pairs, silence, note: str = "") -> dict:
    """What each layer costs that uses the keys and values of the one before it; its control: its attention left out."""
    lines = (("shared", "borrowed", pairs, False), (None, "left out", silence, True))
    series = []
    for variant, label, found, dashed in lines:
        found = sorted(found, key=lambda p: p.follower)
        series.append({"variant": variant, "label": label, "x": [p.follower for p in found],
                       "y": [p.kl for p in found], "dashed": dashed, "solid": not dashed})  # fmt: skip
    return {
        "kind": "lines", "title": "One layer gives up its keys and values", "series": series, "note": note,
        "x": {"label": "layer", "lo": 0}, "y": {"label": "KL to the full cache, nats", "scale": "log10"},
        "sentence": f"Of {len(pairs)} layers, {_dearer(pairs, silence)} lose more with borrowed keys and values than "
                    "with no attention at all.",
        "size": (7.2, 3.3),
    }  # fmt: skip


# ---- another memory ----------------------------------------------------------------------------------------------


def offload_times(model: str, card: str, bus: float, lengths: Sequence[int]) -> list[tuple[int, float | None, float]]:
    """The least seconds of one step: (tokens, cache on the card or None where it does not fit, cache in the host).

    On the card weights and cache are read at its bandwidth; from the host the cache comes over the bus (bytes a second)
    while the card reads the weights. Data-sheet bandwidths, fp16; nothing else takes time.
    """
    speed, room, rows = find_gpu(card)["bandwidth_gb_s"] * 1e9, memory_bytes(card), []
    for n in lengths:
        e = estimate(model, 1, n, "fp16")
        kept = (e.weights_bytes + e.kv_cache_bytes) / speed if e.total_bytes <= room else None
        rows.append((n, kept, max(e.weights_bytes / speed, e.kv_cache_bytes / bus)))
    return rows
