"""Hypotheses about what a cache shows: another text's, layer's, row's or head's keys and values, stale or changed ones.

Each takes Evidence and returns a Finding, or None if it does not fit.
"""

from __future__ import annotations

import torch

from kvlab.attention import rope, rope_angles
from kvlab.check.evidence import Evidence, Finding, at, distance


def ghost(e: Evidence) -> Finding | None:
    old = [t for _, t in e.sources() if t.run != e.run]
    if not old:
        return None
    if old[0].run.startswith(e.run) or e.run.startswith(old[0].run):
        who, other = ("fork", "parent") if len(e.run) > len(old[0].run) else ("parent", "fork")
        return Finding(
            f"The {who} is changed by its {other}: it shows what the {other} was fed later ({at(t.pos for t in old)}). "
            "fork() must copy what append writes to: clone the tensors, and copy the dict or list that holds them."
        )
    return Finding(
        f"State is kept between generations: your cache still shows {e.what(old)} of an earlier text (its "
        f"{at(t.pos for t in old)}). Make the store in __init__, not as a class attribute, a default argument or a "
        "global; let the factory return a new cache each time."
    )


def layers(e: Evidence) -> Finding | None:
    other = [t for _, t in e.sources() if t.run == e.run and t.layer != e.layer]
    if other:
        return Finding(
            f"Layers are mixed up: layer {e.layer} is shown {e.what(other)} of layer {other[0].layer}. Every layer "
            "needs a store of its own; index it by the `layer` that append is given."
        )


def rows(e: Evidence) -> Finding | None:
    row_of = {id(t): b for b, row in enumerate(e.truths) for t in row.values()}
    other = [t for _, t in e.sources() if id(t) in row_of and not e.is_own(t)]
    if other:
        return Finding(
            f"Rows are mixed up: row {e.row} is shown {e.what(other)} of row {row_of[id(other[0])]}, its batch "
            "neighbour. Look at how you index the first dimension (B); after reorder, row i is what row rows[i] was."
        )


def padding(e: Evidence) -> Finding | None:
    hidden = [j for j, t in e.sources() if t.pos == -1 and t.run == e.run and t.layer == e.layer]
    if hidden:
        labels = [int(e.label[j]) for j in hidden]
        how = "all_visible=True hides nothing" if min(labels) < 0 else f"the view calls it {at(labels)}"
        return Finding(
            f"Padding is attended: row {e.row} is shorter, and the padding at its left is visible ({how}). Padding has "
            "position -1: keep the positions that append is given, and do not count columns.",
            "mask" if min(labels) < 0 else None,
        )


