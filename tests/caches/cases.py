"""Generated cases for the promises that every cache keeps, and the closed forms of their bytes. Seeded."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from eviction_oracle import EVICTING
from oracles import PADDINGS, SubStep, assert_logits, call, dense_logits, feed, ids_for, toy
from two_devices import TwoDevices

from kvlab.caches import make_cache

COUNTS = {"growing": 80, "full": 80, "paged": 100, "sliding": 160, "quantized": 140}
COUNTS |= {"heavy_hitter": 90, "random": 66, "first_last": 91}
COUNTS |= {"shared": 80, "offloaded": 60}


@dataclass(frozen=True)
class Case:
    kind: str
    seed: int
    model: tuple  # changes to the toy's config
    options: tuple  # of make_cache
    lengths: tuple[int, ...]
    schedule: tuple[tuple[int, ...], ...]  # tokens of each row in each call
    padding: str
    chunk: int

    def __str__(self):
        return f"{self.kind}-{self.seed}"

    def make_model(self, dtype=torch.float64):
        return toy(dtype=dtype, **dict(self.model))

    def make_cache(self, model, batch_size: int | None = None):
        B = batch_size or len(self.lengths)
        if self.far:
            return TwoDevices(B, self.max_length)
        return make_cache(self.kind, model, B, self.max_length, **dict(self.options))

    @property
    def far(self) -> bool:
        """In every second case an offloaded cache moves as if the model's device were another than its own."""
        return self.kind == "offloaded" and self.seed % 2 == 1

    @property
    def max_length(self) -> int:
        return max(self.lengths) + self.seed % 3  # sometimes with no room to spare


def generate_case(kind: str, seed: int) -> Case:
    rng = np.random.default_rng([list(COUNTS).index(kind), seed])

    def pick(*choices):
        return choices[rng.integers(len(choices))]

    model = {"num_key_value_heads": pick(1, 2, 4), "qkv_bias": pick(True, False), "head_dim": pick(8, 8, 16)}
    model["tie_word_embeddings"] = pick(True, False)
    layers = pick(None, None, "alternating", "all")
    if layers:
        model["sliding_window"] = pick(1, 3, 6)
        if layers == "alternating":
            model["layer_types"] = pick(
                ("sliding_attention", "full_attention"), ("full_attention", "sliding_attention")
            )
    chunk = pick(1, 2, 3, 5, 8)
    longest = int(rng.integers(6, 28))
    options: dict = {}
    if kind == "sliding":
        window = max(1, pick(1, 2, chunk - 1, chunk, chunk + 1))
        sinks = pick(0, 0, 1, 2, 4)
        options = {"window": window, "sinks": sinks, "sinks_at": pick("text", "cache")}
        longest = 3 * window + sinks + int(rng.integers(2, 6))
    elif kind == "quantized":
        options = {
            "k_bits": pick(8, 4, 2, "fp8", "fp8_e5m2", 16),
            "v_bits": pick(8, 4, 2, "fp8", "fp8_e5m2", 16),
            "key_axis": pick("channel", "token"),
            "group_size": pick(1, 2, 4, 8),
            "residual_length": pick(0, 1, 3, 4, 8),
        }
        longest = int(rng.integers(12, 30))
    elif kind == "paged":
        options = {"block_size": pick(1, 2, 3, 4, 8, 16)}
    elif kind in EVICTING:
        budget = int(rng.integers(1, 11))
        longest = int(rng.integers(2 * budget, 3 * budget + 4)) if pick(True, True, True, False) else budget
        if pick(True, False):
            heads, least = range(model["num_key_value_heads"]), max(1, budget - 4)
            budget = tuple(tuple(int(rng.integers(least, least + 6)) for _ in heads) for _ in range(2))
        options = {"budget": budget}
        least = min(map(min, budget)) if isinstance(budget, tuple) else budget
        if kind == "first_last":
            options["first"] = int(rng.integers(0, least))
        else:
            options["recent"] = pick(0, 1, 0.5, 0.5, 0.3, 1.0, least)
            options["grace"] = int(rng.integers(0, min(least, 4)))
        if kind == "random":
            options["seed"] = pick(0, 1, 17)
    B = pick(1, 1, 2, 3)
    ragged = B > 1 and pick(True, True, False)
    lengths = [longest] + [int(rng.integers(1, longest + 1)) if ragged else longest for _ in range(B - 1)]
    rng.shuffle(lengths)
    style = pick("chunks", "prefill and decode", "random", "at once")
    left, schedule = list(lengths), []
    while any(left):
        if style == "chunks":
            counts = [min(chunk, n) for n in left]
        elif style == "at once":
            counts = list(left)
        elif style == "random":
            counts = [int(rng.integers(0, min(n, chunk + 1) + 1)) for n in left]
        elif not schedule:  # prefill: all but a few
            few = int(rng.integers(1, 6))
            counts = [max(1, n - few) for n in left]
        else:
            counts = [min(1, n) for n in left]
        if any(counts):
            schedule.append(tuple(counts))
            left = [n - c for n, c in zip(left, counts)]
    share_layers(kind, np.random.default_rng([99, list(COUNTS).index(kind), seed]), model, options)
    return Case(
        kind,
        seed,
        tuple(model.items()),
        tuple(options.items()),
        tuple(lengths),
        tuple(schedule),
        pick(*PADDINGS),
        chunk,
    )


