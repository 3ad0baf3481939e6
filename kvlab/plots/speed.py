"""Work and speed of a quantized cache: what attention over codes does, and when smaller is faster."""

from __future__ import annotations

from collections.abc import Mapping

from ..memory.capacity import max_batch, memory_bytes
from ..memory.catalog import find_gpu
from ..memory.estimate import estimate, resolve
from ..rounding import Work
from . import theme
from .explorer import Explorer, choice, slider
from .memory import short


def work_table(rows: Mapping[str, tuple[int, Work]]) -> str:
    """A line for each way: bytes read from the cache, FLOPs of products and number by number, bytes of tensors made in
    all and at once. rows: {name: (bytes read, Work)}."""
    lines = [
        f"{'':30} {'cache read':>11} {'products':>11} {'number by number':>17} {'tensors made':>13} {'at once':>9}"
    ]
    for name, (read, w) in rows.items():
        lines.append(
            f"{name:30} {theme.bytes_(read):>11} {theme.si(w.products, 'FLOP'):>11} "
            f"{theme.si(w.elementwise, 'FLOP'):>17} {theme.bytes_(w.written):>13} {theme.bytes_(w.peak):>9}"
        )
    return "\n".join(lines)


SPEED_MODELS = [("LLaMA-7B", "llama-7b"), ("Llama-2-13B", "llama-2-13b"), ("Llama-3.1-8B", "llama-3.1-8b")]
SPEED_CARDS = ["l4", "rtx-4090", "a100-40gb", "a100-80gb", "h100-80gb"]
SPEED_FORMATS = {"fp16": "fp16", "int8": "int8/64", "int4": "int4/64", "int2": "int2/64"}
BATCHES = tuple(2**p for p in range(11))


def speed_limit(model, card: str, batch: int, tokens: int, kv_dtype: str, params: int | None = None) -> float | None:
    """Tokens a second of decode steps that do nothing but read weights (fp16) and cache once; None: does not fit.

    An upper bound: the data sheet's bandwidth, and no time to compute or to unpack. model, params: as estimate's.
    """
    e = estimate(model, batch, tokens, kv_dtype, weights_dtype="fp16", params=params)
    if e.total_bytes > memory_bytes(card):
        return None
    return batch * 1e9 * find_gpu(card)["bandwidth_gb_s"] / (e.weights_bytes + e.kv_cache_bytes)


class SpeedExplorer(Explorer):
    """When smaller is faster: the reading limit of decoding against the batch, up to the batch that fits."""

    def controls(self):
        cards = [(find_gpu(c)["name"], c) for c in SPEED_CARDS]
        return {
            "length": slider("length", [2**p for p in range(8, 16)], 2048, "tokens of each sequence", "tokens"),
            "batch": slider("batch", BATCHES, 8, "sequences at once"),
            "model": choice("model", SPEED_MODELS, "llama-7b", "weights in fp16"),
            "card": choice("card", cards, "a100-40gb", "memory and bandwidth"),
        }  # fmt: skip

    def data(self, values: dict) -> dict:
        model, card, tokens, batch = (values[name] for name in ("model", "card", "length", "batch"))
        arch, _, params = resolve(model)  # read once: a tick makes dozens of estimates
        room, options = memory_bytes(card), {"weights_dtype": "fp16", "params": params}
        most = {n: max_batch(arch, room, tokens, kv_dtype=kv, **options) for n, kv in SPEED_FORMATS.items()}

        def limit(name, b):
            return speed_limit(arch, card, b, tokens, SPEED_FORMATS[name], params) if b else None

        series, bars = [], []
        for name, largest in most.items():
            x = [*(b for b in BATCHES if b < largest), largest] if largest else [1]
            look = {"variant": "full" if name == "fp16" else "quantized", "label": name}
            series.append({**look, "x": x, "y": [limit(name, b) for b in x], "points": False,
                           "solid": name == "int8", "dashed": name == "int2"})  # fmt: skip
            bars.append({**look, "values": [largest]})
        lines = {
            "kind": "lines", "title": f"{short(model)}, {tokens:,} tokens each", "series": series, "at": batch,
            "x": {"label": "sequences at once; a line ends where memory does", "scale": "log2"},
            "y": {"label": "tokens a second, at most", "scale": "log2"}, "weight": 1.5,
        }  # fmt: skip
        fits = {"kind": "bars", "title": "Largest batch that fits", "y": {"label": "sequences"}, "parts": ["sequences"],
                "bars": bars}  # fmt: skip
        here, end = ({n: limit(n, b) for n, b in at.items()} for at in (dict.fromkeys(most, batch), most))
        sentence = f"{_against(f'Batch {batch}', here)} {_against('Each at its largest batch', end)}"
        return {"kind": "panels", "title": "Speed", "panels": [lines, fits], "sentence": sentence,
                "size": (9.6, 3.9)}  # fmt: skip


def _against(when: str, limits: dict[str, float | None]) -> str:
    """int4's limit beside fp16's."""
    full, small = limits["fp16"], limits["int4"]
    if small is None:
        return f"{when}: does not fit, not even in int4."
    said = f"{when}: int4 at most {theme.digits(small)} tokens/s"
    return f"{said}; fp16 does not fit." if full is None else (
        f"{said}, fp16 {theme.digits(full)}: {small / full:.2f} times as many."
    )  # fmt: skip
