"""What went wrong elsewhere, each as a test named after the symptom that people saw.

The docstrings say in a sentence or two what happened, and in which public project's issue or pull request to read it.
Slow decoding is held by counted tokens and bytes, never by seconds. Reordering for beam search is here, though beam
search itself is not.
"""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from oracles import assert_logits, call, causal_logits, dense_logits, feed, ids_for, in_chunks, rule_of, toy

from kvlab import ModelConfig, generate, make_cache
from kvlab.attention import View, attend, visible
from kvlab.caches import RewindError
from kvlab.caches.codecs import IntCodec, make_codec
from kvlab.measure import memory
from kvlab.serving import Engine

MODEL = toy(seed=12)
TEXT = ids_for(0, [20])[0]
KINDS = ["growing", "full", "sliding", "quantized", "paged", "shared", "offloaded"]
exact = pytest.mark.parametrize("kind", ["growing", "full", "paged", "offloaded"])
every = pytest.mark.parametrize("kind", KINDS)


def cache_of(kind, B=1, max_length=40, model=MODEL, **options):
    small = {"paged": {"block_size": 4}, "quantized": {"group_size": 4, "residual_length": 4}, "sliding": {"window": 6}}
    return make_cache(kind, model, B, max_length, **(options or small.get(kind, {})))


# ---- masks and positions


@exact
def test_garbage_after_a_good_training_loss_because_prefill_saw_the_future(kind):
    """The causal mask was built only when there was no cache, so a prompt's tokens saw those behind them; training,
    which has no cache, looked fine (Mikyx-1/TinyLLM #17, #18). Here: what comes later changes nothing before it."""
    other = TEXT[:10] + [(t + 1) % 50 for t in TEXT[10:]]
    a = feed(MODEL, cache_of(kind), [TEXT], [[20]])[0]
    b = feed(MODEL, cache_of(kind), [other], [[20]])[0]
    assert torch.equal(a[:10], b[:10]) and not torch.equal(a[10:], b[10:])
    assert_logits(a, causal_logits(MODEL, TEXT))


@every
@pytest.mark.parametrize("chunks", [[7, 1, 9, 3], [1, 19], [10, 10], [2] * 10], ids=str)
def test_several_tokens_on_a_warm_cache_are_wrong_or_crash(kind, chunks):
    """One token at a time was right, a second chunk was not: the mask was (T, T) and knew nothing of the prefix
    (huggingface/candle #3743; huggingface/nanoVLM)."""
    got = feed(MODEL, cache_of(kind), [TEXT], [[n] for n in chunks])[0]
    options = {"window": 6} if kind == "sliding" else {"group_size": 4, "residual_length": 4}
    assert_logits(got, dense_logits(MODEL, TEXT, rule_of(kind, options)))


def test_is_causal_on_a_warm_cache_gives_the_same_answer_at_every_step():
    """PyTorch aligns is_causal at the top left, so a single query sees only the first key, however many there are
    (pytorch/pytorch #144858, #108108, #103082). Here the mask comes from positions."""
    rng = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, n, 8, generator=rng, dtype=torch.float64) for n in (2, 5, 5))
    wrong = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(wrong[:, :, 0], v[:, :, 0])  # the first of two new tokens: one key, the very first
    pos = torch.arange(5)[None]
    right = attend(q, View(k, v, pos), visible(pos[:, 3:], pos))
    assert (wrong - right).abs().max() > 0.5
    for i, seen in enumerate((4, 5)):
        want = F.scaled_dot_product_attention(q[:, :, i : i + 1], k[:, :, :seen], v[:, :, :seen])
        torch.testing.assert_close(right[:, :, i : i + 1], want)


@every
def test_position_ids_are_wrong_after_the_prefill(kind, monkeypatch):
    """The offset was advanced once too often after the prompt: 6, then 12, then 13. Nothing crashed; logits were off
    by hundredths (tiny-llm #46, huggingface/nanoVLM #71). Here a spy must see 0 .. N-1, each once and in order."""
    seen = []
    cache = cache_of(kind, 2)
    append = cache.append

    def spying(layer, k, v, pos):
        if layer == 0:
            seen.append(pos.clone())
        return append(layer, k, v, pos)

    monkeypatch.setattr(cache, "append", spying)
    generate(MODEL, [TEXT[:6], TEXT[:3]], 8, cache=cache)
    for b, n in ((0, 6 + 7), (1, 3 + 7)):
        assert [p for pos in seen for p in pos[b].tolist() if p >= 0] == list(range(n))


