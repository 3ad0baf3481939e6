"""What kvlab bench runs: one of the lab's caches, or one of transformers' with the same weights, behind three methods.

start()      a new, empty cache
feed(ids)    (B, T) token ids -> logits (B, vocab) of the last column
held(), read()   bytes of the cache now; cached bytes that the steps so far had to read
"""

from __future__ import annotations

import inspect

from kvlab.caches import make_cache
from kvlab.measure import live_tensors_bytes
from kvlab.model import GPT

RIVALS = {"transformers": ("DynamicCache", "StaticCache")}


class Cached:
    """One of the lab's caches."""

    def __init__(self, model, kind, options, batch, length):
        self.make = lambda: make_cache(kind, model, batch, length, **options)
        self.model, self.cache = model, None

    def start(self):
        self.cache = self.make()

    def feed(self, ids):
        return self.model(ids, self.cache, logits_to_keep=1)[:, -1]

    def held(self):
        return self.cache.nbytes

    def read(self):
        return self.cache.bytes_read


class Transformers:
    """One of transformers' caches under its own model, which has our weights."""

    def __init__(self, twin, kind, config, batch, length):
        self.twin, self.kind, self.batch, self.length, self.cache = twin, kind, batch, length, None
        # transformers renamed the argument on the way from 4 to 6
        self.argument = "cache" if "cache" in inspect.signature(twin.forward).parameters else "past_key_values"
        self.one = batch * config.kv_bytes_per_token(twin.dtype.itemsize)

    def start(self):
        import transformers

        self.seen = self.bytes_read = 0
        if self.kind == "DynamicCache":
            self.cache = transformers.DynamicCache()
            return
        sizes = {"max_cache_len": self.length}
        if int(transformers.__version__.split(".")[0]) < 5:
            sizes |= {"max_batch_size": self.batch, "device": self.twin.device, "dtype": self.twin.dtype}
        self.cache = transformers.StaticCache(config=self.twin.config, **sizes)

    def feed(self, ids):
        self.seen += ids.shape[1]
        self.bytes_read += self.seen * self.one
        return self.twin(ids, use_cache=True, logits_to_keep=1, **{self.argument: self.cache}).logits[:, -1]

    def held(self):
        return live_tensors_bytes(self.cache)

    def read(self):
        return self.bytes_read


def twin_of(model: GPT):
    """The same weights in transformers' own class and layout."""
    import transformers

    from kvlab.checkpoint import hf_config

    fields = hf_config(model.config, model.dtype)
    config = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
    twin = transformers.AutoModelForCausalLM.from_config(config).to(model.device, model.dtype).eval()
    named = {name if name.startswith("lm_head") else f"model.{name}": p for name, p in model.named_parameters()}
    missing, unexpected = twin.load_state_dict(named, strict=False)
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    if set(missing) - tied or unexpected:
        raise ValueError(f"transformers' {type(twin).__name__} has no place for {(unexpected or missing)[0]}")
    return twin
