"""Which layers of a trained model could use each other's keys and values: how alike they are, and what it costs.

Two measurements, for SharedLayersCache on a model that was not trained for it. similarity() compares what the layers
store, which takes one pass; price_of_pairs() lets one layer after the other use a neighbour's keys and values and
measures the harm on a text. They need not agree: queries were trained for their own layer's keys, in their own basis.
owners_for() makes a map of the cheapest pairs. Their costs do not simply add: measure the map too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvlab.caches import make_cache
from kvlab.config import check_int
from kvlab.quality import Reference, evaluate
from kvlab.quality.streamed import check_text


@dataclass(frozen=True)
class Pair:
    """What it costs if layer `follower` alone uses the keys and values of layer `owner`, measured on one text.

    kl: nats a token, from the distributions of the full cache. perplexity_ratio: to the full cache's; 1 is no harm.
    top1: share of tokens where both name the same most likely token.
    """

    owner: int
    follower: int
    kl: float
    perplexity_ratio: float
    top1: float


@torch.no_grad()
def similarity(model, ids) -> tuple[Tensor, Tensor]:
    """How alike the layers' keys, and values, are on a text: the cosine of the angle between two layers' vectors of
    the same token and KV head, averaged over both -> two tensors (L, L), L the layers that store any (kv_layers).

    1 on the diagonal; 0 is what unrelated vectors have. RoPE turns both keys of a token by the same angle, so it
    changes nothing. ids: as in quality.evaluate(). Raises its errors.
    """
    ids = check_text(model, ids)
    cache = make_cache("full", model, *ids.shape)
    model.run_in_chunks(ids, cache.next_positions(ids.shape[1]).to(ids.device), cache)
    found = []
    for held in (cache.k, cache.v):
        x = torch.stack([held[layer] for layer in sorted(held)])  # (L, B, n_kv, N, D)
        x = torch.nn.functional.normalize(x.to(torch.promote_types(x.dtype, torch.float32)), dim=-1)
        found.append(torch.einsum("ibhnd,jbhnd->ij", x, x).cpu().double() / x[0, ..., 0].numel())
    return found[0], found[1]


def price_of_pairs(
    model,
    ids,
    pairs: Iterable[tuple[int, int]] | None = None,
    chunk: int = 64,
    reference: Reference | str = "full",
    progress: bool = True,
) -> list[Pair]:
    """Share one pair of layers at a time, all others keeping their own, and measure -> one Pair for each, in order.

    pairs: (owner, follower), owner first in the model; default: every layer follows the one before it.
    ids, chunk, reference: as in quality.evaluate(): one pass over the text for each pair.
    Raises ValueError or TypeError for pairs that the model does not have, before anything runs.
    """
    layers, n = model.config.kv_layers, model.config.num_hidden_layers
    pairs = list(zip(layers, layers[1:]) if pairs is None else pairs)
    if not pairs:
        raise ValueError(f"there is no pair to share: {len(layers)} of the model's layers store keys and values")
    specs = {pair: ("shared", {"owners": one_pair(pair, layers, n)}) for pair in pairs}
    found = evaluate(model, ids, {"full": "full", **specs}, chunk, reference, progress)
    base = found.pop("full").perplexity
    return [Pair(*pair, float(q.mean_kl), q.perplexity / base, q.top1) for pair, q in found.items()]


def one_pair(pair: tuple[int, int], layers: Sequence[int], n: int) -> tuple[int, ...]:
    """The map in which that one layer follows. Raises ValueError or TypeError, naming the pair."""
    if not isinstance(pair, tuple) or len(pair) != 2:
        raise TypeError(f"{pair!r} must be a pair (owner, follower) of layer numbers")
    owner, follower = pair
    for layer in pair:
        check_int(f"layer of {pair}", layer, 0)
        if layer not in layers:
            raise ValueError(f"{pair}: layer {layer} stores no keys and values; those that do are {list(layers)}")
    if owner >= follower:
        raise ValueError(f"{pair}: the owner must come before its follower")
    return tuple(owner if i == follower else i for i in range(n))


def owners_for(pairs: Iterable[Pair], layers: int, followers: int) -> tuple[int, ...]:
    """A map for SharedLayersCache in which `followers` of `layers` layers follow, the cheapest pairs (by KL) first.

    A pair is passed over where its owner follows already, or its follower is followed. Raises ValueError if the pairs
    do not give so many.
    """
    check_int("followers", followers, 0)
    owners, found = list(range(layers)), 0
    for pair in sorted(pairs, key=lambda p: p.kl):
        free = owners[pair.follower] == pair.follower and owners.count(pair.follower) == 1
        if found < followers and free and owners[pair.owner] == pair.owner:
            owners[pair.follower] = pair.owner
            found += 1
    if found < followers:
        raise ValueError(f"these pairs let only {found} layers follow another, not {followers}")
    return tuple(owners)


def table(pairs: Sequence[Pair]) -> str:
    """Cheapest first, in plain text."""
    rows = [f"{'layer uses':>10}  {'KL (nats)':>9}  {'perplexity':>10}  {'top-1':>6}"]
    for p in sorted(pairs, key=lambda p: p.kl):
        rows.append(f"{p.follower:>5} {p.owner:>4}  {p.kl:9.3f}  {p.perplexity_ratio:9.2f}x  {p.top1:6.1%}")
    return "\n".join(rows)
