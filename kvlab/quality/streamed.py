"""Perplexity, KL divergence and agreement of any cache on any text, streamed through it in chunks as in use.

One dense pass over the text would not do: a cache that rounds or forgets does so while the text grows, and what a query
sees depends on when it came.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvlab.caches import NotOffered
from kvlab.caches.base import KVCache
from kvlab.config import check_int
from kvlab.measure.sweep import bar
from kvlab.words import kind_of

from .result import Quality
from .specs import cache_from, caches_from


@dataclass(frozen=True)
class Reference:
    """What every cache is compared with: ids (B, N), and the hidden states (B, N, C) that go into the model's head.

    Not the distributions themselves: in SmolLM2 (fp32) a token's 49,152 log-probabilities take 192 KiB, its hidden
    state 2.25 KiB, and the head gives the one from the other for a fifth of a forward pass.
    """

    ids: Tensor
    hidden: Tensor
    model: object


def evaluate(
    model, ids, caches, chunk: int = 64, reference: Reference | object = "full", progress: bool = True
) -> dict[str, Quality]:
    """How well the model predicts the text `ids` through each cache: {name: Quality}.

    ids:       token ids of one text (a list or a tensor (N,) or (1, N)), or of B texts of equal length (B, N).
    caches:    {name: spec}; a spec is a kind ("full"), (kind, options), or a function of (model, batch_size,
               max_length) that returns a new cache.
    chunk:     tokens fed at once; a cache that must see fewer at a time splits it further (max_chunk).
    reference: the cache whose distributions KL and top-1 agreement compare with, as a spec; or what reference()
               returned for this model and text, so that several calls share the work.
    Bounded memory: one candidate's cache at a time, one chunk's logits of it and of the reference.
    Raises ValueError or TypeError, before anything runs, for a text or a cache that does not fit; each names the value.
    """
    ids = check_text(model, ids)
    check_int("chunk", chunk)
    made = caches_from(caches, model, *ids.shape)
    if isinstance(reference, Reference):
        if reference.model is not model or not torch.equal(reference.ids, ids):
            raise ValueError(
                "reference was made for another model or text: make one with quality.reference(model, ids)"
            )
        own = None
    else:
        own = cache_from(reference, model, *ids.shape, name="reference")
    steps = -(-ids.shape[1] // chunk)
    with bar(steps * (len(made) + (own is not None)), "quality", progress) as shown, torch.no_grad():
        if own is not None:
            reference = Reference(ids, _hidden(model, ids, own, chunk, shown.update), model)
            del own
        return {name: _compare(model, made.pop(name), name, reference, chunk, shown.update) for name in list(made)}


def reference(model, ids, cache="full", chunk: int = 64, progress: bool = True) -> Reference:
    """The reference of evaluate(), to be used by several calls. cache: a spec as there."""
    ids = check_text(model, ids)
    check_int("chunk", chunk)
    cache = cache_from(cache, model, *ids.shape, name="reference")
    with bar(-(-ids.shape[1] // chunk), "reference", progress) as shown, torch.no_grad():
        return Reference(ids, _hidden(model, ids, cache, chunk, shown.update), model)


def check_text(model, ids) -> Tensor:
    """ids as a tensor (B, N) on the model's device, or a ValueError or TypeError that says what is wrong."""
    if isinstance(ids, str):
        raise TypeError("ids is a str: encode the text first")
    if not isinstance(ids, Tensor):
        rows = list(ids) if isinstance(ids, (list, tuple)) else None
        if rows is None:
            raise TypeError(f"ids must be a list or a tensor of token ids, not {kind_of(ids)}")
        if rows and all(isinstance(row, (list, tuple)) for row in rows) and len({len(row) for row in rows}) > 1:
            raise ValueError(f"the texts have {sorted({len(row) for row in rows})} tokens: cut them to equal length")
        ids = torch.tensor(rows, dtype=None if rows else torch.long)
    ids = ids[None] if ids.dim() == 1 else ids
    if ids.dim() == 2 and ids.shape[1] < 2:
        raise ValueError(f"the text has {ids.shape[1]} tokens: at least 2 are needed, one to predict the other")
    ids = ids.to(model.device)
    model.check_ids(ids)
    most = model.config.max_position_embeddings
    if ids.shape[1] > most:
        raise ValueError(f"the text has {ids.shape[1]} tokens, the model was made for {most}: cut it")
    return ids


def _hidden(model, ids: Tensor, cache: KVCache, chunk: int, tick) -> Tensor:
    """What the head sees, (B, N, C)."""
    parts = []
    for part in ids.split(chunk, 1):
        pos = cache.next_positions(part.shape[1]).to(ids.device)
        parts.append(model.norm(model.run_in_chunks(part, pos, cache)))
        tick()
    return torch.cat(parts, 1)


def _compare(model, cache: KVCache, name: str, reference: Reference, chunk: int, tick) -> Quality:
    """Stream the text through `cache`, chunk by chunk; of the logits nothing is kept but three numbers a token."""
    ids, nll, kl, agree = reference.ids, [], [], []
    for start in range(0, ids.shape[1], chunk):
        now = slice(start, start + chunk)
        theirs = log_probs(model(ids[:, now], cache))  # (B, T, vocab)
        nexts = ids[:, start + 1 : start + 1 + chunk, None]  # the last token of the text has no successor
        theirs = theirs[:, : nexts.shape[1]]
        full = log_probs(model.lm_head(reference.hidden[:, now][:, : nexts.shape[1]]))
        nll.append(-theirs.gather(2, nexts)[..., 0])
        agree.append(theirs.argmax(-1) == full.argmax(-1))
        kl.append((full.exp() * full.sub_(theirs)).sum(-1))
        tick()
    try:
        by, total, used = cache.nbytes_by(), cache.nbytes, cache.nbytes_in_use
    except NotOffered:  # a reader's small cache
        by, total, used = {}, None, None
    nll, kl, agree = (torch.cat(x, 1).cpu() for x in (nll, kl, agree))
    return Quality(name, nll.double(), kl.double(), agree, total, by, used, ids.shape[1], chunk)


def log_probs(logits: Tensor) -> Tensor:
    """log softmax in at least float32: in half precision its sums would be worth nothing."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
