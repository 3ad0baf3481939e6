"""The exercises of notebook 02: spot the bug. Each is a mistake that a calculator in use has made.

The answers are kvlab.memory's own, for a configuration made from the numbers of the case.
"""

from __future__ import annotations

from kvlab.exercise_kinds import Function, Number

# ---- 02.1 ----------------------------------------------------------------------------------------------------------


def token_bytes(layers: int, hidden_size: int, heads: int, kv_heads: int, head_dim: int | None) -> tuple[int]:
    """Bytes of keys and values that one token adds, in fp16."""
    from kvlab.memory import estimate

    config = {"model_type": "llama", "num_hidden_layers": layers, "hidden_size": hidden_size, "head_dim": head_dim,
              "num_attention_heads": heads, "num_key_value_heads": kv_heads}  # fmt: skip
    return (estimate(config).kv_bytes_per_token,)


TOKEN_MISTAKES = (
    (lambda n, h, q, kv, d: (2 * n * h * 2,), "the hidden size stands for all query heads; only KV heads are stored. "
     "On Llama-3.1-8B that is 4 times too much."),
    (lambda n, h, q, kv, d: (2 * n * kv * (h // q) * 2,), "hidden_size / heads is a guess for head_dim: where the "
     "file states head_dim, it counts. Qwen3-4B's heads are wider than the guess."),
    (lambda n, h, q, kv, d: (2 * n * q * (d or h // q) * 2,), "query heads are counted; keys and values have KV heads "
     "only."),
    (lambda n, h, q, kv, d: (n * kv * (d or h // q) * 2,), "a factor 2 is missing: a key and a value are kept, and "
     "each of their numbers takes 2 bytes."),
    (lambda n, h, q, kv, d: (2 * n * h,), "two things are wrong: a factor 2 is missing (a key and a value, of 2 bytes "
     "a number), and the hidden size stands for all query heads."),
    (lambda n, h, q, kv, d: (2 * n * (q // kv) * (d or h // q) * 2,), "heads / kv_heads is the size of a group, how "
     "many query heads share a KV head; you need the number of KV heads."),
)  # fmt: skip

# ---- 02.2 ----------------------------------------------------------------------------------------------------------


def deepseek_v3() -> dict:
    """DeepSeek-V3's configuration, as the catalog has it."""
    from kvlab.memory import find_model

    return find_model("deepseek-v3")["config"]


def latent_bytes(mla: bool = True) -> int:
    from kvlab.memory import estimate

    return estimate(deepseek_v3(), mla=mla).kv_bytes_per_token


def _latent_mistakes():
    c, right = deepseek_v3(), latent_bytes()
    layers, rank, heads = c["num_hidden_layers"], c["kv_lora_rank"], c["num_attention_heads"]
    return [
        (2 * right, "a factor 2 too many: the latent is stored once, and keys and values are both made from it."),
        (layers * rank * 2, "the rotary part is missing: a latent cannot be rotated, so those channels lie beside it."),
        (2 * layers * rank * 2, "two mistakes that partly cancel: the latent is stored once, without a factor 2; and "
         "the rotary channels lie beside it."),
        (2 * layers * heads * (c["hidden_size"] // heads) * 2, "that is ordinary attention with heads of hidden_size "
         "/ heads; here all heads share one latent."),
        (latent_bytes(mla=False), "that is the cache with MLA switched off: every head's keys and values, unfolded."),
        (right // layers, "that is one layer."),
        (right // 2, "2 bytes a number in fp16."),
        (2 * right * heads, "all heads share one latent; it is not stored for each of them."),
    ]  # fmt: skip


# ---- 02.3 ----------------------------------------------------------------------------------------------------------


def bytes_on_each(kv_heads: int, tp: int) -> tuple[int]:
    """Bytes that one token adds on each of tp GPUs: 80 layers, 64 query heads of 128 numbers, fp16."""
    from kvlab.memory import estimate

    config = {"model_type": "llama", "num_hidden_layers": 80, "hidden_size": 8192, "num_attention_heads": 64,
              "num_key_value_heads": kv_heads}  # fmt: skip
    return (estimate(config, tensor_parallel=tp).kv_bytes_per_token,)


HEAD = 80 * 2 * 128 * 2  # one KV head of all layers
SHARE_MISTAKES = (
    (lambda kv, tp: (HEAD * kv // tp,), "with more GPUs than KV heads this stores part of a head, which no engine "
     "does: each GPU then holds one whole head, and heads are repeated."),
    (lambda kv, tp: (HEAD * kv,), "nothing is divided: each GPU holds the heads that its own queries need."),
    (lambda kv, tp: (HEAD * -(-kv // tp) * tp,), "that is the sum over all GPUs; the question is what each of them "
     "holds."),
    (lambda kv, tp: (HEAD,), "one head is the least that a GPU holds; with fewer GPUs than heads it holds more."),
)  # fmt: skip

# ---- 02.4 ----------------------------------------------------------------------------------------------------------


def tokens_kept(seq_len: int, full: int, sliding: int, window: int) -> tuple[int]:
    """Tokens kept by all layers together: `full` layers keep everything, `sliding` ones a window."""
    from kvlab.memory import estimate

    config = {"model_type": "llama", "num_hidden_layers": full + sliding, "hidden_size": 8, "num_attention_heads": 1,
              "layer_types": ["full_attention"] * full + ["sliding_attention"] * sliding,
              "sliding_window": window, "use_sliding_window": True}  # fmt: skip
    found = estimate(config, seq_len=seq_len)
    return (found.kv_cache_bytes * (full + sliding) // found.kv_bytes_per_token,)


WINDOW_MISTAKES = (
    (lambda s, f, w, n: (s * (f + w),), "the window is ignored: a sliding layer lets go of what lies further back."),
    (lambda s, f, w, n: (s * f,), "the sliding layers are left out; they keep less, but not nothing. In short texts "
     "they are most of the cache."),
    (lambda s, f, w, n: (s * f + n * w,), "right for long texts; one shorter than the window has fewer tokens."),
    (lambda s, f, w, n: (min(s, n) * (f + w),), "the window is applied to all layers; the full ones keep everything."),
    (lambda s, f, w, n: (s * f + max(s, n) * w,), "the larger of window and length is taken where the smaller counts."),
    (lambda s, f, w, n: (s * f + max(s - n, 0) * w,), "s - window is what a sliding layer has let go, not what it "
     "keeps."),
)  # fmt: skip

MEMORY_EXERCISES: dict[str, Number | Function] = {
    "02.1": Function(
        "Repair the bytes per token: right for MHA, for GQA, and for a stated head_dim.",
        "bytes_per_token(layers, hidden_size, heads, kv_heads, head_dim)",
        ("the bytes of one token",),
        ((32, 4096, 32, 32, None), (32, 4096, 32, 8, None), (36, 2560, 32, 8, 128), (28, 1024, 16, 8, 128)),
        token_bytes,
        "Right for LLaMA-7B, Llama-3.1-8B, Qwen3-4B and Qwen3-0.6B. Two fields of a file decide, and both are easy to "
        "overlook.",
        (
            "Which tensors does a cache store? Look at their shape: (batch, KV heads, tokens, head_dim).",
            "hidden_size is heads x head_dim in many models, not in all: the last two cases state another head_dim.",
            "dim = head_dim or hidden_size // heads; then 2 x layers x kv_heads x dim x 2 bytes.",
        ),
        TOKEN_MISTAKES,
    ),
    "02.2": Number(
        "How many bytes does one token of DeepSeek-V3 take in fp16, with MLA?",
        latent_bytes,
        "One row a layer, for all heads: less than a small model with ordinary attention takes.",
        (
            "MLA stores, for each token and layer, one latent and the rotary channels of one key; nothing else.",
            "The latent has kv_lora_rank numbers, the rotary part qk_rope_head_dim. All heads share them.",
            "layers x (kv_lora_rank + qk_rope_head_dim) x 2 bytes, without a factor 2 for keys and values.",
        ),
        _latent_mistakes,
        "bytes",
    ),
    "02.3": Function(
        "Repair the bytes that one token adds on each GPU.",
        "bytes_on_each(kv_heads, tp)",
        ("the bytes on each GPU",),
        ((8, 1), (8, 4), (8, 8), (8, 16), (1, 8), (64, 8)),
        bytes_on_each,
        "More GPUs than KV heads share the computing, but no longer the cache.",
        (
            "Tensor parallelism deals out heads. Which is the smallest piece of a cache that it can give to a GPU?",
            "With 8 KV heads, 16 GPUs hold a whole head each, and every head lies on two of them.",
            "max(1, kv_heads // tp) heads on each GPU.",
        ),
        SHARE_MISTAKES,
    ),
    "02.4": Function(
        "Repair the tokens that a model with sliding windows keeps.",
        "tokens_kept(seq_len, full_layers, sliding_layers, window)",
        ("the tokens kept by all layers",),
        ((8192, 8, 40, 1024), (512, 8, 40, 1024), (1024, 8, 40, 1024), (131072, 1, 1, 128), (100, 0, 32, 4096)),
        tokens_kept,
        "The cache grows with every layer until the window is full, then with the full layers alone.",
        (
            "Treat the two kinds of layer apart and add what they keep.",
            "A full layer keeps seq_len tokens. A sliding one keeps the last `window`, if there are so many.",
            "seq_len * full_layers + min(seq_len, window) * sliding_layers.",
        ),
        WINDOW_MISTAKES,
    ),
}
