"""What a cache has shown, compared with what it was given: for every key and value in sight, which token is it?

Shapes: B rows, T queries, S keys in view, n heads in view, D head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kvlab.attention import View, narrower, visible


class Token(NamedTuple):
    """One token's key and value in one layer, as append was given them. k, v: (n_kv, D)."""

    run: str  # which text; a fork's tokens carry another name
    layer: int
    row: int
    pos: int  # -1: padding
    k: Tensor
    v: Tensor


@dataclass
class Record:
    """One call of append: positions fed (B, T), the View, and the tokens that each row holds by then: {pos: Token}."""

    layer: int
    pos: Tensor
    view: View
    truth: list[dict[int, Token]]


@dataclass
class Rule:
    """What the cache is allowed: to forget by a window, to round (lossy), to turn its sinks (StreamingLLM)."""

    window: int | None
    sinks: int
    lossy: bool
    turned: bool
    close: float  # relative difference below which two vectors are the same


@dataclass
class Finding:
    text: str
    repair: str | None = None  # "keys", "values", "labels" or "mask": what to put right to see whether that was all


class Evidence:
    """One row of one record: which token is each entry in view, and which entries does each query see?"""

    def __init__(self, records: list[Record], i: int, row: int, rule: Rule, tokens: list[Token], run: str, model):
        record, config, freq = records[i], model.config, model.rope_freq
        view, truth = record.view, record.truth[row]
        last = max(n for n, r in enumerate(records) if r.layer == record.layer)
        self.later = lambda: Evidence(records, last, row, rule, tokens, run, model)  # the same, at the end of the run
        self.row, self.layer, self.rule, self.view, self.truth, self.freq = row, record.layer, rule, view, truth, freq
        self.truths, self.run, self.config = record.truth, run, config
        self.q = record.pos[row]
        per_head = view.pos.dim() == 3  # heads that keep different tokens: look at the first one
        self.label = view.pos[row, 0] if per_head else view.pos[row]
        self.label = self.label.to(self.q.device)
        self.k, self.v = view.k[row].transpose(0, 1), view.v[row].transpose(0, 1)  # (S, n, D)
        n = self.k.shape[1]
        self.heads = lambda x: x.repeat_interleave(n // x.shape[-2], -2)  # a view may hold one copy per query head
        if per_head:
            self.k, self.v, self.heads = self.k[:, :1], self.v[:, :1], lambda x: x[..., :1, :]
        limit = config.window(record.layer)
        self.limit = narrower(limit, rule.window)  # what a query may see at most
        window = narrower(limit, view.window)
        if view.all_visible and window == view.window:
            self.seen = torch.ones(len(self.q), len(self.label), dtype=torch.bool)
        else:
            self.seen = visible(self.q[None], self.label[None], window, view.sinks)[0, 0]
        self.seen = self.seen & (self.q >= 0)[:, None]  # padding queries do not count
        self.in_sight = self.seen.any(0)  # (S,)
        self.right_k, self.right_v = self._right(self.k, "k"), self._right(self.v, "v")
        if rule.turned:
            self.right_k |= (self.label >= 0) & (self.label < rule.sinks)
        wrong = [j for j in range(len(self.label)) if self.in_sight[j] and not (self.right_k[j] and self.right_v[j])]
        own = set(map(id, truth.values()))
        self.others = [t for t in tokens if id(t) not in own]
        # entries out of sight because their label lies ahead of every query: a right cache has none that hold a token
        ahead = [j for j in range(len(self.label)) if self.label[j] > max(self.q.tolist())]
        self.source_k, self.source_v = self._identify(wrong + ahead, "k"), self._identify(wrong, "v")
        self.wrong = wrong
        self.misplaced = [
            j for j in wrong + ahead if not self.right_k[j] and j in self.source_k and self.is_own(self.source_k[j])
        ]

    def _right(self, x: Tensor, which: str) -> Tensor:
        """Is each entry the key (value) of the token that its label names? -> bool (S,)"""
        close = 0.8 if self.rule.lossy else self.rule.close
        out = torch.zeros(len(self.label), dtype=torch.bool)
        known = [j for j, p in enumerate(self.label.tolist()) if p in self.truth]
        if known:
            want = torch.stack([getattr(self.truth[int(self.label[j])], which) for j in known])
            out[known] = distance(x[known], self.heads(want)) < close
        return out

    def _identify(self, wrong: list[int], which: str) -> dict[int, Token]:
        """The token whose key (value) each of these entries is: from this row if possible, else from anywhere."""
        found = {}
        close = 0.5 if self.rule.lossy else self.rule.close
        x = self.k if which == "k" else self.v
        for pool in (list(self.truth.values()), self.others):
            left = [j for j in wrong if j not in found]
            if not pool or not left:
                continue
            want = self.heads(torch.stack([getattr(t, which) for t in pool]))
            for j in left:
                far = distance(x[j], want)
                hits = (far < close).nonzero().flatten().tolist()
                if self.rule.lossy:  # rounding leaves several in reach: the nearest, or any as near
                    hits = [i for i in hits if far[i] <= far.min() * (1 + 1e-6)]
                if hits:
                    label = int(self.label[j])
                    near = min(hits, key=lambda i: self._far(pool[i], label))
                    found[j] = pool[near]
        return found

    def _far(self, t: Token, label: int):
        return (t.run != self.run, t.layer != self.layer, t.row != self.row, abs(t.pos - label))

    def is_own(self, t: Token) -> bool:
        return t.pos in self.truth and self.truth[t.pos] is t

    def sources(self) -> list[tuple[int, Token]]:
        """(entry, token) for every wrong entry whose key or value was recognised as another token's."""
        return [(j, s[j]) for j in self.wrong for s in (self.source_k, self.source_v) if j in s]

    def what(self, tokens: list[Token]) -> str:
        """Are these tokens in sight by their keys, their values, or both?"""
        ids = set(map(id, tokens))
        named = (("keys", self.source_k), ("values", self.source_v))
        return " and ".join(name for name, source in named if any(id(t) in ids for t in source.values()))

    def given(self, j: int, which: str) -> Tensor | None:
        """What should stand at entry j, (n, D), or None where its label names no token of this row."""
        token = self.truth.get(int(self.label[j]))
        return None if token is None else self.heads(getattr(token, which))

    def may_see(self, q: int) -> set[int]:
        """Positions that a query must see: up to its own, within the window or among the sinks."""
        return {p for p in self.truth if p <= q and (self.limit is None or q - p < self.limit or p < self.rule.sinks)}

    def missing(self) -> dict[int, list[int]]:
        """{query position: positions that it should see and does not}."""
        out = {}
        for t, q in enumerate(self.q.tolist()):
            if q >= 0:
                have = set(self.label[self.seen[t]].tolist())
                if lack := sorted(self.may_see(q) - have):
                    out[q] = lack
        return out


def distance(a: Tensor, b: Tensor) -> Tensor:
    """Relative distance of vectors over the last two dimensions (heads, channels)."""
    norm = b.flatten(-2).norm(dim=-1)
    return (a - b).flatten(-2).norm(dim=-1) / norm.clamp(min=1e-30)


def spans(positions) -> str:
    """[0, 1, 2, 5] -> '0 to 2, 5'."""
    out, run = [], []
    for p in [*sorted(set(positions)), None]:
        if run and (p is None or p != run[-1] + 1):
            out.append(str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}")
            run = []
        run.append(p)
    return ", ".join(out[:5]) + (", ..." if len(out) > 5 else "")


def at(positions) -> str:
    """[6] -> 'position 6'; [0, 1, 2] -> 'positions 0 to 2'."""
    positions = set(positions)
    return f"position{'s' * (len(positions) > 1)} {spans(positions)}"
