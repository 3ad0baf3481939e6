"""Perplexity, KL divergence and agreement of any cache on any text, streamed through it in chunks as in use.

One dense pass over the text would not do: a cache rounds and forgets while the text grows, and what a query sees
depends on when it came.
"""

from __future__ import annotations

from collections.abc import Iterator
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
    """What every cache is compared with: for ids (B, N) the hidden states (B, N, C) that go into the model's head.

    Not the distributions themselves: in SmolLM2 (fp32) a token's 49,152 log-probabilities take 192 KiB, its hidden
    state 2.25 KiB, and the head gives the one from the other for a fifth of a forward pass. spec, chunk and size say
    how it was made: a candidate made in the same way is not run again.
    """

    model: object
    ids: Tensor
    hidden: Tensor
    spec: object
    chunk: int
    size: tuple


def evaluate(model, ids, caches, chunk: int = 64, reference="full", progress: bool = True) -> dict[str, Quality]:
    """How well the model predicts the text `ids` through each cache: {name: Quality}; table() prints it.

    ids:       token ids of one text (a list or a tensor (N,) or (1, N)), or of B texts of equal length (B, N).
    caches:    {name: spec}; a spec is a kind ("full"), (kind, options), or a function of (model, batch_size,
               max_length) that returns a new cache.
    chunk:     tokens fed at once; a cache that must see fewer at a time splits it further (max_chunk).
    reference: a spec: the cache whose distributions KL and top-1 agreement compare with. Or what reference() returned
               for this model and text, so that several calls share the work.
    Memory: one cache at a time, one chunk's logits of it and of the reference, and the reference's hidden states.
    Raises ValueError or TypeError, before anything runs, for a text or a cache that does not fit; each names the value.
    """
    ids = check_text(model, ids)
    check_int("chunk", chunk)
    made = caches_from(caches, model, *ids.shape)
    for name, cache in made.items():
        check_forgets(name, cache, ids.shape[1])
    known = isinstance(reference, Reference)
    if known and (reference.model is not model or not torch.equal(reference.ids, ids)):
        raise ValueError(
            "this reference was made for another model or text: make one with quality.reference(model, ids)"
        )
    own = None if known else cache_from(reference, model, *ids.shape, name="reference")
    with bar(-(-ids.shape[1] // chunk) * (len(made) + (not known)), "quality", progress) as shown, torch.no_grad():
        if not known:
            reference = _reference(model, ids, reference, own, chunk, shown.update)
            del own
        found = {}
        for name, spec in caches.items():
            cache = made.pop(name)
            if spec == reference.spec and chunk == reference.chunk:
                hidden, size = reference.hidden.split(chunk, 1), reference.size
            else:
                hidden, size = _stream(model, ids, cache, chunk), None
            scores = _score(reference, hidden, shown.update)
            found[name] = Quality(name, *scores, *(size or size_of(cache)), ids.shape[1], chunk)
        return found


def check_forgets(name: str, cache: KVCache, tokens: int) -> None:
    """Raises ValueError if a window or a budget is larger than the text: what forgetting costs would be measured where
    nothing is forgotten."""
    if (kept := cache.forgets_after) and kept > tokens:
        raise ValueError(
            f"{name}: this cache forgets nothing before {kept} tokens (window and sinks, or budget), and the text has "
            f"{tokens}: take a longer text, or keep fewer"
        )


def reference(model, ids, cache="full", chunk: int = 64, progress: bool = True) -> Reference:
    """The reference of evaluate(), to be used by several calls. cache: a spec as there."""
    ids = check_text(model, ids)
    check_int("chunk", chunk)
    made = cache_from(cache, model, *ids.shape, name="reference")
    with bar(-(-ids.shape[1] // chunk), "reference", progress) as shown, torch.no_grad():
        return _reference(model, ids, cache, made, chunk, shown.update)


def check_text(model, ids) -> Tensor:
    """ids as a tensor (B, N) on the model's device, or a ValueError or TypeError that says what is wrong."""
    if isinstance(ids, (list, tuple)):
        lengths = sorted({len(row) if isinstance(row, (list, tuple)) else 1 for row in ids})
        if len(lengths) > 1:
            raise ValueError(f"the texts have {', '.join(map(str, lengths))} tokens: cut them to one length")
        try:
            ids = torch.tensor(ids)
        except (TypeError, ValueError):
            raise TypeError(
                f"ids must hold token ids, which are ints, not {str(ids)[:60]}; encode text first"
            ) from None
    if not isinstance(ids, Tensor):
        raise TypeError(f"ids must be a list or a tensor of token ids, not {kind_of(ids)}; encode text first")
    ids = ids[None] if ids.dim() == 1 else ids
    if ids.dim() == 2 and ids.shape[1] < 2:
        raise ValueError(f"the text has {ids.shape[1]} tokens; there must be at least 2: one predicts the other")
    ids = ids.to(model.device)
    model.check_ids(ids)
    most = model.config.max_position_embeddings
    if ids.shape[1] > most:
        raise ValueError(f"the text has {ids.shape[1]} tokens; the model was made for {most}: cut the text")
    return ids


def _stream(model, ids: Tensor, cache: KVCache, chunk: int) -> Iterator[Tensor]:
    """What the head sees, (B, T, C) of each chunk."""
    for part in ids.split(chunk, 1):
        pos = cache.next_positions(part.shape[1]).to(ids.device)
        yield model.norm(model.run_in_chunks(part, pos, cache))


def _reference(model, ids: Tensor, spec, cache: KVCache, chunk: int, tick) -> Reference:
    parts = []
    for hidden in _stream(model, ids, cache, chunk):
        parts.append(hidden)
        tick()
    return Reference(model, ids, torch.cat(parts, 1), spec, chunk, size_of(cache))


def _score(reference: Reference, hidden, tick) -> tuple[Tensor, Tensor, Tensor]:
    """nll, KL and agreement, (B, N - 1) each. Of a chunk's logits nothing is kept but these three numbers a token."""
    head, ids, scores, start = reference.model.lm_head, reference.ids, [], 0
    for part in hidden:
        target = ids[:, start + 1 : start + 1 + part.shape[1], None]  # (B, T, 1): the text's last token has none
        T = target.shape[1]
        this = log_probs(head(part))[:, :T]  # (B, T, vocab)
        full = log_probs(head(reference.hidden[:, start : start + part.shape[1]]))[:, :T]
        agree = this.argmax(-1) == full.argmax(-1)
        nll = -this.gather(2, target)[..., 0]
        kl = (full.exp() * full.sub_(this)).sum(-1)
        scores.append((nll, kl, agree))
        start += part.shape[1]
        tick()
    nll, kl, agree = (torch.cat(x, 1).cpu() for x in zip(*scores))
    return nll.double(), kl.double(), agree


def log_probs(logits: Tensor) -> Tensor:
    """log softmax in at least float32: half precision would lose its sums."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)


def size_of(cache: KVCache) -> tuple:
    """nbytes, nbytes_by and nbytes_in_use."""
    try:
        return cache.nbytes, cache.nbytes_by(), cache.nbytes_in_use
    except NotOffered:  # a reader's small cache need not say
        return None, {}, None