@every
def test_the_last_prompt_haunts_the_next_one(kind):
    """The cache lived inside the model and was not reset, or zeroed while its length stayed, so a second prompt was
    answered as if the first were still there (Lightning-AI/litgpt #1595, #1596, #1647, lit-llama #418,
    casper-hansen/AutoAWQ #170). Here a new generation is a new cache, and the model keeps nothing."""
    first = generate(MODEL, TEXT[:8], 6, cache=kind)
    before = {name: x.clone() for name, x in MODEL.state_dict().items()}
    generate(MODEL, TEXT[8:], 6, cache=kind)
    assert generate(MODEL, TEXT[:8], 6, cache=kind) == first
    assert all(torch.equal(x, before[name]) for name, x in MODEL.state_dict().items())
    ghost = cache_of(kind)  # one cache for both, on purpose: the second text does hear the first
    generate(MODEL, TEXT[:8], 2, cache=ghost)
    heard = call(MODEL, ghost, [TEXT[8:12]], ghost.lengths)[0]
    assert (heard - causal_logits(MODEL, TEXT[8:12])).abs().max() > 1e-2


@exact
def test_logits_with_and_without_a_cache_differ_is_it_a_bug(kind):
    """People ask whether 1e-3 in half precision is rounding or a mistake (huggingface/transformers #13849, #17490,
    #25420, #36536; karpathy/nanoGPT PR #613). float64 tells: rounding shrinks with the type, a bug does not."""
    error = {}
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        model = toy(seed=12, dtype=dtype)
        got = feed(model, cache_of(kind, model=model), [TEXT], [[5], [15]])[0]
        error[dtype] = (got.double() - causal_logits(model, TEXT)).abs().max().item()
    assert error[torch.float64] < 1e-12 < error[torch.float32] < 1e-5 < error[torch.bfloat16] < 0.2


@every
def test_an_answer_depends_on_who_else_is_in_the_batch(kind):
    """Rows of unequal length shared their position ids or attended to padding (rasbt/reasoning-from-scratch #33,
    mlx-vlm #1946). Content of neighbours: not a bit. Joining a batch: rounding."""
    rows = [TEXT[:9], TEXT[9:13], TEXT[13:]]
    other = [TEXT[:9], [(t + 7) % 50 for t in rows[1]], [(t + 3) % 50 for t in rows[2]]]
    lengths = [9, 4, 7]
    a = feed(MODEL, cache_of(kind, 3), rows, in_chunks(lengths, 4))[0]
    b = feed(MODEL, cache_of(kind, 3), other, in_chunks(lengths, 4))[0]
    assert torch.equal(a, b)
    alone = feed(MODEL, cache_of(kind), rows[:1], in_chunks([9], 4))[0]
    assert_logits(a, alone)


# ---- windows, rings, sinks


@pytest.mark.parametrize("chunk", [1, 2, 3, 4, 5, 6, 13])
@pytest.mark.parametrize("window", [1, 2, 3, 4, 5, 6])
def test_a_ring_is_wrong_after_it_wraps_or_after_a_long_prefill(window, chunk):
    """Right until the first wrap, or as long as the prompt was shorter than the window (litgpt #2182, #2215,
    transformers #37574, pytorch/executorch #20346). Every pair of window and chunk, past three windows."""
    n = 3 * window + 2
    text = ids_for(1, [n])[0]
    for sinks in (0, 2):
        options = {"window": window, "sinks": sinks}
        got = feed(MODEL, cache_of("sliding", **options), [text], in_chunks([n], chunk))[0]
        assert_logits(got, dense_logits(MODEL, text, rule_of("sliding", options)))


