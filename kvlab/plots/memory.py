"""The pictures of the memory formula: what fits a card, who shares keys and values, when the cache passes the weights.

All sizes are kvlab.memory.estimate's.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..memory.capacity import kv_tokens, max_batch, max_seq_len, memory_bytes
from ..memory.catalog import find_gpu, gpus
from ..memory.estimate import estimate, resolve
from . import theme
from .explorer import Explorer, choice, slider

MODELS = (
    "smollm2-135m", "llama-3.2-1b", "gemma-3-4b", "llama-7b", "mistral-7b-v0.1", "llama-3.1-8b", "qwen3-8b",
    "llama-2-13b", "gpt-oss-20b", "gemma-3-27b", "qwen3-32b", "llama-2-70b", "deepseek-v3", "mamba-2.8b",
)  # fmt: skip
KV_DTYPES = [("fp32", "fp32"), ("fp16", "fp16"), ("fp8", "fp8"), ("q8_0", "q8_0"), ("K q8_0, V q4_0", "q8_0:q4_0"),
             ("int4, groups of 64", "int4/64")]  # fmt: skip
LENGTHS = tuple(2**p for p in range(7, 18))  # 128 .. 131,072 tokens
BATCHES = tuple(2**p for p in range(9))  # 1 .. 256 sequences


class MemoryExplorer(Explorer):
    """Weights, keys and values, and an allowance, against length and against batch, under a card's limit.

    Log-log: the cache alone is a straight line in both pictures, the total bends from the weights' level to it.
    """

    def __init__(self, model: str = "llama-7b", card: str = "t4", **kw):
        self.model, self.card = model, find_gpu(card)["name"]
        super().__init__(**kw)

    def controls(self):
        cards = [(f"{g['name']}: {theme.bytes_(g['memory_mib'] * 2**20)}", g["name"]) for g in gpus()]
        return {
            "length": slider("length", LENGTHS, 2048, "tokens of each sequence", "tokens"),
            "batch": slider("batch", BATCHES, 4, "sequences held at once"),
            "model": choice("model", [(short(m), m) for m in MODELS], self.model, "whose weights and shape"),
            "kv_dtype": choice("cache in", KV_DTYPES, "fp16", "number format of keys and values"),
            "weights": choice("weights in", ["fp16", "int8", "int4"], "fp16", "number format of the weights"),
            "card": choice("card", cards, self.card, "whose memory, as its driver reports it"),
        }  # fmt: skip

    def data(self, values: dict) -> dict:
        arch, _, params = resolve(values["model"])  # read once: a tick makes dozens of estimates
        room, at, batch = memory_bytes(values["card"]), values["length"], values["batch"]
        options = {"kv_dtype": values["kv_dtype"], "weights_dtype": values["weights"], "params": params}
        limit = [{"label": f"{values['card']}: {theme.bytes_(room)}", "value": room}]

        def lines(title, x, stops, here, run, weight):
            found = [run(n) for n in stops]
            y = {
                "all together": ("full", [e.total_bytes for e in found], False),
                "weights": (None, [e.weights_bytes for e in found], True),
                "cache": ("quantized" if values["kv_dtype"] not in ("fp32", "fp16") else "full",
                          [e.kv_cache_bytes + e.state_bytes for e in found], True),
            }  # fmt: skip
            return {
                "kind": "lines", "title": title, "x": {**x, "scale": "log2"}, "at": here, "limits": limit,
                "y": {"label": "bytes on the card", "unit": "B", "scale": "log2"}, "weight": weight,
                "series": [{"variant": v, "label": n, "x": list(stops), "y": ys, "points": False, "dashed": dashed}
                           for n, (v, ys, dashed) in y.items()],
            }  # fmt: skip

        texts = f"{batch} sequence{'s' if batch > 1 else ''}"
        length = lines(f"Longer: {texts}", {"label": "tokens of each sequence", "unit": "tokens"}, LENGTHS, at,
                       lambda n: estimate(arch, batch, n, **options), 1)  # fmt: skip
        many = lines(f"More: {at:,} tokens each", {"label": "sequences at once"}, BATCHES, batch,
                     lambda n: estimate(arch, n, at, **options), 1)  # fmt: skip
        return {"kind": "panels", "title": "Memory", "panels": [length, many],
                "sentence": _verdict(values, arch, room, options)}  # fmt: skip


def _verdict(values, arch, room, options) -> str:
    """Does it fit, by how much, and how far it would go."""
    e = estimate(arch, values["batch"], values["length"], **options)
    cache = e.kv_cache_bytes + e.state_bytes
    parts = f"weights {theme.bytes_(e.weights_bytes)}, cache {theme.bytes_(cache)}"
    if e.total_bytes > room:
        head = f"Out of memory by {theme.bytes_(e.total_bytes - room)}: {parts}."
    else:
        head = f"It fits, {theme.bytes_(room - e.total_bytes)} stay free: {parts}."
    longest = max_seq_len(arch, room, values["batch"], **options)
    most = max_batch(arch, room, values["length"], **options)
    if longest == 0:
        return f"{head} Not even the shortest texts fit."
    far = f"length {longest:,}" if longest else "no length"
    many = f"batch {most:,}" if most is not None else "no batch"
    return f"{head} The limit is {far} at this batch, and {many} at this length."


def fit_map(model: str, card: str, lengths: Sequence[int] = LENGTHS, batches: Sequence[int] = BATCHES, **options):
    """A heat map of the share of the card that each length and batch would use; what does not fit stays empty."""
    arch, _, params = resolve(model)
    room, values = memory_bytes(card), []
    for n in lengths:
        shares = [estimate(arch, b, n, params=params, **options).total_bytes / room for b in batches]
        values.append([share if share <= 1 else None for share in shares])
    said = ", ".join(f"{k.removesuffix('_dtype').replace('kv', 'cache')} {v}" for k, v in options.items())
    cells = sum(v is not None for row in values for v in row)
    return {
        "kind": "heatmap", "title": short(model) + (f", {said}" if said else ""),
        "values": values, "rows": [f"{n:,}" for n in lengths], "columns": [str(b) for b in batches], "unit": "%",
        "label": f"share of {find_gpu(card)['name']}", "lo": 0, "hi": 1, "x": {"label": "sequences at once"},
        "y": {"label": "tokens of each sequence; empty: does not fit"},
        "sentence": f"{cells} of {len(lengths) * len(batches)} fit.",
    }  # fmt: skip


def token_bars(title: str, rows: Sequence[tuple[str, str, object]], **options) -> dict:
    """Bytes that one more token adds. rows: (label, variant, model or config); options: estimate's."""
    found = [(label, variant, estimate(model, **options).kv_bytes_per_token) for label, variant, model in rows]
    (most_label, _, most), (least_label, _, least) = max(found, key=lambda r: r[2]), min(found, key=lambda r: r[2])
    return {
        "kind": "bars", "title": title, "y": {"label": "bytes that one token adds, fp16", "unit": "B"},
        "parts": ["keys and values"], "bars": [{"variant": v, "label": n, "values": [b]} for n, v, b in found],
        "sentence": f"{most_label} holds {theme.digits(most / least)} times as much as {least_label}.",
    }  # fmt: skip


