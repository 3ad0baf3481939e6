"""How many tokens each head should keep: attention measured on a text, and one total shared out by it.

A head that looks at few keys loses little when it keeps few; what it does not need, a head that looks everywhere can
use. Bytes stay what they would be with the same budget everywhere.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvlab.caches.full import FullCache
from kvlab.config import check_int


class AttentionRecorder(FullCache):
    """A full cache that notes how the attention of its queries spreads over keys; it changes nothing.

    by_rank[layer]: (n_kv, max_length) float64. Entry j is the share of attention that goes to the j-th heaviest key of
    a query, averaged over the queries at position `after` and later, and over the heads (and layers) that share a key.
    """

    wants_weights = True

    def __init__(self, max_length: int, after: int = 0):
        super().__init__(1, max_length)
        self.after, self.by_rank, self.queries = after, {}, {}

    def observe(self, layer: int, weights: Tensor) -> None:
        late = weights[0][:, self._step.pos[0] >= self.after].double().cpu()  # (n_kv, queries, S)
        ranked = late.sort(-1, descending=True).values.sum(1)
        if layer not in self.by_rank:
            self.by_rank[layer] = ranked.new_zeros(len(ranked), self.max_length)
        self.by_rank[layer][:, : ranked.shape[1]] += ranked


def attention_by_rank(model, ids: list[int], after: int = 0, chunk: int = 64) -> Tensor:
    """The share of attention that a query's heaviest key draws, its second, and so on -> (layers, n_kv, N) float64.

    ids: N tokens of one text. after: only queries at this position and later count. The N shares of a head sum to 1; a
    layer that uses another's keys (kv_owner) repeats its owner's.
    """
    check_int("after", after, 0)
    if after >= len(ids):
        raise ValueError(f"after={after} leaves none of {len(ids)} tokens to measure")
    recorder = AttentionRecorder(len(ids), after)
    with torch.no_grad():
        for start in range(0, len(ids), check_int("chunk", chunk) or chunk):
            part = torch.tensor([ids[start : start + chunk]], device=model.device)
            model(part, recorder, logits_to_keep=1)
    found = torch.stack([recorder.by_rank[owner] for owner in model.config.kv_owner])
    return found / found.sum(-1, keepdim=True)


def share_budget(by_rank: Tensor, budget: int, floor: float = 0.5, owners=None) -> list[list[int]]:
    """A table of budgets (layers, n_kv) for make_cache, whose sum is that of `budget` everywhere.

    by_rank: (layers, n_kv, N), as attention_by_rank() gives it, N at least budget. Each head gets floor * budget
    tokens, rounded down and at least one; the rest goes, one by one, to the head whose next rank draws most attention:
    the pooled top-k of Ada-KV (arXiv 2407.11550), over all layers at once, so that it finds PyramidKV's shape
    (arXiv 2406.02069) where a model has it. owners: the model's kv_owner; a layer that follows another takes no share.
    """
    check_int("budget", budget)
    layers, n_kv, N = by_rank.shape
    if budget > N:
        raise ValueError(f"by_rank has {N} ranks: measure on a text of at least budget={budget} tokens")
    if not 0 <= floor <= 1:
        raise ValueError(f"floor={floor} must be a share of the budget from 0 to 1")
    owners = list(owners or range(layers))
    own = sorted(set(owners))
    least = max(1, int(floor * budget))
    pool = by_rank[own, :, least:].permute(2, 0, 1).flatten()  # by rank first: of equal ones the lower rank
    best = pool.argsort(descending=True, stable=True)[: (budget - least) * len(own) * n_kv]
    extra = torch.bincount(best % (len(own) * n_kv), minlength=len(own) * n_kv).view(len(own), n_kv)
    table = (extra + least).tolist()
    return [table[own.index(owner)] for owner in owners]