def share_layers(kind: str, rng, model: dict, options: dict) -> None:
    """In every fifth case layers that follow others: the model is made so, or else a shared cache makes it so."""
    if kind != "shared" and rng.integers(5):
        return
    one_type = "layer_types" not in model
    if not one_type:
        model["layer_types"] += model["layer_types"][:1]
    model["num_hidden_layers"] = 3
    maps = [(0, 0, 0), (0, 0, 2), (0, 1, 1), (0, 1, 0)] if one_type or kind == "shared" else [(0, 1, 0)]
    owners = maps[rng.integers(len(maps))]
    if kind == "shared":
        options |= ({"owners": owners}, {"every": int(rng.integers(1, 4))}, {})[rng.integers(3)]
    else:
        model["kv_owner"] = owners
    if isinstance(options.get("budget"), tuple):
        options["budget"] += options["budget"][:1]


CASES = [generate_case(kind, seed) for kind, n in COUNTS.items() for seed in range(n)]


# ---- closed forms of the bytes, written from the docstrings


def expected_bytes(case: Case, model, log: list[SubStep]) -> tuple[dict[str, int], int, int]:
    """What nbytes_by(), bytes_copied and bytes_read must be after these forward passes."""
    if case.kind in EVICTING:
        return bytes_of_eviction(case, model, log)
    c, o, B, itemsize = model.config, dict(case.options), len(case.lengths), model.dtype.itemsize
    L, (n_kv, D, Dv) = len(set(c.kv_owner)), c.kv_shape
    half, half_v = n_kv * D * itemsize, n_kv * Dv * itemsize  # one token's key, and value, in one layer
    one = half + half_v
    held: dict[str, int] = {}
    copied = read = 0
    if case.kind == "growing":
        S = 0
        for step in log:
            copied += B * S * one
            S += step.T
            read += B * S * one
        held = {"keys": L * B * S * half, "values": L * B * S * half_v, "positions": 8 * B * S}
    elif case.kind in ("full", "offloaded", "shared"):
        stored = L  # layers
        if case.kind == "shared":
            stored = len(set(o["owners"])) if "owners" in o else -(-L // o.get("every", 2))
        held = {"keys": stored * B * case.max_length * half, "values": stored * B * case.max_length * half_v}
        read = sum(sum(step.after) for step in log) * one
        if case.far:
            copied = sum(B * max(step.start) for step in log) * one
    elif case.kind == "sliding":
        slots = o["window"] + o["sinks"]
        held = {"keys": L * B * slots * half, "values": L * B * slots * half_v, "positions": 0}
        held["sink_keys"] = L * B * o["sinks"] * half if o["sinks_at"] == "cache" else 0
        for step in log:
            if step.T > 1:
                copied += B * min(max(step.start), slots) * one
            read += sum(min(n, slots) for n in step.after) * one
    elif case.kind == "paged":
        bs = o["block_size"]
        blocks = B * -(-case.max_length // bs)
        for step in log:
            longest = max(-(-n // bs) for n in step.after)
            copied += B * longest * bs * one
            read += sum(step.after) * one
        held = {"keys": L * blocks * bs * half, "values": L * blocks * bs * half_v, "tables": 8 * B * longest}
    elif case.kind == "quantized":
        G, R = o["group_size"], o["residual_length"]
        capacity, slots = case.max_length // G * G, min(R + G, case.max_length)

        def codes(bits, D) -> float:
            return {8: 1, 4: 0.5, 2: 0.25, "fp8": 1, "fp8_e5m2": 1, 16: itemsize}[bits] * n_kv * D

        def scales(bits, axis, D) -> float:
            return 0 if bits not in (8, 4, 2) else 4 * n_kv * D / (G if axis == "channel" else min(G, D))

        per_k, per_v = codes(o["k_bits"], D), codes(o["v_bits"], Dv)
        per_scales = scales(o["k_bits"], o["key_axis"], D) + scales(o["v_bits"], "token", Dv)
        per_sealed = per_k + per_v + per_scales
        held = {
            "keys": L * B * capacity * per_k,
            "values": L * B * capacity * per_v,
            "scales": L * B * capacity * per_scales,
            "tail": L * B * slots * one,
        }
        before = [0] * B
        for step in log:
            sealed = [max(0, (s - R) // G * G) for s in step.start]
            uniform = len(set(step.start)) == 1 and all(a - s == step.T for s, a in zip(step.start, step.after))
            copied += sum(n - b for n, b in zip(sealed, before)) * one  # groups sealed
            copied += B * max(sealed) * per_sealed + B * (step.after[0] - sealed[0] if uniform else slots) * one
            read += sum(n * per_sealed + (a - n) * one for n, a in zip(sealed, step.after))
            before = sealed
    return held, L * copied, L * read


def bytes_of_eviction(case: Case, model, log: list[SubStep]) -> tuple[dict[str, int], int, int]:
    """The same for a budget of slots in every head, of which a row can use max_length at most."""
    c, budget, B, itemsize = model.config, dict(case.options)["budget"], len(case.lengths), model.dtype.itemsize
    n_kv, half, half_v = c.kv_shape[0], c.kv_shape[1] * itemsize, c.kv_shape[2] * itemsize  # of one head and token
    slots = [
        [min(case.max_length, budget if isinstance(budget, int) else budget[layer][head]) for head in range(n_kv)]
        for layer in c.kv_layers
    ]
    N, copied, read = sum(map(sum, slots)), 0, 0
    for step in log:
        for heads in slots:
            if len(set(heads)) > 1:
                copied += B * n_kv * max(1, min(max(step.after), max(heads))) * (half + half_v)
            read += sum(min(n, size) for n in step.after for size in heads) * (half + half_v)
    held = {"keys": B * N * half, "values": B * N * half_v, "positions": B * N * 4}
    if case.kind == "heavy_hitter":
        held["scores"] = B * N * max(4, itemsize)
    return held, copied, read


def assert_bytes(case: Case, model, cache, log: list[SubStep]) -> None:
    held, copied, read = expected_bytes(case, model, log)
    assert cache.nbytes_by() == held, f"nbytes_by {cache.nbytes_by()}, the closed form gives {held}"
    assert cache.nbytes == sum(held.values())
    assert cache.bytes_copied == copied, f"bytes_copied {cache.bytes_copied}, the closed form gives {copied}"
    assert cache.bytes_read == read, f"bytes_read {cache.bytes_read}, the closed form gives {read}"


def free_everything(cache) -> None:
    """Let a paged cache's rows go; its pool must be as new."""
    while cache.rows:
        cache.free_row(0)
    cache.pool.check([])
    assert cache.pool.used_blocks == 0


# ---- one setup of every kind and rule, for the tests that are not generated

SETUPS = [
    ("growing", {}),
    ("full", {}),
    ("sliding", {"window": 5}),
    ("sliding", {"window": 1, "sinks": 1}),
    ("sliding", {"window": 4, "sinks": 2}),
    ("sliding", {"window": 4, "sinks": 2, "sinks_at": "cache"}),
    ("quantized", {"group_size": 4, "residual_length": 3}),
    ("quantized", {"group_size": 2, "residual_length": 0, "k_bits": 4, "v_bits": 2, "key_axis": "token"}),
    ("quantized", {"group_size": 3, "residual_length": 4, "k_bits": "fp8", "v_bits": "fp8_e5m2"}),
    ("paged", {"block_size": 4}),
    ("paged", {"block_size": 1}),
    ("heavy_hitter", {"budget": 6}),
    ("heavy_hitter", {"budget": ((4, 6), (5, 3)), "recent": 0.3, "grace": 1}),
    ("random", {"budget": 5, "seed": 3}),
    ("random", {"budget": ((4, 6), (5, 3)), "recent": 1}),
    ("first_last", {"budget": 6, "first": 2}),
    ("shared", {"every": 2}),
    ("offloaded", {}),
]


def name_of(setup) -> str:
    return "-".join([setup[0], *(f"{k}={v}" for k, v in setup[1].items())])


def stored_tensors(cache) -> list[torch.Tensor]:
    """Every tensor that the cache keeps from one step to the next."""
    found, todo = [], [vars(cache), vars(cache.pool) if hasattr(cache, "pool") else {}]
    while todo:
        x = todo.pop()
        if isinstance(x, torch.Tensor):
            found.append(x)
        elif isinstance(x, dict):
            todo += x.values()
        elif isinstance(x, (list, tuple)):
            todo += x
    return found


# ---- checks that the planted bugs must fail as well


def check_fork(make, model, tokens: int = 6) -> None:
    """A cache and its fork go different ways; each must say what a text of its own says."""
    text, ways = ids_for(1, [tokens])[0], ids_for(2, [7, 7])
    cache = make()
    feed(model, cache, [text], [[tokens]])
    twin = cache.fork()
    for step in range(7):  # in turn, so that each could spoil the other
        for one, way in zip((cache, twin), ways):
            got = call(model, one, [way[step : step + 1]], [tokens + step])[0]
            want = dense_logits(model, text + way[: step + 1])[-1:]
            assert_logits(got, want, what="cache" if one is cache else "fork")


def check_prefix(model, block_size: int = 4) -> None:
    """Texts with the same second block and different first ones; each later text must get its own past."""
    head, other, middle, tail = ids_for(3, [4, 4, 4, 3])
    other[0] = head[0]
    cache = make_cache("paged", model, 1, 64, block_size=block_size, num_blocks=40)
    for n, start in enumerate((head, other, other, head)):
        text = start + middle + tail
        row = cache.add_row() if n else 0
        start = cache.match_prefix(row, text)
        new = [[] for _ in range(row)] + [text[start:]]
        got = call(model, cache, new, [*cache.lengths[:row], start])[row]
        cache.commit(row, text)
        assert_logits(got, dense_logits(model, text)[start:], what=f"text {n}")
        cache.pool.check([r.table for r in cache.rows])
