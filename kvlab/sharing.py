"""Which layers of a trained model could use each other's keys and values: how alike they are, and what it costs.

For SharedLayersCache on a model that was not trained for it. similarity() compares what the layers store, which takes
one pass. price_of_pairs() lets one layer at a time use a neighbour's keys and values and measures the harm on a text.
price_of_silence() is its control: the same layer's attention left out altogether, which saves the same bytes. Where
that costs no more, the borrowed keys and values were worth nothing, and the layer was merely one of little weight.
owners_for() makes a map of the cheapest pairs. Their costs do not simply add: measure the map too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvlab.caches import make_cache
from kvlab.config import check_int
from kvlab.progress import bar
from kvlab.quality import Reference, evaluate
from kvlab.quality import reference as make_reference
from kvlab.quality.streamed import check_text


@dataclass(frozen=True)
class Pair:
    """What it costs if layer `follower` alone uses the keys and values of layer `owner`, measured on one text.

    owner: None where the follower's attention was left out instead.
    kl: nats a token, from the distributions of the full cache. perplexity_ratio: to the full cache's; 1 is no harm.
    top1: share of tokens where both name the same most likely token.
    """

    owner: int | None
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


def price_of_silence(
    model, ids, layers: Iterable[int] | None = None, chunk: int = 64, reference=None, progress: bool = True
) -> list[Pair]:
    """Leave out the attention of one layer at a time (nothing is added to its stream) -> one Pair for each, in order.

    layers: default those that follow in price_of_pairs(), all but the first. Reference and errors as there.
    """
    own, n = model.config.kv_layers, model.config.num_hidden_layers
    layers = list(own[1:] if layers is None else layers)
    for layer in layers:
        check_int("layer", layer, 0)
        if layer >= n:
            raise ValueError(f"layer {layer} is not there: the model's layers run from 0 to {n - 1}")
    reference = reference or make_reference(model, ids, "full", chunk, progress=False)
    full = evaluate(model, ids, {"full": "full"}, chunk, reference, progress=False)["full"]
    found = []
    with bar(len(layers), "silence", progress) as shown:
        for layer in layers:
            silence = model.layers[layer].self_attn.register_forward_hook(lambda m, x, y: torch.zeros_like(y))
            try:  # full_cache is never the reference's own spec, which would not be run again
                q = evaluate(model, ids, {"silent": full_cache}, chunk, reference, progress=False)["silent"]
            finally:
                silence.remove()
            found.append(Pair(None, layer, float(q.mean_kl), q.perplexity / full.perplexity, q.top1))
            shown.update()
    return found


def full_cache(model, batch_size: int, max_length: int):
    return make_cache("full", model, batch_size, max_length)


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
        if pair.owner is None:
            continue
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
        owner = "-" if p.owner is None else p.owner
        rows.append(f"{p.follower:>5} {owner:>4}  {p.kl:9.3f}  {p.perplexity_ratio:9.2f}x  {p.top1:6.1%}")
    return "\n".join(rows)
