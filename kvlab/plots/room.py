"""The explorer of "CUDA out of memory": weights and cache of a model beside the memory that there is."""

from __future__ import annotations

from ..memory.capacity import max_batch, max_seq_len
from ..memory.catalog import find_gpu
from ..memory.estimate import estimate
from . import theme
from .explorer import Explorer, choice, slider

MODELS = [("SmolLM2-135M", "smollm2-135m"), ("Llama-3.2-1B", "llama-3.2-1b"), ("LLaMA-7B", "llama-7b"),
          ("Llama-3.1-8B", "llama-3.1-8b"), ("Llama-2-13B", "llama-2-13b")]  # fmt: skip
CARDS = ["t4", "l4", "rtx-4090", "a100-80gb"]


class RoomExplorer(Explorer):
    """Does it fit? Weights, keys and values, and an allowance, against the memory of this machine or of a card.

    here: (name, bytes) of the machine found. The sizes are kvlab.memory.estimate's: weights in fp16, and an allowance
    for activations and the CUDA context.
    """

    def __init__(self, here: tuple[str, int], model: str = "llama-7b", note: str = "", **kw):
        self.here, self.model, self.note = here, model, note
        super().__init__(**kw)

    def controls(self):
        rooms = [(f"{self.here[0]}: {theme.bytes_(self.here[1])}", self.here[1])]
        for card in CARDS:
            gpu = find_gpu(card)
            rooms.append((f"{gpu['name']}: {theme.bytes_(gpu['memory_mib'] * 2**20)}", gpu["memory_mib"] * 2**20))
        return {
            "length": slider("length", [2**p for p in range(7, 16)], 2048, "tokens of each sequence", "tokens"),
            "batch": slider("batch", [1, 2, 4, 8, 16, 32, 64, 128], 4, "sequences held at once"),
            "model": choice("model", MODELS, self.model, "whose weights and shape"),
            "kv_dtype": choice("cache in", ["fp16", "fp8", "fp32"], "fp16", "number format of keys and values"),
            "room": choice("memory", rooms, rooms[0][1], "what there is"),
        }  # fmt: skip

    def data(self, values: dict) -> dict:
        model, room, kv = values["model"], values["room"], values["kv_dtype"]
        name = next(text for text, key in MODELS if key == model)

        def at(length):
            return estimate(model, values["batch"], length, kv)

        e = at(values["length"])
        pieces = [e.weights_bytes, e.kv_cache_bytes, e.activation_bytes + e.context_bytes]
        limit = [{"label": theme.bytes_(room), "value": room}]
        lengths = [2**p for p in range(7, 16)]
        lines = {
            "kind": "lines", "title": f"Longer texts, {values['batch']} at once", "at": values["length"],
            "series": [{"variant": "full", "label": "all together", "x": lengths, "points": False,
                        "y": [at(n).total_bytes for n in lengths]},
                       {"variant": None, "label": "weights alone", "x": lengths, "points": False, "dashed": True,
                        "y": [e.weights_bytes] * len(lengths)}],
            "x": {"label": "tokens of each sequence", "unit": "tokens", "scale": "log2"}, "limits": limit,
            "y": {"label": "bytes", "unit": "B", "scale": "log2"},
        }  # fmt: skip
        bars = {
            "kind": "bars", "title": f"{name}, {values['batch']} × {values['length']:,} tokens", "limits": limit,
            "parts": ["weights", "keys and values", "allowance"], "y": {"label": "bytes", "unit": "B"},
            "bars": [{"variant": "full", "label": name, "values": pieces}],
        }  # fmt: skip
        return {"kind": "panels", "title": "Does it fit?", "panels": [bars, lines], "note": self.note,
                "sentence": self.verdict(values, e)}  # fmt: skip

    def verdict(self, values: dict, e) -> str:
        """In words: does it fit, and what would."""
        room, kv = values["room"], values["kv_dtype"]
        each = f"Each token of each sequence takes {theme.bytes_(e.kv_bytes_per_token, exact=True)}."
        if e.total_bytes <= room:
            longest = max_seq_len(values["model"], room, values["batch"], kv_dtype=kv)
            return f"It fits. {each} There is room for sequences of up to {longest:,} tokens."
        most = max_batch(values["model"], room, values["length"], kv_dtype=kv)
        if e.weights_bytes + e.context_bytes > room:
            return f"Out of memory: the weights alone do not fit. {each}"
        return f"Out of memory. {each} At this length {most or 'not even one'} of these sequences would fit."
