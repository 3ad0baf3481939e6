"""nbytes against the allocator: what a cache says it holds, and what the device gave for it.

CUDA's caching allocator gives blocks of whole 512 bytes, and does not split off the rest of a large block if it is less
than 1 MiB. Its books know both sizes: requested (what tensors asked for) and allocated (what they got). Requested must
equal the storages that the cache holds, to the byte; nbytes may leave out indices (positions, tables); allocated may be
larger by the rounding. On a CPU requested bytes are counted storages, and there is no rounding.
"""

from __future__ import annotations

import torch

from kvlab.config import ModelConfig
from kvlab.gpu_check.setup import Check, variants_of
from kvlab.measure import live_tensors_bytes, memory
from kvlab.measure.sweep import free
from kvlab.measure.watch import tensors_in
from kvlab.model import GPT

ROUND, SPLIT = 512, 1 << 20


def check_bytes(device: torch.device, dtype: torch.dtype, B: int, T: int, n_layers: int, n_kv: int, D: int):
    """Fill each cache with B rows of T random tokens -> Checks."""
    shape = {"num_hidden_layers": n_layers, "num_attention_heads": n_kv, "num_key_value_heads": n_kv, "head_dim": D}
    model = GPT(ModelConfig(vocab_size=16, hidden_size=16, **shape))
    for v in variants_of(device):
        more = {"budget": T - 32} if "budget" in dict(v.options) else {}  # past it, tokens go one by one: a few will do
        cache, live, requested = _weigh(
            lambda v=v, more=more: v.make(model, B, T, **more), device, dtype, T, n_layers, n_kv, D
        )
        held = live_tensors_bytes(cache, device=device)
        storages = {t.untyped_storage()._cdata: t for t in tensors_in(cache) if t.device.type == device.type}.values()
        own = {model.rope_freq.untyped_storage()._cdata}
        foreign = sum(t.untyped_storage().nbytes() for t in storages if t.untyped_storage()._cdata in own)
        held -= foreign
        index = sum(
            t.untyped_storage().nbytes() for t in storages if not t.is_floating_point() and t.dtype != torch.uint8
        )
        told, home = cache.nbytes, getattr(cache, "home", device)
        if home.type != device.type:  # kept elsewhere: on this device nothing is left between two steps
            told = cache.nbytes_on()[str(cache.device)]
            there = live_tensors_bytes(cache, device=home)
            yield Check("bytes: at home", v.name, there == cache.nbytes, cache.nbytes, there, "bytes", f"on {home}")
        room = index + 4096  # and small numbers of the last step, such as the angles of the sinks
        yield Check(
            "bytes: nbytes", v.name, held - room <= told <= held, told, held, "bytes",
            f"the cache's storages hold {held:,}, {index:,} of them indices",
        )  # fmt: skip
        if requested is not None:
            yield Check("bytes: requested", v.name, requested == held, requested, held, "bytes", "equal to the byte")
        if device.type != "cpu":
            sizes = [t.untyped_storage().nbytes() for t in storages]
            most = sum(-(-n // ROUND) * ROUND + (SPLIT if n > SPLIT else 0) for n in sizes)
            note = f"rounding adds {(live - held) / held:.2%}"
            if device.type == "cuda":
                yield Check("bytes: allocated", v.name, held <= live <= most, live, most, "bytes", note)
            else:  # Metal's allocator states no rule of rounding
                yield Check("bytes: allocated", v.name, held <= live <= 1.1 * held + SPLIT, live, held, "bytes", note)
        del cache


def _weigh(make, device, dtype, T, n_layers, n_kv, D):
    """-> the filled cache, bytes the device gave for it, bytes asked for (None if the device keeps no such book)."""
    free()
    book = "requested_bytes.all.current"
    before = torch.cuda.memory_stats(device).get(book) if device.type == "cuda" else None
    with memory(device) as m:
        cache = make()
        fill(cache, device, dtype, T, n_layers, n_kv, D)
        free()
    if device.type == "cpu":
        return cache, m.live, m.live
    after = torch.cuda.memory_stats(device).get(book) if device.type == "cuda" else None
    return cache, m.live, None if before is None or after is None else after - before


def fill(cache, device, dtype, T: int, n_layers: int, n_kv: int, D: int) -> None:
    """T random tokens in every row, without a model."""
    done = 0
    while done < T:
        n = cache.max_chunk(T - done)
        pos = cache.next_positions(n).to(device)
        for layer in range(n_layers):
            k, v = (torch.randn(cache.batch_size, n_kv, n, D, device=device, dtype=dtype) for _ in range(2))
            cache.append(layer, k, v, pos)
        cache.advance(pos)
        done += n