def heads(e: Evidence) -> Finding | None:
    n_kv, n = e.config.kv_shape[0], e.k.shape[1]
    found = {}
    for j in e.wrong if n > 1 else []:
        for name, x in (("keys", e.k[j]), ("values", e.v[j])):
            token = e.truth.get(int(e.label[j]))
            if token is None or name in found:
                continue
            given = token.k if name == "keys" else token.v  # (n_kv, D)
            same = (x[:, None] - given[None]).norm(dim=-1) < e.rule.close * given.norm()  # (n, n_kv)
            now = same.float().argmax(1).tolist()
            if same.any(1).all() and now != [h * n_kv // n for h in range(n)]:
                found[name] = now
    if not found:
        return None
    advice = (
        "Query heads share KV heads in neighbouring groups, so copies are made with repeat_interleave, not repeat; "
        f"better, store the {n_kv} heads once: attention needs no copies."
        if n > n_kv
        else "Heads are dimension 1 of (B, n_kv, T, D): look for a view, reshape or transpose that mixes it."
    )
    name, now = next(iter(found.items()))
    return Finding(
        f"Heads are mixed up: heads 0 to {n - 1} of your {' and '.join(found)} hold KV heads {now}. {advice}",
        name if len(found) == 1 else None,
    )


def stale(e: Evidence) -> Finding | None:
    for name, rest, source, right, other in (
        ("values", "keys", e.source_v, e.right_v, e.right_k),
        ("keys", "values", e.source_k, e.right_k, e.right_v),
    ):
        bad = [j for j in e.wrong if not right[j] and other[j] and j in source and e.is_own(source[j])]
        if bad:
            j = bad[0]
            return Finding(
                f"Stale {name}: the {name[:-1]} at position {int(e.label[j])} is that of position {source[j].pos}, "
                f"while the {rest} are right. The two are not stored in the same step, or not in the same slot; look "
                f"at how {name[0]} is written.",
                name,
            )


def turned(e: Evidence) -> Finding | None:
    if e.config.kv_lora_rank is not None:  # there keys are latents, and what is turned is the value
        return None
    for name, x, right in (("keys", e.k, e.right_k), ("values", e.v, e.right_v)):
        for j in e.wrong:
            want, p = e.given(j, name[0]), int(e.label[j])
            if right[j] or want is None or p == 0:
                continue
            angles = rope_angles(torch.tensor([[p, -p]]), e.freq, want.dtype)  # (1, 1, 2, D)
            more, less = rope(want[None, :, None].expand(-1, -1, 2, -1), angles)[0].unbind(1)  # (n, D) each
            again, back = (distance(x[j], y) < e.rule.close for y in (more, less))
            if (again or back) and name == "values":
                text = f"The value at position {p} has been rotated: RoPE turns queries and keys, never values."
            elif again:
                text = (
                    f"The key at position {p} has been rotated twice: the model rotates keys (RoPE) before it calls "
                    "append. Store them as they come."
                )
            elif back:
                text = (
                    f"The key at position {p} is not rotated: the model rotates keys (RoPE) before it calls append, "
                    "and something has turned this one back. A cache that stores unrotated keys must rotate them, by "
                    "their position, when it shows them."
                )
            else:
                continue
            return Finding(text, name)


def rounded(e: Evidence) -> Finding | None:
    off, dtypes, place = {}, set(), None
    for name, x, right in (("keys", e.k, e.right_k), ("values", e.v, e.right_v)):
        for j in e.wrong:
            want = e.given(j, name[0])
            if right[j] or want is None or name in off:
                continue
            for dtype in (torch.float32, torch.float16, torch.bfloat16):
                if dtype != want.dtype and torch.equal(x[j], want.to(dtype).to(want.dtype)):
                    dtypes.add(str(dtype))
                    break
            if (d := float(distance(x[j], want))) < 0.3:
                off[name], place = d, int(e.label[j])
    if not off:
        return None
    name = " and ".join(off)
    repair = name if len(off) == 1 else None
    if dtypes:
        return Finding(
            f"The dtype changes on the way: the {name} have been through {' and '.join(sorted(dtypes))}, inside a "
            f"model of {e.k.dtype}. Make buffers with dtype=k.dtype (k.new_zeros does). If rounding is what you want, "
            "pass a tolerance: expect=1e-3.",
            repair,
        )
    return Finding(
        f"The {name} are rounded: at position {place} they are off {' and '.join(f'{d:.1%}' for d in off.values())}. "
        "If your cache is meant to be lossy, pass a tolerance for the logits: expect=0.1.",
        repair,
    )


def empty(e: Evidence) -> Finding | None:
    bad = [j for j in e.wrong if not e.k[j].any() or not e.v[j].any()]
    if bad:
        why = (
            "Layer 0 was right: a counter that append moves on is moved on by every layer. Count once a step, in "
            "advance(pos)."
            if e.layer > 0
            else "Give slots without a token position -1, or look at which slot you write to."
        )
        return Finding(
            f"Empty slots are visible: where view.pos says {at(int(e.label[j]) for j in bad)} there are zeros, nothing "
            f"has been written. {why}"
        )


def forgotten(e: Evidence) -> Finding | None:
    gone = [t for _, t in e.sources() if t.run == e.run and t.layer == e.layer and not e.is_own(t)]
    if gone:
        return Finding(
            f"Tokens that were taken back are still there: row {e.row} is shown {e.what(gone)} from before the rewind "
            f"({at(t.pos for t in gone)}). rewind(n) must make the newest n tokens invisible and reuse their place."
        )


def unknown(e: Evidence) -> Finding | None:
    for name, right in (("keys", e.right_k), ("values", e.right_v)):
        bad = [j for j in e.wrong if not right[j]]
        if bad and not e.rule.lossy:
            return Finding(
                f"The {name} at {at(int(e.label[j]) for j in bad)} are none that append was given: something changes "
                "them. A view must show what was stored, unchanged.",
                name,
            )
