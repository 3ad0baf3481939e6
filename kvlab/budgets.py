"""How many tokens each head should keep: attention measured on a text, and one total shared out by it.

A head that looks at few keys loses little when it keeps few; what it does not need, a head that looks everywhere can
use. Bytes stay what they would be with the same budget everywhere. That this pays has to be measured, model by model:
SmolLM2 with a fifth of its tokens does as well without a table, and worse with one for which each query chose its keys
for itself (block=1), which no cache lets it do.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvlab.caches.full import FullCache
from kvlab.config import check_int


class AttentionRecorder(FullCache):
    """A full cache that notes how the attention of its queries spreads over keys; it changes nothing.

    by_rank[layer]: (n_kv, max_length) float64. Each chunk's queries, from position `after` on, add what they give to
    their heaviest key, the second, and so on: keys are weighed for the chunk as a whole, since an evicting cache keeps
    one set of them for all the queries to come. Summed over the heads (and layers) that share a key.
    """

    wants_weights = True

    def __init__(self, max_length: int, after: int = 0):
        super().__init__(1, max_length)
        self.after, self.by_rank = after, {}

    def observe(self, layer: int, weights: Tensor) -> None:
        late = weights[0][:, self._step.pos[0] >= self.after].cpu().double()  # (n_kv, queries, S); Metal has no float64
        ranked = late.sum(1).sort(-1, descending=True).values
        if layer not in self.by_rank:
            self.by_rank[layer] = ranked.new_zeros(len(ranked), self.max_length)
        self.by_rank[layer][:, : ranked.shape[1]] += ranked


def attention_by_rank(model, ids: list[int], after: int = 0, block: int = 64) -> Tensor:
    """The share of attention that a head's heaviest key draws, its second, and so on -> (layers, n_kv, N) float64.

    ids: N tokens of one text. after: only queries at this position and later count. block: so many queries in a row are
    weighed together, as one set of keys has to serve them; 1 lets every query choose for itself. The N shares of a head
    sum to 1; a layer that uses another's keys (kv_owner) repeats its owner's.
    """
    check_int("after", after, 0)
    check_int("block", block)
    if after >= len(ids):
        raise ValueError(f"after={after} leaves none of {len(ids)} tokens to measure")
    recorder = AttentionRecorder(len(ids), after)
    with torch.no_grad():
        for start in range(0, len(ids), block):
            part = torch.tensor([ids[start : start + block]], device=model.device)
            model(part, recorder, logits_to_keep=1)
    found = torch.stack([recorder.by_rank[owner] for owner in model.config.kv_owner])
    return found / found.sum(-1, keepdim=True)


def share_budget(
    by_rank: Tensor, budget: int, floor: float = 0.5, across: str = "heads", owners=None
) -> list[list[int]]:
    """A table of budgets (layers, n_kv) for make_cache, whose sum is that of `budget` everywhere.

    by_rank: (layers, n_kv, N), as attention_by_rank() gives it, N at least budget.
    floor:   each head gets floor * budget tokens, rounded down and at least one. The rest goes, one by one, to the head
             whose next rank draws most attention: a pooled top-k.
    across:  "heads": the heads of a layer share what is the layer's, each layer having the same (Ada-KV, arXiv
             2407.11550); "layers": all heads of all layers share (then layers differ too, as in PyramidKV, arXiv
             2406.02069, where a schedule says how).
    owners:  the model's kv_owner; a layer that follows another takes no share.
    """
    check_int("budget", budget)
    layers, n_kv, N = by_rank.shape
    if budget > N:
        raise ValueError(f"by_rank has {N} ranks: measure on a text of at least budget={budget} tokens")
    if not 0 <= floor <= 1:
        raise ValueError(f"floor={floor} must be a share of the budget from 0 to 1")
    if across not in ("heads", "layers"):
        raise ValueError(f"across={across!r} must be 'heads' (of each layer) or 'layers'")
    owners = list(owners or range(layers))
    own = sorted(set(owners))
    least = max(1, int(floor * budget))
    pools = by_rank[own][:, :, least:]  # (layers, n_kv, ranks left)
    pools = pools[None] if across == "layers" else pools[:, None]  # (pools, layers in it, n_kv, ranks left)
    heads = pools.shape[1] * n_kv
    by_weight = pools.permute(0, 3, 1, 2).flatten(1).argsort(dim=1, descending=True, stable=True)  # ties: lower rank
    best = by_weight[:, : (budget - least) * heads] % heads
    table = torch.stack([torch.bincount(x, minlength=heads) + least for x in best]).view(len(own), n_kv).tolist()
    return [table[own.index(owner)] for owner in owners]
