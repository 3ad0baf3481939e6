"""Every cache against no cache, on the device, in fp32, fp16 and bf16.

The reference is the uncached model in float64 on the CPU, with the weights as the dtype has rounded them. What the
uncached model itself is off by, on the device and in the dtype, is that dtype's rounding: an exact cache may be off by
ROOM times as much, since it adds the same numbers in another order. A cache with a window is held against the model
under that window; a quantized one, one whose layers share, or one that evicts, against the same cache in float64 on
the CPU. Rounding also tips codes, and scores that are nearly equal, so that two runs may part by as much as both are
off from exact: twice the rule's own error is added to the limit (and the codes themselves are compared bit for bit
besides). A control must fail: a cache that forgets token 0.
"""

from __future__ import annotations

import torch

from kvlab.attention import View
from kvlab.caches import BlockPool, GrowingCache, PagedCache
from kvlab.caches.codecs import make_codec
from kvlab.check.runs import OnePass, TurnedSinks
from kvlab.gpu_check.setup import GROUP, SINKS, WINDOW, Check, feed, has_fp8, make_model, random_ids, variants_of, worst

ROOM = 4
# rows of unequal length, chunks shorter and longer than the window, single steps, a row that pauses; six windows in all
PLAN = [[23, 5, 17], [1, 1, 1], [1, 1, 1], [15, 17, 1], [1, 0, 1], [1, 1, 1], [17, 40, 16], [1, 1, 1], [33, 20, 18],
        *[[1, 1, 1]] * 4]  # fmt: skip


class ForgetsFirst(GrowingCache):
    """The control: wrong by one token."""

    def _write(self, layer, k, v, step):
        view = super()._write(layer, k, v, step)
        return View(view.k, view.v, view.pos.masked_fill(view.pos == 0, -1))


def check_logits(device, dtypes, size: str):
    """-> one Check per dtype and variant."""
    N = max(map(sum, zip(*PLAN)))
    for dtype in dtypes:
        name = str(dtype).removeprefix("torch.")
        model = make_model(device, dtype, size)
        exact = make_model("cpu", dtype, size).double()
        ids = random_ids(3, N, 512, seed=1)
        right: dict[str, torch.Tensor] = {}
        noise: dict[str, float] = {}
        for rule, sinks in (("exact", 0), ("window", 0), ("window", SINKS), ("turned", SINKS)):
            right[rule, sinks] = exact(ids, _reference(rule, sinks, exact))
            here = model(ids.to(device), _reference(rule, sinks, model)).cpu().double()
            noise[rule, sinks] = float((here - right[rule, sinks]).abs().max())
        yield Check(
            f"logits, {name}", "no cache", noise["exact", 0] < float("inf"), noise["exact", 0], None, "logit",
            "against float64 on the CPU: this dtype's own rounding",
        )  # fmt: skip
        for v in variants_of(device):
            got = feed(model, v.make(model, 3, N), ids, PLAN)
            key = ("exact", 0) if v.rule in ("lossy", "twin") else (v.rule, sinks_of(v))
            limit, want, note = ROOM * noise[key], right[key], ""
            if v.rule in ("lossy", "twin"):
                twin = feed(exact, v.make(exact, 3, N), ids, PLAN)
                own = worst(twin, want)
                note = f"the rule itself costs {own:.2g}"
                limit += 2 * own if v.rule == "lossy" else 0
                want = want.clone()
                for at, x in twin.items():
                    want[at] = x
            value = worst(got, want)
            yield Check(f"logits, {name}", v.name, value <= limit, value, limit, "logit", note)
        value = worst(feed(model, ForgetsFirst(3), ids, PLAN), right["exact", 0])
        limit = ROOM * noise["exact", 0]
        yield Check(
            f"logits, {name}", "control: forgets token 0", value > limit, value, limit, "logit", "must exceed the limit"
        )
        del model


def sinks_of(v) -> int:
    """How many of the first tokens a variant with a window never forgets."""
    options = dict(v.options)
    return options.get("sinks", options.get("first", 0))


def _reference(rule: str, sinks: int, model):
    if rule == "exact":
        return None
    return TurnedSinks(3, WINDOW, sinks, model.rope_freq) if rule == "turned" else OnePass(3, WINDOW, sinks)


def check_ring(device, dtype, size: str):
    """Five windows in steps around the window's length: the ring's bytes stay what they are."""
    model = make_model(device, dtype, size)
    for v in variants_of(device):
        if v.kind != "sliding":
            continue
        cache, ids, sizes = v.make(model, 1, 1), random_ids(1, 8 * WINDOW, 512, seed=2), []
        at = [0]
        for n in (WINDOW, WINDOW - 1, WINDOW + 1, 1, 2 * WINDOW, 1, 1):
            feed(model, cache, ids, [[n]], at)
            sizes.append(cache.nbytes)
        same = len(set(sizes)) == 1
        yield Check("ring wrap", v.name, same, max(sizes), sizes[0], "bytes", f"{at[0]} tokens through {WINDOW} slots")