def test_window_w_means_three_things():
    """W keys with the query's own, W before it, or W - 1 stored: projects disagree, and one off is silent
    (karpathy/nanochat and rasbt/LLMs-from-scratch differ). Here W keys, own included; the cache, the mask and the
    model say the same."""
    for window in (1, 2, 5):
        pos = torch.arange(9)[None]
        assert visible(pos, pos, window).sum(-1).max() == window
        cache = cache_of("sliding", window=window)
        seen = []
        append = cache.append
        cache.append = lambda *args, append=append, seen=seen: seen.append(append(*args)) or seen[-1]
        for p in range(9):
            call(MODEL, cache, [[1]], [p])
            assert sorted(q for q in seen[-1].pos[0].tolist() if q >= 0) == list(range(max(0, p - window + 1), p + 1))
        narrow, text = toy(seed=12, sliding_window=window), TEXT[:9]
        want = dense_logits(narrow, text)
        assert_logits(feed(MODEL, cache_of("sliding", window=window), [text], [[9]])[0], want)


def test_a_sliding_window_saves_no_memory():
    """Only the mask slid; all keys were kept (karpathy/nanochat #825). Here bytes stand still after W tokens, and so
    does what a step reads."""
    cache, held, read = cache_of("sliding", window=4), [], []
    for p in range(40):
        before = cache.bytes_read
        call(MODEL, cache, [[p % 50]], [p])
        held.append(cache.nbytes)
        read.append(cache.bytes_read - before)
    token = MODEL.config.kv_bytes_per_token(8)
    assert set(held) == {4 * token} and read[4:] == [4 * token] * 36


@pytest.mark.parametrize("place", ["text", "cache"])
def test_attention_sinks_at_the_wrong_position(place):
    """Keys stored with their rotation were shifted and rotated again, once more each step (mit-han-lab/streaming-llm
    #53, #60, #73; transformers #35350, #33691). Two rules here, each exact for as long as you stream."""
    options = {"window": 4, "sinks": 2, "sinks_at": place}
    text = ids_for(2, [60])[0]
    got = feed(MODEL, cache_of("sliding", **options), [text], in_chunks([60], 1))[0]
    assert_logits(got, dense_logits(MODEL, text, rule_of("sliding", options)))
    other = dense_logits(
        MODEL, text, rule_of("sliding", {**options, "sinks_at": "cache" if place == "text" else "text"})
    )
    assert (got - other)[:6].abs().max() < 1e-12 and (got - other)[6:].abs().max() > 1e-2  # the rules part at W + sinks


# ---- eviction


def test_eviction_turns_the_text_to_garbage():
    """A new token has drawn no attention yet, so the rule that drops the lightest drops it at once, and soon nothing
    near the query is left; elsewhere what was left was numbered anew (VeloxQuant-MLX #137, #141; keys_values #140).
    Here recent tokens are safe by default, grace=n alone keeps the last n, and positions stay what they were."""
    text = ids_for(5, [40])[0]

    def lost(**options):
        """Of the queries past the budget, how many miss the token just before them, over all heads."""
        cache, missing = make_cache("heavy_hitter", MODEL, 1, 40, budget=8, **options), []
        for p, token in enumerate(text):
            call(MODEL, cache, [[token]], [p])
            held = [pos.view(2, -1) for pos in cache.pos.values()]  # 2 KV heads
            assert all((row == p).any() for pos in held for row in pos), "its own token a query always sees"
            missing += [not (row == p - 1).any() for pos in held for row in pos if p >= 8]
        return sum(missing) / len(missing)

    assert lost(recent=0, grace=0) > 0.5
    assert lost(recent=0, grace=1) == lost() == 0
    for options in ({"recent": 0, "grace": 3}, {}):
        got = feed(MODEL, make_cache("heavy_hitter", MODEL, 1, 40, budget=8, **options), [text], [[40]])[0]
        assert_logits(got, dense_logits(MODEL, text, rule_of("heavy_hitter", {"budget": 8, **options})))
    cache = make_cache("heavy_hitter", MODEL, 1, 40, budget=8)
    feed(MODEL, cache, [text], [[40]])
    assert cache.pos[0].max() == 39  # not 7: the eight tokens kept stand where they stood


# ---- dtypes and bytes


@every
def test_a_dtype_clash_crashes_deep_inside_or_turns_bits_into_nonsense(kind):
    """A cache in one type and a model in another: an index error far from the cause (pytorch/torchtune #398, #1349),
    or fp16 bits read as bf16 and fluent nonsense (vllm-project/vllm #54338). Here the type comes from the first
    keys."""
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        model = toy(seed=12, dtype=dtype)
        cache = cache_of(kind, model=model)
        assert call(model, cache, [[1, 2]], [0])[0].dtype == cache.dtype == dtype
        other = toy(seed=12, dtype=torch.float32 if dtype != torch.float32 else torch.float16)
        with pytest.raises(
            ValueError, match=f"keys are {other.dtype}, the cache holds {dtype}: a cache serves one dtype"
        ):
            call(other, cache, [[3]], [2])
        assert torch.isfinite(call(model, cache, [[3]], [2])[0]).all()


