"""The spy of check_cache: it stands between model and cache, records what goes in and out, and checks its form."""

from __future__ import annotations

import torch
from torch import Tensor

from kvlab.attention import View
from kvlab.caches.base import KVCache
from kvlab.check.evidence import Record, Token
from kvlab.words import kind_of

FORK = "'s fork"


class Found(Exception):
    """The first thing that is wrong."""


class Spy(KVCache):
    """Stands between the model and the cache: records what goes in and out of append, and checks its form."""

    def __init__(self, inner: KVCache, tokens: list[Token], run: str, repair: str | None = None):
        self.inner, self.tokens, self.run, self.repair = inner, tokens, run, repair
        self.truth: dict[int, list[dict[int, Token]]] = {}  # layer -> row -> {position: token}
        self.records: list[Record] = []

    lengths = property(lambda self: self.inner.lengths)
    wants_weights = property(lambda self: self.inner.wants_weights)

    def next_positions(self, lengths):
        return self.inner.next_positions(lengths)

    def max_chunk(self, T):
        return self.inner.max_chunk(T)

    def check_room(self, pos):
        self.inner.check_room(pos)

    def observe(self, layer, weights):
        self.inner.observe(layer, weights)

    def advance(self, pos):
        self.inner.advance(pos)

    def abort(self, earlier_chunks=False):
        pass  # the run is over: what the cache makes of it does not matter

    def append(self, layer, k, v, pos):
        rows = self.truth.setdefault(layer, [{} for _ in range(len(pos))])
        for b, t in torch.nonzero(pos >= -1).tolist():
            token = Token(self.run, layer, b, int(pos[b, t]), k[b, :, t].clone(), v[b, :, t].clone())
            self.tokens.append(token)
            if token.pos >= 0:
                rows[b][token.pos] = token
        view = self.inner.append(layer, k, v, pos)
        self.check_form(view, k, v)
        kept = View(view.k.clone(), view.v.clone(), view.pos.clone(), *list(vars(view).values())[3:])
        self.records.append(Record(layer, pos.clone(), kept, [dict(row) for row in rows]))
        return self.repaired(view, rows) if self.repair else view

    def check_form(self, view, k: Tensor, v: Tensor) -> None:
        if view is None:
            raise Found("append returns nothing. End it with: return View(k, v, pos)")
        if not isinstance(view, View):
            raise Found(
                f"append returns {kind_of(view)}, not a View. End it with: return View(k, v, pos), where k and "
                "v are all that the queries may see and pos says which position each key has"
            )
        B, n_kv = k.shape[:2]
        for name, x, given in (("k", view.k, k), ("v", view.v, v)):
            if not isinstance(x, Tensor):
                raise Found(f"View.{name} is {kind_of(x)}; it must be a tensor (B, n_kv, S, D)")
            D = given.shape[3]  # a latent model's keys and values differ in it
            if x.dim() != 4 or x.shape[0] != B or x.shape[3] != D:
                raise Found(
                    f"View.{name} has shape {tuple(x.shape)}; it must be (B, n_kv, S, D) = ({B}, {n_kv}, S, {D}), with "
                    f"S keys in view (append was given {tuple(given.shape)})"
                )
            if x.dtype != given.dtype:
                raise Found(
                    f"The dtype changes: View.{name} is {x.dtype}, the model works in {given.dtype}. Make buffers with "
                    "dtype=k.dtype (k.new_zeros does), and decode into it if you store codes"
                )
            if x.device != given.device:
                raise Found(
                    f"View.{name} is on {x.device}, the model on {given.device}: make buffers with device=k.device"
                )
            if x.shape[1] % n_kv:
                raise Found(f"View.{name} has {x.shape[1]} heads (shape {tuple(x.shape)}), append was given {n_kv}")
            if not x.isfinite().all():
                raise Found(
                    f"View.{name} holds NaN or infinity. Slots without a token must hold finite numbers, hidden or "
                    "not: 0 times NaN is NaN, and it spoils the whole row. Use zeros, not empty"
                )
        S, heads = view.k.shape[2], view.k.shape[1]
        if view.v.shape[:3] != view.k.shape[:3]:
            raise Found(
                f"View.k has shape {tuple(view.k.shape)} and View.v {tuple(view.v.shape)}: they must hold the same "
                "tokens"
            )
        if not isinstance(view.pos, Tensor) or view.pos.is_floating_point() or view.pos.dtype == torch.bool:
            what = view.pos.dtype if isinstance(view.pos, Tensor) else type(view.pos).__name__
            raise Found(
                f"View.pos is {what}; it must be an integer tensor (B, S) of positions, -1 where there is nothing"
            )
        if view.pos.shape not in ((B, S), (B, heads, S)):
            joined = (
                f". There are {heads} heads in view and append was given {n_kv}: join tokens along dimension 2, not 1"
            )
            raise Found(
                f"View.pos has shape {tuple(view.pos.shape)}; there are {S} keys in view, so it must be (B, S) = ({B}, "
                f"{S}): one position for each key, in the same order{joined if heads != n_kv else ''}"
            )

    def repaired(self, view: View, rows: list[dict[int, Token]]) -> View:
        """The view with one aspect put right, to see whether anything else is wrong."""
        k, v, pos = view.k.clone(), view.v.clone(), view.pos.clone()
        if self.repair == "mask":
            return View(k, v, pos)
        G = k.shape[1] // next(iter(rows[0].values())).k.shape[0]
        for b, row in enumerate(rows):
            for j, p in enumerate(pos[b].tolist() if pos.dim() == 2 else []):
                if self.repair == "labels":
                    same = [
                        t.pos
                        for t in row.values()
                        if torch.allclose(k[b, :, j], t.k.repeat_interleave(G, 0), rtol=1e-9)
                    ]
                    pos[b, j] = same[0] if same else p
                elif p in row and self.repair == "keys":
                    k[b, :, j] = row[p].k.repeat_interleave(G, 0)
                elif p in row:
                    v[b, :, j] = row[p].v.repeat_interleave(G, 0)
        return View(k, v, pos, view.window, view.sinks, view.scale, view.all_visible and self.repair != "labels")

    # the operations: the truth goes along
    def reorder(self, order):
        self.inner.reorder(order)
        self.truth = {i: [dict(rows[r]) for r in order] for i, rows in self.truth.items()}

    def rewind(self, n):
        before = list(self.lengths)
        self.inner.rewind(n)
        each = [n] * len(before) if isinstance(n, int) else n
        for rows in self.truth.values():
            for b, row in enumerate(rows):
                rows[b] = {p: t for p, t in row.items() if p < before[b] - each[b]}

    def fork(self):
        twin = Spy(self.inner.fork(), self.tokens, self.run + FORK)
        twin.truth = {i: [dict(row) for row in rows] for i, rows in self.truth.items()}
        return twin