def held_bars(title: str, rows: Sequence[tuple[str, str, dict[str, int]]], note: str = "") -> dict:
    """What caches hold: keys, values, and all that lies beside them. rows: (label, variant, nbytes_by())."""
    bars = []
    for label, variant, by in rows:
        rest = sum(by.values()) - by["keys"] - by["values"]
        bars.append({"variant": variant, "label": label, "values": [by["keys"], by["values"], rest]})
    return {
        "kind": "bars", "title": title, "y": {"label": "bytes held", "unit": "B"}, "note": note, "bars": bars,
        "parts": ["keys", "values", "beside them"],
    }  # fmt: skip


def passing_length(model, weights_dtype: str, batch: int = 1, cards: int = 1, **options) -> int | None:
    """Tokens of each of `batch` sequences at which the cache outweighs the weights on a card; None: it never does."""
    weights = estimate(model, weights_dtype=weights_dtype, tensor_parallel=cards).weights_bytes
    held = kv_tokens(model, weights // batch, tensor_parallel=cards, **options)
    return None if held is None else held + 1


def weights_and_cache(model: str, batches: Sequence[int], levels: Sequence[tuple[str, str, int]]) -> dict:
    """The cache of `batches` against length, and the weights as levels: (label, weights_dtype, cards)."""
    arch, name, params = resolve(model)
    series = [
        {"variant": "full", "label": f"cache, {b} text{'s' if b > 1 else ''}", "x": list(LENGTHS), "points": False,
         "y": [estimate(arch, b, n, params=params).kv_cache_bytes for n in LENGTHS]}
        for b in batches
    ]  # fmt: skip
    for label, dtype, cards in levels:
        weights = estimate(arch, params=params, weights_dtype=dtype, tensor_parallel=cards).weights_bytes
        y = [weights] * len(LENGTHS)
        series.append({"variant": None, "label": label, "x": list(LENGTHS), "y": y, "points": False, "dashed": True})
    return {
        "kind": "lines", "title": f"{short(name)}: the weights stand still", "series": series,
        "x": {"label": "tokens of each sequence", "unit": "tokens", "scale": "log2"},
        "y": {"label": "bytes on one card", "unit": "B", "scale": "log2"},
    }  # fmt: skip


def short(model: str) -> str:
    """A model's name without its owner, as the catalog writes it."""
    return resolve(model)[1].rsplit("/", 1)[-1].removesuffix("-hf")
