"""The explorer of cost: what a generation costs with and without a cache, in closed form."""

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