def test_the_memory_formula_is_too_high_or_too_low():
    """Query heads counted instead of KV heads (torchtune #38, #1961), head_dim taken as hidden / heads (LMCache
    #688), keys repeated before caching (SnapKV #16): the formula and the tensors drifted apart
    (rasbt/LLMs-from-scratch #922). 20 random shapes."""
    rng = np.random.default_rng(0)
    for _ in range(20):
        heads = int(rng.choice([2, 4, 6]))
        config = {
            "num_attention_heads": heads,
            "num_key_value_heads": int(rng.choice([d for d in range(1, heads + 1) if heads % d == 0])),
            "head_dim": int(rng.choice([4, 8, 10])),
            "hidden_size": int(rng.choice([24, 36])),
            "num_hidden_layers": int(rng.integers(1, 4)),
        }
        model = toy(dtype=torch.float32, **config)
        c, B, n = ModelConfig(**config), int(rng.integers(1, 4)), int(rng.integers(1, 20))
        formula = B * n * 2 * c.num_hidden_layers * c.num_key_value_heads * c.head_dim * 4
        assert c.kv_bytes_per_token(4) * B * n == formula
        for kind in ("growing", "full", "paged"):
            cache = make_cache(kind, model, B, n, **({"block_size": 1} if kind == "paged" else {}))
            call(model, cache, [[1] * n] * B, [0] * B)
            by = cache.nbytes_by()
            assert by["keys"] + by["values"] == formula == cache.nbytes_in_use
            held = {x.data_ptr(): x.untyped_storage().nbytes() for x in tensors_of(cache)}
            assert sum(held.values()) == formula


def tensors_of(cache):
    holder = getattr(cache, "pool", cache)
    return [*holder.k.values(), *holder.v.values()]


def test_int4_does_not_save_four_times():
    """Scales and zero points were left out of the count, and dequantized copies raised the peak (sgl-project/sglang
    PR #22777; cold-compress). Here every tensor counts: with groups of 16, int4 costs 6 bits, int8 10."""
    model = toy(dtype=torch.float16, head_dim=16)
    for bits, each in ((8, 10), (4, 6), (2, 4)):
        cache = cache_of(
            "quantized", max_length=64, model=model, k_bits=bits, v_bits=bits, group_size=16, residual_length=0
        )
        call(model, cache, [[1] * 3], [0])
        by = cache.nbytes_by()
        values = 2 * 64 * 2 * model.config.num_key_value_heads * 16  # layers, tokens, K and V, heads, channels
        assert (by["keys"] + by["values"] + by["scales"]) * 8 == each * values
        assert by["tail"] == 16 * model.config.kv_bytes_per_token(2)


def test_keys_are_silently_never_quantized_or_depend_on_the_chunking():
    """Per-channel groups of one token are exact, so nothing was lost and nothing saved; elsewhere the full-precision
    rest never grew old (VeloxQuant-MLX #162, #163, #86). Same codes whichever way they came, and an error above
    zero."""
    options = {"group_size": 4, "residual_length": 4, "k_bits": 4, "v_bits": 4}
    caches = []
    for chunk in (1, 3, 20):
        cache = cache_of("quantized", **options)
        got = feed(MODEL, cache, [TEXT], in_chunks([20], chunk))[0]
        call(MODEL, cache, [[1]], [20])
        caches.append(cache)
        assert (got - causal_logits(MODEL, TEXT))[8:].abs().amax(-1).min() > 0
        assert cache.sealed == {0: [16], 1: [16]}
    for layer in (0, 1):
        for both in zip(*(c.codes[layer] for c in caches)):
            for stored in zip(*both):
                assert all(torch.equal(stored[0], x) for x in stored[1:])


