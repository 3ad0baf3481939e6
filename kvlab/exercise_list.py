"""EXERCISES: what the notebooks ask. No answer is written down: each is computed from kvlab when it is asked for.

A known mistake is written as the value, or the function, that it leads to, beside the sentence that explains it.
"""

from __future__ import annotations

from kvlab.exercise_fewer import FEWER_EXERCISES
from kvlab.exercise_kinds import CacheClass, Function, Number
from kvlab.exercise_memory import MEMORY_EXERCISES
from kvlab.exercise_paged import PAGED_EXERCISES
from kvlab.exercise_quantized import QUANTIZED_EXERCISES
from kvlab.exercise_sliding import SLIDING_EXERCISES
from kvlab.exercise_watch import WATCH_EXERCISES

# ---- notebook 00 ---------------------------------------------------------------------------------------------------


def llama_7b():
    """The shape of LLaMA-7B (arXiv 2302.13971)."""
    from kvlab.config import ModelConfig

    return ModelConfig(vocab_size=32000, hidden_size=4096, intermediate_size=11008, num_hidden_layers=32,
                       num_attention_heads=32)  # fmt: skip


def llama_3b():
    """The shape of Llama-3.2-3B: fewer KV heads than query heads."""
    from kvlab.config import ModelConfig

    return ModelConfig(vocab_size=128256, hidden_size=3072, intermediate_size=8192, num_hidden_layers=28,
                       num_attention_heads=24, num_key_value_heads=8, tie_word_embeddings=True)  # fmt: skip


GIB = 2**30


