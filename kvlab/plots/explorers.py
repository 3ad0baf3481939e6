"""The explorers that need no measurement: what a generation costs, and what its cache holds."""

from __future__ import annotations

import math

from .. import cost
from ..config import ModelConfig
from . import theme
from .explorer import Explorer, choice, slider

LENGTHS = tuple(2**p for p in range(4, 18))  # 16 .. 131,072 tokens
TERMS = {
    "everything": ("FLOPs, whole generation", lambda f: f.total),
    "attention only": ("attention FLOPs, whole generation", lambda f: f.attention),
    "projections only": ("projection FLOPs, whole generation", lambda f: f.projections),
}
SHARING = [("a pair per head (MHA)", 1), ("a pair per 4 heads (GQA)", 4), ("one pair (MQA)", 0)]


class CostExplorer(Explorer):
    """Predicted FLOPs of a generation without a cache, with a full one and with a sliding one, and the bytes held.

    Left: the whole generation against its length, log-log; the slopes are those at the chosen length, log2 of what
    doubling it multiplies the cost by: the attention term's approach 3, 2 and 1. Right: the token at the chosen
    length, split into projections and attention, and the bytes held for it.

    config     a model of your own instead of the controls for layers, hidden size and KV heads.
    measured   {a key of TERMS: [series of data.py]}: FLOPs counted on that model for whole generations from `prompt`
               tokens. They lie over the left picture, the predictions become dashed. A series with a "window" is
               shown only at that window. Needs config.
    """

    variants = ("none", "full", "sliding")

    def __init__(
        self,
        config: ModelConfig | None = None,
        prompt: int = 1,
        measured: dict[str, list[dict]] | None = None,
        note: str = "",
        **kw,
    ):
        self.fixed, self.prompt, self.measured, self.note = config, prompt, measured or {}, note
        if self.measured and config is None:
            raise ValueError("measured FLOPs belong to one model: pass its config too")
        super().__init__(**kw)

    def controls(self):
        controls = {
            "length": slider("length", LENGTHS, 4096, "tokens generated", "tokens"),
            "window": slider("window", [2**p for p in range(4, 14)], 512, "keys a sliding cache keeps", "tokens"),
            "layers": slider("layers", [1, 2, 4, 8, 16, 22, 32, 48, 64, 80], 16, "num_hidden_layers"),
            "hidden": slider("hidden size", [2**p for p in range(6, 14)], 1024, "hidden_size; heads are 64 wide"),
            "kv": choice("keys, values", SHARING, 1, "num_key_value_heads: how many query heads share a KV head"),
            "term": choice("count", list(TERMS), "everything", "which FLOPs the left picture shows"),
        }  # fmt: skip
        model = () if self.fixed is None else ("layers", "hidden", "kv")
        return {name: control for name, control in controls.items() if name not in model}

    def config(self, values: dict) -> ModelConfig:
        """The model the controls describe: heads of 64 channels, SwiGLU of 8/3 the hidden size."""
        if self.fixed is not None:
            return self.fixed
        heads = values["hidden"] // 64
        kv = 1 if values["kv"] == 0 else max(heads // values["kv"], 1)
        return ModelConfig(hidden_size=values["hidden"], num_hidden_layers=values["layers"], vocab_size=32000,
                           num_attention_heads=heads, num_key_value_heads=kv)  # fmt: skip

    def data(self, values: dict) -> dict:
        config, at, window = self.config(values), values["length"], values["window"]
        words, pick = TERMS[values["term"]]
        series = []
        measured = [s for s in self.measured.get(values["term"], ()) if s.get("window", window) == window]
        for kind in self.variants:

            def flops(n, kind=kind):
                return pick(cost.generation_flops(config, kind, self.prompt, n, window))

            y, here = [flops(n) for n in LENGTHS], math.log2(flops(2 * at) / flops(at))
            series.append({"variant": kind, "x": list(LENGTHS), "y": y, "points": False, "slope": here,
                           "dashed": bool(measured)})  # fmt: skip
        lines = {
            "kind": "lines", "title": "The whole generation", "series": series + measured, "at": at,
            "x": {"label": f"tokens generated; slopes from {at:,} to {2 * at:,}", "unit": "tokens", "scale": "log2"},
            "y": {"label": words, "unit": "FLOP", "scale": "log10"}, "note": self.note, "weight": 1.35,
        }  # fmt: skip
        steps = {kind: cost.step_flops(config, kind, self.prompt + at - 1, window) for kind in self.variants}
        bars = {
            "kind": "bars", "title": f"Token {at:,}", "y": {"label": "FLOPs for this one token", "unit": "FLOP"},
            "parts": ["projections", "attention"],
            "bars": [{"variant": k, "values": list(f)} for k, f in steps.items()],
        }  # fmt: skip
        held = {k: cost.held_bytes(config, k, self.prompt + at - 1, window) for k in self.variants}
        memory = {
            "kind": "bars", "title": f"Held for token {at:,}", "y": {"label": "keys and values, fp16", "unit": "B"},
            "parts": ["keys and values"], "bars": [{"variant": k, "values": [b]} for k, b in held.items()],
        }  # fmt: skip
        whole = {k: cost.generation_flops(config, k, self.prompt, at, window).total for k in self.variants}
        sentence = (
            f"{at:,} tokens without a cache cost {theme.si(whole['none'], 'FLOP')}, "
            f"{theme.digits(whole['none'] / whole['full'])} times as much as with a full cache, which holds "
            f"{theme.bytes_(held['full'])}; a window of {window:,} holds {theme.bytes_(held['sliding'])}."
        )
        return {"kind": "panels", "title": "Predicted cost", "panels": [lines, [bars, memory]], "sentence": sentence}


class MemoryExplorer(Explorer):
    """Bytes of keys and values against length, for a full, a quantized and a sliding cache, under a memory limit.

    Closed forms only (kvlab.cost): 2 x layers x KV heads x head_dim x bytes a number, for each token of each sequence.
    """

    def controls(self):
        return {
            "length": slider("length", [2**p for p in range(7, 18)], 4096, "tokens in each sequence", "tokens"),
            "batch": slider("batch", [2**p for p in range(9)], 8, "sequences held at once"),
            "layers": slider("layers", [8, 12, 16, 22, 24, 28, 32, 40, 48, 64, 80], 32, "num_hidden_layers"),
            "kv_heads": slider("KV heads", [1, 2, 4, 8, 16, 32, 40, 64], 8, "num_key_value_heads"),
            "head_dim": slider("head size", [64, 80, 96, 128, 256], 128, "head_dim: channels of one head"),
            "bits": choice("quantized to", [("int8", 8), ("int4", 4), ("int2", 2)], 4, "bits a number, groups of 64"),
            "window": slider("window", [2**p for p in range(6, 14)], 1024, "keys a sliding cache keeps", "tokens"),
            "room": slider("memory left", [2**30 * g for g in (1, 2, 4, 8, 16, 24, 40, 64, 80)], 2**33,
                           "what the weights leave of the card", "B"),
        }  # fmt: skip

    def data(self, values: dict) -> dict:
        at, batch, window, room = (values[k] for k in ("length", "batch", "window", "room"))
        heads, size = values["kv_heads"], values["head_dim"]
        config = ModelConfig(hidden_size=heads * size, num_attention_heads=heads, head_dim=size,
                             num_hidden_layers=values["layers"])  # fmt: skip
        itemsize = {"full": 2, "quantized": cost.quantized_itemsize(values["bits"]), "sliding": 2}
        lengths = sorted({int(2 ** (p / 2)) for p in range(14, 35)} | {at})

        def held(kind, length):
            return batch * cost.held_bytes(config, kind, length, window, itemsize[kind])

        names = {"full": "full, fp16", "quantized": f"quantized, int{values['bits']}", "sliding": f"window {window:,}"}
        limit = [{"label": f"memory left: {theme.bytes_(room)}", "value": room}]
        lines = {
            "kind": "lines", "title": f"Keys and values of {batch} sequence{'s' if batch > 1 else ''}", "at": at,
            "series": [{"variant": k, "label": n, "x": lengths, "y": [held(k, t) for t in lengths], "points": False}
                       for k, n in names.items()],
            "x": {"label": "tokens in each sequence", "unit": "tokens", "scale": "log2"}, "limits": limit,
            "y": {"label": "bytes held", "unit": "B", "scale": "log2"}, "weight": 1.35,
        }  # fmt: skip
        bars = {
            "kind": "bars", "title": f"At {at:,} tokens each", "y": {"label": "bytes held", "unit": "B"},
            "parts": ["held"], "bars": [{"variant": k, "label": n, "values": [held(k, at)]} for k, n in names.items()],
            "limits": limit,
        }  # fmt: skip
        fits = int(room // held("full", 1))
        sentence = (
            f"Each token of each sequence takes {theme.bytes_(config.kv_bytes_per_token(), exact=True)} in fp16. "
            f"{theme.bytes_(room)} hold {batch} full sequence{'s' if batch > 1 else ''} of up to {fits:,} tokens."
        )
        return {"kind": "panels", "title": "Memory", "panels": [lines, bars], "sentence": sentence}