def test_int4_swaps_nibbles_overflows_or_shifts_a_constant():
    """Nibbles unpacked in the other order, signed codes read as unsigned, a scale that overflowed for a constant
    channel, padding that stretched the range (exo-cuda #40, openvino #37095, lmdeploy #4849)."""
    x = torch.arange(16, dtype=torch.float64).view(1, 1, 1, 16) - 8
    codec = IntCodec(4, "token", 16, 16)
    assert torch.equal(codec.decode(*codec.encode(x), x.dtype), x)  # all sixteen codes, with their signs
    for value in (0.0, 3.5, -1000.0, 65504.0):
        constant = torch.full((1, 1, 4, 16), value)
        for axis in ("token", "channel"):
            codec = IntCodec(4, axis, 4, 16)
            assert torch.equal(codec.decode(*codec.encode(constant), torch.float32), constant)
    with pytest.raises(ValueError, match="head_dim=5 does not fill bytes with 4-bit codes"):
        make_codec(4, "token", 5, 5)
    # a short row beside a long one: its empty slots must not widen any group's range
    rows = [TEXT, TEXT[:9]]
    options = {"group_size": 4, "residual_length": 0, "k_bits": 4, "v_bits": 4}
    got = feed(MODEL, cache_of("quantized", 2, **options), rows, in_chunks([20, 9], 5))[1]
    assert_logits(got, dense_logits(MODEL, rows[1], rule_of("quantized", options)))


# ---- cost


@every
def test_the_cache_makes_nothing_faster_because_the_whole_prompt_is_fed_again(kind, monkeypatch):
    """Cache in place, but each step still ran over all tokens: 0.9 % faster (nanoVLM #69; jaymody/picoGPT #7).
    Counted, not timed: N + n - 1 tokens go through the layers, against their sum of lengths without a cache."""
    fed = []
    run = MODEL.run
    monkeypatch.setattr(MODEL, "run", lambda ids, pos, cache: fed.append(ids.shape[1]) or run(ids, pos, cache))
    generate(MODEL, TEXT, 10, cache=kind)
    assert sum(fed) == 20 + 9
    fed.clear()
    generate(MODEL, TEXT, 10, cache=None)
    assert sum(fed) == sum(range(20, 30))


def test_memory_is_twice_what_was_expected():
    """torch.cat holds the old tensor and the new one at the same moment (transformers #25930, PR #30536). Growing
    peaks at old + new of what it joins; a preallocated cache adds nothing that grows with its keys."""
    k = torch.zeros(1, 2, 1, 64)
    for kind, copies in (("growing", 2), ("full", 0)):
        cache = make_cache(kind, toy(dtype=torch.float32, head_dim=64), 1, 1024)
        big = torch.zeros(1, 2, 1000, 64)
        with torch.no_grad():
            cache.append(0, big, big.clone(), torch.arange(1000)[None])
            cache.advance(torch.arange(1000)[None])
            with memory("cpu", of=[cache], counted=True) as m:
                cache.append(0, k, k.clone(), torch.tensor([[1000]]))
        new = 2 * 64 * 4 * 1001
        assert copies * new <= m.peak < copies * new + 20_000  # positions are the rest


@every
def test_memory_does_not_go_down_after_forgetting(kind):
    """A view of a few bytes kept the whole old tensor alive, and a forgotten no_grad a graph of every step
    (huggingface/trl #2686, transformers #32681). Storages are counted here, not shapes, and no gradient is kept."""
    cache = cache_of(kind, 2)
    text = TEXT[:6]
    model = toy(seed=12)
    for token in text:  # with gradients on
        model(torch.tensor([[token], [token]]), cache)
    cache.rewind(1)
    cache.reorder([1])
    held = tensors_of(cache) if kind != "quantized" else [x for both in cache.tail.values() for x in both]
    assert not any(x.requires_grad for x in held)
    if kind != "paged":
        assert all(x.untyped_storage().nbytes() == x.nbytes for x in held)
    else:
        assert cache.pool.used_blocks == 2
    if kind == "growing":
        assert cache.nbytes == 5 * model.config.kv_bytes_per_token(8) + 5 * 8


# ---- forking, rewinding, blocks