def check_blocks(device, dtype, size: str):
    """Rows come and go in a small pool, so that block tables are out of order and blocks hold old tokens of others."""
    model, exact = make_model(device, dtype, size), make_model("cpu", dtype, size).double()
    pool = BlockPool(12, block_size=8)
    cache = PagedCache(2, 96, pool=pool)
    ids = random_ids(4, 48, 512, seed=3)
    right = exact(ids)
    noise = float((model(ids.to(device)).cpu().double() - right).abs().max())

    def rows(*names):  # compare rows of the cache with the texts that they hold
        return lambda got: worst({(names[b], p): x for (b, p), x in got.items()}, right)

    used, at, off = [], [0, 0], []
    off.append(rows(0, 1)(feed(model, cache, ids[[0, 1]], [[40, 17], [1, 1]], at)))
    used.append(set(cache.rows[0].table))
    for text in (2, 3):  # row 0 leaves; a new text takes its blocks, while the other goes on
        cache.free_row(0)
        cache.add_row()
        names = (1, 2) if text == 2 else (2, 3)
        at = [at[1], 0]
        off.append(rows(*names)(feed(model, cache, ids[list(names)], [[1, 13], [2, 1], [1, 9], [0, 15]], at)))
        used.append(set(cache.rows[1].table))
        pool.check([row.table for row in cache.rows])
    reused = len(used[0] & (used[1] | used[2]))
    yield Check(
        "block reuse", "logits of rows in reused blocks", max(off) <= ROOM * noise, max(off), ROOM * noise, "logit"
    )
    yield Check("block reuse", "blocks used again", reused > 0, reused, 1, "blocks", "at least 1")
    while cache.rows:
        cache.free_row(0)
    pool.check([])
    yield Check(
        "block reuse", "blocks in use after all rows left", pool.used_blocks == 0, pool.used_blocks, 0, "blocks"
    )


def check_forks(device, dtype, size: str):
    """Parent and fork go on with different texts; on pages that costs one block, copied when it is written to."""
    model, exact = make_model(device, dtype, size), make_model("cpu", dtype, size).double()
    ids = random_ids(2, 48, 512, seed=4)
    ids[1, :21] = ids[0, :21]
    right = exact(ids)
    noise = float((model(ids.to(device)).cpu().double() - right).abs().max())
    for v in variants_of(device):
        if v.rule != "exact":
            continue
        more = {"num_blocks": 64} if v.kind == "paged" else {}
        parent, at = v.make(model, 1, 48, **more), [0]
        feed(model, parent, ids[:1], [[21]], at)
        before = parent.pool.used_blocks if v.kind == "paged" else None
        child = parent.fork()
        shared = parent.pool.used_blocks == before if v.kind == "paged" else None
        mine, theirs, at2 = {}, {}, list(at)
        theirs |= feed(model, child, ids[1:], [[1], [6]], at2)
        mine |= feed(model, parent, ids[:1], [[1], [1], [9]], at)
        theirs |= feed(model, child, ids[1:], [[1], [3]], at2)
        mine |= feed(model, parent, ids[:1], [[1]], at)
        value = max(worst(mine, right[:1]), worst(theirs, right[1:]))
        note = "no block was copied by the fork itself" if shared else ""
        yield Check("fork", v.name, value <= ROOM * noise and shared is not False, value, ROOM * noise, "logit", note)


def check_codecs(device, dtypes):
    """Packed codes and scales made on the device, against those that the CPU makes of the same numbers: bit for bit."""
    for bits in (8, 4, 2, *(("fp8_e4m3", "fp8_e5m2") if has_fp8(device) else ())):
        for axis in ("channel", "token"):
            codec, same, total, off = make_codec(bits, axis, GROUP, 32), 0, 0, 0.0
            for dtype in dtypes:
                x = torch.randn(2, 2, 4 * GROUP, 32, generator=torch.Generator().manual_seed(6)).to(dtype)
                here, there = codec.encode(x), codec.encode(x.to(device))
                for a, b in zip(here, there):
                    same, total = same + int((a == b.cpu()).sum()), total + a.numel()
                back = codec.decode(*there, dtype=dtype).cpu().double()
                off = max(off, float((back - codec.decode(*here, dtype=dtype).double()).abs().max()))
            name = f"{bits} bits by {axis}" if isinstance(bits, int) else f"{bits}, kept by {axis}"
            yield Check("codes", name, same == total, same, total, "", f"decoded again, off by at most {off:.2g}")