def _bytes_per_token_mistakes():
    c = llama_3b()
    right = c.kv_bytes_per_token(2)
    return [
        (right / 2, "a factor 2 is missing: a key and a value are kept, and a number in fp16 takes 2 bytes."),
        (right / 4, "a factor 4 is missing: a key and a value are kept, and a number in fp16 takes 2 bytes."),
        (right * c.group_size, "you counted the query heads; only KV heads are stored, and here they are fewer."),
        (right // c.num_hidden_layers, "that is one layer; every layer keeps its own keys and values."),
        (right * 2, "that is fp32, 4 bytes a number; the question is about fp16."),
        (right * 8, "those are bits."),
        (2 * c.num_hidden_layers * c.hidden_size, "that is a key or a value for every query head; see what is stored."),
        (right // c.num_key_value_heads, "that is one KV head; every KV head of a layer keeps its own."),
    ]


def _tokens_mistakes():
    each = llama_7b().kv_bytes_per_token(2)
    return [
        (2 * 10**9 // each, "you took 1 GiB as 10^9 bytes; it is 2^30."),
        (GIB // each, "that is 1 GiB; there are 2."),
        (2 * 2 * GIB // each, "a factor 2 is missing in the bytes of a token: key and value, or the 2 bytes of fp16."),
        (GIB // each // 2, "your bytes per token are too many by a factor; fp16 takes 2 bytes a number."),
        (2 * GIB, "those are bytes; divide them by the bytes of one token."),
        (each, "that is what one token takes; the question is how many of them fit."),
    ]


# ---- notebook 01 ---------------------------------------------------------------------------------------------------


def smollm2():
    """The shape of SmolLM2-135M (its config.json), as far as these exercises need it."""
    from kvlab.config import ModelConfig

    return ModelConfig(vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
                       num_attention_heads=9, num_key_value_heads=3, max_position_embeddings=8192)  # fmt: skip


def count_rows(prompt: int, new: int) -> tuple[int, int]:
    """Token rows that the layers compute to write `new` tokens after a prompt: (without a cache, with one), counted."""
    from kvlab.config import ModelConfig
    from kvlab.generation import generate
    from kvlab.model import GPT

    model = GPT(ModelConfig(hidden_size=4, num_hidden_layers=1, num_attention_heads=1, vocab_size=8))
    counts = []
    for cache in (None, "full"):
        rows = []
        hook = model.layers[0].register_forward_hook(lambda m, args, out, rows=rows: rows.append(out.shape[1]))
        generate(model, [1] * prompt, new, cache)
        hook.remove()
        counts.append(sum(rows))
    return tuple(counts)


def _sum(p, n):
    return n * p + n * (n - 1) // 2


ROW_MISTAKES = (
    (lambda p, n: (_sum(p, n) + n, p + n), "off by one: the last new token is never fed back, nobody asks what "
     "follows it. So the pass that writes new token i (from 0) has prompt + i rows at most."),
    (lambda p, n: (n, n), "you counted forward passes; each pass computes as many rows as it is fed tokens."),
    (lambda p, n: (n * p, n - 1), "the prompt and the new tokens both count: the text grows from pass to pass, and a "
     "prompt is computed once even with a cache."),
    (lambda p, n: (p + n, p), "count every pass: without a cache it computes all tokens again, with one "
     "only what is new."),
    (lambda p, n: (p + n - 1, n + 1), "without a cache, every pass computes the whole text so far again; with one, the "
     "prompt still has to be computed once, all of its tokens."),
    (lambda p, n: (n * (p + n), p * n), "not every pass is as long as the last: the text grows by one token."),
    (lambda p, n: (n * (p + n - 1), p * n), "not every pass is as long as the last: the text grows by one token."),
    (lambda p, n: (_sum(p, n) - p, n - 1), "the prompt itself takes a pass too, the prefill, which yields the first "
     "token."),
)  # fmt: skip


def crossing(config) -> int:
    """Keys in view at which the attention of one token costs as many FLOPs as its matrices."""
    from kvlab.cost import forward_flops

    one = forward_flops(config, 1, 1, logits=0)
    return one.projections // one.attention


def _crossing_mistakes():
    c = smollm2()
    q, kv, width = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim, c.hidden_size
    mlp, attention = 3 * width * c.intermediate_size, width * 2 * (q + kv)
    return [
        (6 * width, "6 d is the rule for as many KV heads as query heads and an MLP of 8/3 d; this model has neither."),
        (crossing(c) * 2, "attention is two products: q k^T, and the weights times v."),
        (crossing(c) / 2, "a product of m x k and k x n matrices takes 2 m k n FLOPs on both sides of the comparison."),
        (attention / (2 * q), "that leaves out the MLP, which is the larger part of the matrices."),
        (mlp / (2 * q), "that leaves out the matrices q, k, v and o."),
        ((mlp + 4 * width * q) / (2 * q), "k and v are smaller here: they have KV heads only."),
        (crossing(c) * c.num_hidden_layers, "every layer has both terms; their number does not matter."),
        (crossing(c) * c.group_size, "each of the query heads attends, also where they share keys and values."),
    ]


# ---- the table -----------------------------------------------------------------------------------------------------

EXERCISES: dict[str, Number | Function | CacheClass] = {
    "00.1": Number(
        "How many bytes of keys and values does one token of Llama-3.2-3B take in fp16?",
        lambda: llama_3b().kv_bytes_per_token(2),
        "Every token in view costs this much memory, for as long as the text lives.",
        (
            "Each layer keeps one key and one value for each of its KV heads.",
            "A key has head_dim numbers, a value as many; in fp16 a number takes 2 bytes.",
            "2 (key and value) x layers x KV heads x head_dim x 2 bytes, with the sizes that the task names.",
        ),
        _bytes_per_token_mistakes,
        "bytes",
    ),
    "00.2": Number(
        "How many tokens of LLaMA-7B fit into 2 GiB of cache, in fp16?",
        lambda: 2 * GIB // llama_7b().kv_bytes_per_token(2),
        "All sequences together: one long text or many short ones, the cache does not care.",
        (
            "First find the bytes of one token, as in exercise 00.1.",
            "LLaMA-7B has as many KV heads as query heads; llama_7b.kv_bytes_per_token() knows the rest.",
            "Divide 2 GiB, which is 2 x 2**30 bytes, by the bytes of one token, and round down.",
        ),
        _tokens_mistakes,
        "tokens",
    ),
    "01.1": Function(
        "How many token rows are computed, without a cache and with one?",
        "rows(prompt, new) -> (without, cached)",
        ("rows without a cache", "rows with a cache"),
        ((1, 1), (5, 1), (4, 3), (7, 10)),
        count_rows,
        "Counted on a model, in all cases the same. One grows with the square of the new tokens, the other in step.",
        (
            "Write the passes down for a prompt of 4 and 3 new tokens: what is each pass fed?",
            "Without a cache: 4, then 5, then 6 rows. With one: 4, then 1, then 1. The last token is never fed back.",
            "1 + 2 + ... + (new - 1) is new * (new - 1) // 2.",
        ),
        ROW_MISTAKES,
        confusions=((lambda p, n: (p + n - 1, _sum(p, n)), "the numbers are swapped: the cache saves work."),),
    ),
    "01.2": CacheClass(
        "Write a cache: a class whose append(layer, k, v, pos) keeps everything and returns a kvlab.View of it.",
        "It passes in float64: chunks of any size, several rows, padding, and a new cache for each text.",
        (
            "Keep one tensor of keys for each layer, in a dict: self.k[layer]. The same for values and positions.",
            "k is (rows, KV heads, new tokens, head_dim): join along dimension 2. pos is (rows, new tokens).",
            "torch.cat((self.k[layer], k), 2) if the layer is known, else k alone; positions along dimension 1.",
            "return kvlab.View(self.k[layer], self.v[layer], self.pos[layer])",
        ),
    ),
    "01.3": Number(
        "How many keys must be in view until attention costs SmolLM2 as many FLOPs as its matrices?",
        lambda: crossing(smollm2()),
        "Below it the matrices decide; the cache saves those too, since old tokens are not fed at all.",
        (
            "Take one layer and one token. A matrix of m x n costs 2 m n FLOPs for one token.",
            "Matrices: q and o are d x (heads x head_dim), k and v are d x (KV heads x head_dim); the MLP has three, "
            "d x intermediate_size.",
            "Attention over S keys: 2 products of 2 x S x head_dim FLOPs for each query head.",
            "Set them equal and solve for S; layers, and the 2 of both sides, cancel.",
        ),
        _crossing_mistakes,
        "tokens",
        tolerance=1,
    ),
    **MEMORY_EXERCISES,
    **WATCH_EXERCISES,
    **QUANTIZED_EXERCISES,
    **SLIDING_EXERCISES,
    **FEWER_EXERCISES,
    **PAGED_EXERCISES,
}