@every
def test_using_a_prompt_cache_changes_it(kind):
    """The same cached prefix served two requests and the first one's tokens were in it for the second (transformers
    #37078, MemOS #2301). fork() leaves the parent as it was."""
    prompt = cache_of(kind)
    feed(MODEL, prompt, [TEXT[:5]], [[5]])
    answers = [feed_on(prompt.fork(), way) for way in ([1, 2, 3], [4, 5, 6], [1, 2, 3])]
    assert torch.equal(answers[0], answers[2]) and prompt.lengths == [5]
    for way, got in zip(([1, 2, 3], [4, 5, 6]), answers):
        rule = rule_of(kind, {"window": 6} if kind == "sliding" else {"group_size": 4, "residual_length": 4})
        assert_logits(got, dense_logits(MODEL, TEXT[:5] + way, rule)[5:])


def feed_on(cache, tokens):
    return torch.cat([call(MODEL, cache, [[t]], [cache.lengths[0]])[0] for t in tokens])


@exact
def test_rejected_draft_tokens_stay_in_the_cache(kind):
    """Speculative decoding took back tokens, the length went down and keys, or a ring's overwritten ones, did not
    (ml-explore/mlx-lm #1109, #1427, #1486). Append n, take n back, append m is append m."""
    for n in (1, 4, 5, 9):
        cache = cache_of(kind)
        feed(MODEL, cache, [TEXT[:7]], [[7]])
        call(MODEL, cache, [[3] * n], [7])
        cache.rewind(n)
        assert_logits(feed_on(cache, TEXT[7:12]), causal_logits(MODEL, TEXT[:12])[7:])


def test_a_ring_that_rewinds_past_its_data_pretends_to_succeed():
    """What a ring has overwritten cannot come back (mlx-lm #1109). It refuses, with the largest number it can do, and
    with it the answer is exact."""
    cache = cache_of("sliding", window=4)
    feed(MODEL, cache, [TEXT[:10]], [[10]])
    with pytest.raises(RewindError, match="row 0 has 10 tokens and can forget at most 1 of them, not 3") as error:
        cache.rewind(3)
    assert error.value.largest == 1 and cache.lengths == [10]
    cache.rewind(1)
    want = dense_logits(MODEL, TEXT[:9] + [7, 8], rule_of("sliding", {"window": 4}))[9:]
    assert_logits(feed_on(cache, [7, 8]), want)


