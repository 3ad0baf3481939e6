"""figures/memory_explorer.html: the memory calculator as one page that needs no kernel, no network and no library.

page() fills the template beside it with the catalog, the number formats and the theme's colours. The page's script
repeats kvlab.memory.estimate in a hundred lines of JavaScript; the tests compare the two in a real browser.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from ..memory.catalog import gpus, models
from ..memory.estimate import CUDA_CONTEXT, PREFILL_TOKENS, estimate, resolve
from ..memory.formats import number_format, weight_format
from ..memory.layers import Attention, Both, Compressed, Cross, Latent, State
from ..memory.reading import find
from ..memory.spellings import FFN, HIDDEN, VOCAB
from . import theme

HERE = Path(__file__).parent
KV_DTYPES = ("fp32", "fp16", "fp8", "q8_0", "q5_1", "q4_0", "int8/64", "int4/64", "int2/64", "nvfp4")
WEIGHTS_DTYPES = ("fp32", "fp16", "fp8", "int8", "q8_0", "q6_k", "q5_k_m", "q4_k_m", "int4", "nf4", "mxfp4")
START = {"model": "meta-llama/Llama-7b", "card": "NVIDIA T4", "kv": "fp16", "weights": "fp16", "tp": 1,
         "batch": 4, "length": 2048}  # fmt: skip


def page() -> str:
    """The page as text."""
    text = (HERE / "memory_page.html").read_text(encoding="utf-8")
    parts = {
        "{{colors}}": colors(),
        "{{script}}": (HERE / "memory_page.js").read_text(encoding="utf-8"),
        "{{data}}": json.dumps(data(), separators=(",", ":")).replace("</", "<\\/"),
    }
    for name, part in parts.items():
        text = text.replace(name, part)
    return text


def data() -> dict:
    """What the page knows: models with the layers that they keep something for, cards, formats, and where to start."""
    shapes = [shape(entry) for entry in sorted(models(), key=lambda m: m["name"].rsplit("/", 1)[-1].lower())]
    return {
        "models": [s for s in shapes if s],
        "cards": [{"name": g["name"], "bytes": g["memory_mib"] * 2**20} for g in gpus()],
        "kv": {n: [number_format(n).block_bytes, number_format(n).block] for n in KV_DTYPES},
        "weights": {n: [weight_format(n).block_bytes, weight_format(n).block] for n in WEIGHTS_DTYPES},
        "start": START,
        "context": CUDA_CONTEXT,
        "prefill": PREFILL_TOKENS,
    }


def shape(entry: dict) -> dict | None:
    """One model for the page; None where its weights are not known, so that nothing could be said about a card."""
    arch, name, _ = resolve(entry["name"])
    now = estimate(entry["name"])
    hidden = find(arch.config, *HIDDEN)[1]
    if now.params is None:
        return None
    hidden = hidden if isinstance(hidden, int) else 0  # then estimate() allows nothing for activations
    ffn = find({k: v for k, v in arch.config.items() if isinstance(v, int)}, *FFN)[1] or 4 * hidden
    layers = [piece for layer, n in Counter(arch.layers).items() for piece in pieces(layer, n)]
    return {
        "name": name, "params": now.params, "heads": arch.query_heads, "positions": arch.max_positions,
        "hidden": hidden, "ffn": ffn, "vocab": find(arch.config, *VOCAB)[1] or 0, "encoder": arch.encoder_len or 0,
        "layers": layers, "notes": list(now.warnings),
    }  # fmt: skip


def pieces(layer, n: int) -> list[dict]:
    """`n` such layers in the page's terms: {"n", "kind", sizes}; a kind that keeps nothing gives none."""
    if isinstance(layer, Both):
        return pieces(layer.attention, n) + pieces(layer.state, n)
    if isinstance(layer, State):
        return [{"n": n, "kind": "state", "parts": layer.parts}]
    if isinstance(layer, Compressed):
        sizes = {"width": layer.head_dim, "keep": layer.window, "rate": layer.rate, "index": layer.index_dim}
        return [{"n": n, "kind": "compressed", **sizes}]
    if isinstance(layer, Latent):
        sizes = {"width": layer.rank + layer.rope_dim, "keep": layer.window, "index": layer.index_dim}
        return [{"n": n, "kind": "latent", **sizes}]
    if isinstance(layer, Attention):
        sizes = {"heads": layer.kv_heads, "k": layer.head_dim, "v": layer.v_head_dim, "index": layer.index_dim}
        kind = "cross" if isinstance(layer, Cross) else "attention"
        return [{"n": n, "kind": kind, "keep": layer.window or layer.chunk, **sizes}]
    return []


def colors() -> str:
    """The theme as CSS variables, for light and for dark."""
    full, weights = theme.VARIANTS["full"].color, theme.VARIANTS["offloaded"].color
    light = {
        "paper": theme.PAPER, "ink": theme.INK, "muted": theme.MUTED, "grid": theme.GRID, "alert": theme.ALERT,
        "cache": full, "weights": theme.mix(weights, theme.PAPER, 0.2), "rest": theme.mix(weights, theme.PAPER, 0.75),
        "fits": theme.RAMP[1], "fits-ink": theme.INK,
    }  # fmt: skip
    dark = {
        "paper": "#14171b", "ink": "#e8eaed", "muted": "#a9b1ba", "grid": "#353b43", "alert": "#ff8f9a",
        "cache": theme.mix(full, theme.PAPER, 0.6), "weights": theme.mix(weights, theme.PAPER, 0.1), "rest": "#3d4757",
        "fits": "#24405c", "fits-ink": "#e8eaed",
    }  # fmt: skip

    def rule(of):
        return "".join(f"--{name}:{value};" for name, value in of.items())

    return f":root{{{rule(light)}}}\n@media(prefers-color-scheme:dark){{:root{{{rule(dark)}}}}}"
