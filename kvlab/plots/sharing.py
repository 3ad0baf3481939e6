"""The pictures of fewer keys and values: who shares heads, a latent's two forms, layers that share; and an explorer."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .. import cost
from ..config import ModelConfig
from ..memory.capacity import memory_bytes
from ..memory.catalog import find_gpu, find_model
from ..memory.estimate import estimate
from . import theme
from .explorer import Explorer, choice, slider
from .memory import short

LENGTHS = tuple(2**p for p in range(5, 16))  # 32 .. 32,768 tokens
BUS_LENGTHS = tuple(2**p for p in range(7, 18))
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
            "rows": rows, "states": {"held": "a colour is a stored head"}, "size": (9.6, 3.2)}  # fmt: skip


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
            "rank": slider("latent rank", [64, 128, 256, 384, 512, 768, 1024], 512, "kv_lora_rank of the MLA model"),
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
            empty = estimate(config, 1, 1, "fp16", params=params)
            fit = (room - empty.total_bytes + one) // one  # a longer text adds its tokens, nothing else
            tokens.append({"variant": variant, "label": label, "values": [one]})
            context.append({"variant": variant, "label": label, "values": [fit] if fit > 0 else None})
        card = find_gpu(values["card"])["name"]
        left = {"kind": "bars", "title": "Bytes a token, all layers", "y": {"label": "fp16", "unit": "B"},
                "parts": ["keys and values"], "bars": tokens}  # fmt: skip
        right = {"kind": "bars", "title": f"Longest text, {card}", "parts": ["tokens"], "bars": context,
                 "y": {"label": "tokens, beside weights in fp16", "unit": "SI"}}  # fmt: skip
        least = min(tokens, key=lambda b: b["values"][0])
        said = f"{least['label']}: {tokens[0]['values'][0] / least['values'][0]:.3g} times less than MHA."
        gqa, mla = (b["values"][0] for b in (tokens[1], tokens[3]))
        said += f" MLA holds {mla / gqa:.2f} times what GQA holds, with a key and a value of its own for every head."
        return {"kind": "panels", "title": "Fewer keys and values", "panels": [left, right], "sentence": said,
                "size": (11.6, 3.9)}  # fmt: skip


# ---- a latent's two forms ----------------------------------------------------------------------------------------


def form_lines(config: ModelConfig, name: str, lengths: Sequence[int] = LENGTHS[:-2]) -> dict:
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
                "x": {"label": "tokens in view", "unit": "tokens", "scale": "log2"}}  # fmt: skip

    return {
        "kind": "panels", "title": f"{name}: one layer in both forms", "size": (12.6, 4.3),
        "panels": [
            panel("One new token", "FLOPs", "FLOP", lambda form, n: cost.latent_flops(c, 1, n, form).total),
            panel("A whole prompt", "FLOPs", "FLOP", lambda form, n: cost.latent_flops(c, n, n, form).total),
            panel("Keys and values to read", "bytes, fp16", "B", lambda form, n: 2 * n * each[form], "log2"),
        ],
        "sentence": f"One layer of {name}; the cache holds {theme.bytes_(2 * each['absorbed'])} a token and layer "
                    "in either form.",
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


def alike_maps(keys: Tensor, values: Tensor, note: str = "") -> dict:
    """kvlab.sharing.similarity() as two heat maps."""
    panels = []
    for title, found in (("Keys", keys), ("Values", values)):
        names = [str(i) for i in range(len(found))]
        panels.append({
            "kind": "heatmap", "title": f"{title}: cosine between layers", "rows": names, "columns": names,
            "values": [[round(x, 3) for x in row] for row in found.abs().tolist()], "label": "|cosine|",
            "lo": 0, "hi": 1, "x": {"label": "layer"}, "y": {"label": "layer"},
        })  # fmt: skip
    near = [[found[i, i + 1].item() for i in range(len(found) - 1)] for found in (keys, values)]
    said = (f"Neighbouring layers: keys {sum(near[0]) / len(near[0]):.2f}, values {sum(near[1]) / len(near[1]):.2f} "
            "on average; 1 would be equal, 0 unrelated.")  # fmt: skip
    return {"kind": "panels", "title": "Alike?", "panels": panels, "note": note, "sentence": said, "size": (10.4, 4.9)}


def price_lines(pairs, silence, note: str = "") -> dict:
    """What each layer costs that uses the keys and values of the one before it; its control: its attention left out."""
    lines = (("shared", "uses the layer\nbefore it", pairs, False), (None, "its attention\nleft out", silence, True))
    series = []
    for variant, label, found, dashed in lines:
        found = sorted(found, key=lambda p: p.follower)
        series.append({"variant": variant, "label": label, "x": [p.follower for p in found],
                       "y": [p.kl for p in found], "dashed": dashed, "solid": not dashed})  # fmt: skip
    return {
        "kind": "lines", "title": "One layer gives up its keys and values", "series": series, "note": note,
        "x": {"label": "layer", "lo": 0}, "y": {"label": "KL to the full cache, nats", "scale": "log10"},
        "size": (9.2, 4.2),
    }  # fmt: skip


# ---- another memory ----------------------------------------------------------------------------------------------


def offload_lines(model: str, card: str, bus: float, bus_name: str, lengths: Sequence[int] = BUS_LENGTHS) -> dict:
    """The least time of one step: weights and cache read at the card's bandwidth, an offloaded cache over the bus.

    bus: bytes a second. Data-sheet bandwidths, nothing else takes time, and the bus works while the card does; where
    the cache no longer fits the card, its line ends with a mark.
    """
    gpu, room = find_gpu(card), memory_bytes(card)
    speed, kept, moved = gpu["bandwidth_gb_s"] * 1e9, [], []
    for n in lengths:
        e = estimate(model, 1, n, "fp16")
        kept.append((e.weights_bytes + e.kv_cache_bytes) / speed if e.total_bytes <= room else None)
        moved.append(max(e.weights_bytes / speed, e.kv_cache_bytes / bus))
    fits = [n for n, t in zip(lengths, kept, strict=True) if t is not None]
    slower = next((n for n, t in zip(lengths, moved, strict=True) if t > moved[0]), lengths[-1])
    return {
        "kind": "lines", "title": f"{short(model)} on one {gpu['name']} with {bus_name}", "size": (9.4, 4.3),
        "series": [
            {"variant": "full", "label": "cache on\nthe card", "x": list(lengths), "y": kept, "points": False},
            {"variant": "offloaded", "label": "cache in the\nhost's memory", "x": list(lengths), "y": moved,
             "points": False, "dashed": True},
        ],
        "x": {"label": "tokens of the text", "unit": "tokens", "scale": "log2"},
        "y": {"label": "least time of one step", "unit": "s", "scale": "log10"},
        "sentence": f"On the card up to {fits[-1] if fits else 0:,} of these tokens fit. The bus sets the pace from "
                    f"{slower:,} on; at {lengths[-1]:,} a step takes {theme.seconds(moved[-1])} at least.",
    }  # fmt: skip