@pytest.mark.parametrize("block_size", [1, 2, 4])
def test_a_length_that_is_a_multiple_of_the_block_size_is_off_by_one(block_size):
    """At length % block == 0 the last block counted as empty, or one more was released than taken
    (GeeeekExplorer/nano-vllm #30, #66, #150, #240; MinivLLM #85, #87). Every length over three blocks, books
    checked."""
    text = TEXT[: 3 * block_size + 1]
    cache, got = cache_of("paged", block_size=block_size), []
    for p, token in enumerate(text):
        got += call(MODEL, cache, [[token]], [p])
        cache.pool.check([cache.rows[0].table])
        assert len(cache.rows[0].table) == p // block_size + 1
    assert_logits(torch.cat(got), causal_logits(MODEL, text))
    for n in range(len(text) - 1, -1, -1):
        cache.rewind(1)
        cache.pool.check([cache.rows[0].table])
        assert cache.pool.used_blocks == -(-n // block_size)


def test_full_prefix_hit_leaves_one_token_to_compute():
    """A prompt of whole blocks, sent twice: everything was found, nothing was left to run, and there were no logits
    (nano-vllm #144, #114; vLLM #11186, #17999). At most N - 1 tokens match."""
    cache = cache_of("paged", block_size=4)
    prompt = TEXT[:8]
    first = feed(MODEL, cache, [prompt], [[8]])[0]
    cache.commit(0, prompt)
    cache.free_row(0)
    cache.add_row()
    assert cache.match_prefix(0, prompt) == 4
    again = call(MODEL, cache, [prompt[4:]], [4])[0]
    assert_logits(again, first[4:])


def test_the_tail_after_a_shared_block_is_read_from_position_zero():
    """A second request took over shared blocks, and its own tail was placed at 0 (MinivLLM #98; nm-vllm #3 on sharing
    full blocks only). Shared or not: the same logits, and every reference given back."""
    cache = cache_of("paged", block_size=4)
    common, tails = TEXT[:9], [TEXT[9:14], TEXT[14:20]]
    got = []
    for n, tail in enumerate(tails):
        row = cache.add_row() if n else 0
        text = common + tail
        start = cache.match_prefix(row, text)
        assert start == (8 if n else 0)  # the partly filled third block is not shared
        new = [[] for _ in range(row)] + [text[start:]]
        got.append(call(MODEL, cache, new, [*cache.lengths[:row], start])[row])
        assert_logits(got[-1], causal_logits(MODEL, text)[start:])
        cache.commit(row, text)
    assert cache.rows[0].table[:2] == cache.rows[1].table[:2] and cache.rows[0].table[2] != cache.rows[1].table[2]
    assert sorted(cache.pool.ref, reverse=True)[:3] == [2, 2, 1]
    cache.free_row(0)
    cache.free_row(0)
    assert cache.pool.ref == [0] * cache.pool.num_blocks


@every
def test_beam_search_goes_on_with_the_other_beams_keys(kind):
    """The beams were reordered, their cache was not (transformers #46612). After reorder each row is what it was told
    to become, repeats and drops included."""
    rows = [TEXT[:7], TEXT[7:14], TEXT[3:10]]
    cache = cache_of(kind, 3)
    feed(MODEL, cache, rows, [[7, 7, 7]])
    cache.reorder([2, 2, 0])
    got = call(MODEL, cache, [[1], [2], [3]], [7, 7, 7])
    rule = rule_of(kind, {"window": 6} if kind == "sliding" else {"group_size": 4, "residual_length": 4})
    for b, (parent, token) in enumerate(((2, 1), (2, 2), (0, 3))):
        assert_logits(got[b], dense_logits(MODEL, [*rows[parent], token], rule)[-1:])


# ---- serving


@pytest.mark.parametrize("budget", [3, 64])
@pytest.mark.parametrize("sharing", [True, False])
def test_a_preempted_request_resumes_wrong(sharing, budget):
    """The pool ran dry, a request had to leave, and when it came back it went on from its prompt alone, or was taken
    for a decode once its prompt was through (nano-vllm #211, #217; vllm-gaudi PR #524). A tiny pool, so that it must
    happen, gives the texts of a roomy one: what was generated is computed again as a prompt, and the draws go on."""
    texts = {}
    for blocks in (7, 60):
        engine = Engine(MODEL, blocks, 2, max_num_batched_tokens=budget, prefix_sharing=sharing, headroom=0)
        requests = [engine.add(TEXT[i : i + 3 + i], 8, temperature=1.5, seed=i, stop_ids=[]) for i in range(3)]
        engine.run()
        texts[blocks] = [r.output for r in requests]
        lost = [r.num_preemptions for r in requests if r.num_preemptions]
        assert bool(lost) == (blocks == 7)
    assert texts[7] == texts[60]


def test_a_long_prompt_is_resumed_and_preempted_again_in_every_step():
    """Only the first chunk of a text was asked whether there is room, so a preempted request came back, found none for
    its second chunk, left, and came back (vllm-project/vllm #25538). Here it waits until all of it has room."""
    engine = Engine(MODEL, 12, 2, max_num_batched_tokens=4, prefix_sharing=False)
    first = engine.add(TEXT[:2], 18, stop_ids=[])
    long = engine.add(TEXT[:12], 4, stop_ids=[])
    engine.run()
    assert len(first.output) == 18 and len(long.output) == 4 and long.num_preemptions == 1
    joined = [e.step for e in engine.trace.events if e.kind == "admitted" and e.request == long.id]
    assert len(joined) == 2 and joined[1] >= first.finished_step


@pytest.mark.parametrize("length", [4, 8, 9])
def test_the_same_prompt_sent_again_is_answered_from_its_last_token(length):
    """An engine found all blocks of a repeated prompt and ran an empty batch (nano-vllm #144, #114; vLLM #17999). Sent
    three times, the last two together: at least one token is left to compute, and the texts are the same."""
    engine, prompt = Engine(MODEL, 20, 4), TEXT[:length]
    requests = [engine.add(prompt, 5, stop_ids=[])]
    engine.run()
    requests += [engine.add(prompt, 5, stop_ids=[]) for _ in range(2)]
    engine.run()
    assert [r.num_cached_tokens for r in requests] == [0, *[(length - 1) // 4 * 4] * 2]
    assert requests[0].output == requests[1].output == requests[2].output == generate(MODEL, prompt, 5)[length:]
    assert engine.pool.used_blocks == 0
