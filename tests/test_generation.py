"""generate() and stream(): the same tokens whatever the batch, chunking and cache, and no forward pass wasted."""

import pytest
import torch
from oracles import assert_logits, call, causal_logits, ids_for, toy

from kvlab import generate, make_cache, stream
from kvlab.caches import CacheFull, PoolExhausted
from kvlab.generation import Sampler

MODEL = toy(seed=11)
PROMPTS = ids_for(0, [7, 3, 5])
KINDS = ["growing", "full", "sliding", "quantized", "paged", "offloaded", "heavy_hitter", "random", "first_last", None]


def greedy(text: list[int], n: int, stop=()) -> list[int]:
    """The reference: the whole text through a model of its own, again for each token."""
    text = list(text)
    for _ in range(n):
        text.append(int(causal_logits(MODEL, text)[-1].argmax()))
        if text[-1] in stop:
            break
    return text


@pytest.fixture
def calls(monkeypatch):
    """(rows, columns, logits asked for) of each forward pass."""
    seen, forward = [], MODEL.forward

    def counted(ids, cache=None, pos=None, logits_to_keep=0):
        seen.append((*ids.shape, logits_to_keep))
        return forward(ids, cache, pos, logits_to_keep)

    monkeypatch.setattr(MODEL, "forward", counted)
    return seen


# ---- the same tokens


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_ragged_batch_says_what_each_prompt_says_alone(kind):
    """Within the default window and residual every cache is exact."""
    want = [greedy(p, 9) for p in PROMPTS]
    assert generate(MODEL, PROMPTS, 9, cache=kind) == want
    assert [generate(MODEL, p, 9, cache=kind) for p in PROMPTS] == want


@pytest.mark.parametrize("kind", ["growing", "full", "sliding", "quantized", "paged"])
def test_the_logits_behind_the_tokens(kind, monkeypatch):
    """Equal tokens can hide a bug; so the logits of every step are compared, in float64."""
    seen, forward = [], MODEL.forward

    def kept(*args, **kwargs):
        seen.append(forward(*args, **kwargs))
        return seen[-1]

    monkeypatch.setattr(MODEL, "forward", kept)
    texts = generate(MODEL, PROMPTS, 6, cache=kind)
    for step, logits in enumerate(seen):
        for b, prompt in enumerate(PROMPTS):
            assert_logits(logits[b, -1:], causal_logits(MODEL, texts[b][: len(prompt) + step])[-1:])


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 100])
@pytest.mark.parametrize("kind", ["full", "sliding", "quantized", "paged", "heavy_hitter"])
def test_prefill_in_chunks(kind, chunk):
    assert generate(MODEL, PROMPTS, 5, cache=kind, prefill_chunk=chunk) == [greedy(p, 5) for p in PROMPTS]


def test_a_lossy_cache_of_ones_own_equals_itself_in_any_batch():
    for kind, options in (
        ("sliding", {"window": 3, "sinks": 1}),
        ("quantized", {"group_size": 2, "residual_length": 2}),
        ("heavy_hitter", {"budget": 4, "recent": 2}),
        ("random", {"budget": 4}),
    ):
        together = generate(MODEL, PROMPTS, 8, cache=make_cache(kind, MODEL, 3, 20, **options))
        alone = [generate(MODEL, p, 8, cache=make_cache(kind, MODEL, 1, 20, **options)) for p in PROMPTS]
        assert together == alone


# ---- no pass wasted


def test_one_prefill_and_n_minus_1_steps(calls):
    generate(MODEL, [PROMPTS[0]], 6)
    assert calls == [(1, 7, 1)] + [(1, 1, 1)] * 5
    calls.clear()
    generate(MODEL, [PROMPTS[0]], 1)
    assert calls == [(1, 7, 1)]
    calls.clear()
    generate(MODEL, [PROMPTS[0]], 3, prefill_chunk=3)
    assert calls == [(1, 3, 1), (1, 3, 1), (1, 1, 1)] + [(1, 1, 1)] * 2


def test_without_a_cache_everything_is_fed_again(calls):
    generate(MODEL, [PROMPTS[0]], 4, cache=None)
    assert [c[1] for c in calls] == [7, 8, 9, 10]


def test_a_finished_row_costs_nothing_more(calls):
    """Row 1 stops at its first token, row 0 at its third: two rows fewer, and no step after the last stop."""
    texts = [greedy(p, 8) for p in PROMPTS]
    new = [t[len(p) :] for t, p in zip(texts, PROMPTS)]
    stops = [[new[0][2]], [new[1][0]], []]
    first = [n.index(s[0]) if s else 7 for n, s in zip(new, stops)]  # where each one ends
    got = generate(MODEL, PROMPTS, 8, stop_ids=stops)
    assert got == [t[: len(p) + f + 1] for t, p, f in zip(texts, PROMPTS, first)]
    rows = [c[0] for c in calls]
    assert rows == [3] + [sum(f >= step for f in first) for step in range(1, 8)]
    calls.clear()
    generate(MODEL, PROMPTS[:2], 8, stop_ids=stops[:2])
    assert len(calls) == max(first[:2]) + 1


@pytest.mark.parametrize("kind", ["growing", "full", "sliding", "quantized", "paged", None], ids=str)
def test_dropping_rows_does_not_change_the_others(kind):
    texts = [greedy(p, 10) for p in PROMPTS]
    stop = [texts[1][len(PROMPTS[1])]]
    want = [greedy(PROMPTS[0], 10, []), greedy(PROMPTS[1], 10, stop), greedy(PROMPTS[2], 10, [])]
    assert generate(MODEL, PROMPTS, 10, cache=kind, stop_ids=[[], stop, []]) == want


def test_a_cache_that_was_passed_keeps_its_rows(calls):
    """Its finished rows get padding instead, so that the caller finds them where they were."""
    stop = greedy(PROMPTS[1], 1)[-1]
    for kind in ("growing", "full", "sliding", "quantized", "paged"):
        calls.clear()
        cache = make_cache(kind, MODEL, 3, 20)
        got = generate(MODEL, PROMPTS, 5, cache=cache, stop_ids=[[], [stop], []])
        assert got[1] == PROMPTS[1] + [stop] and got[0] == greedy(PROMPTS[0], 5)
        assert cache.lengths == [7 + 4, 3, 5 + 4]  # the last token is never fed back
        assert [c[0] for c in calls] == [3] * 5
        calls.clear()


# ---- stop ids, forms, callback


def test_stop_ids_in_every_form():
    texts = [greedy(p, 6) for p in PROMPTS]
    new = [t[len(p) :] for t, p in zip(texts, PROMPTS)]
    a, b = new[0][1], new[1][0]

    def cut(row, stops):
        ends = [i for i, t in enumerate(new[row]) if t in stops]
        return PROMPTS[row] + new[row][: ends[0] + 1 if ends else 6]

    assert generate(MODEL, PROMPTS, 6, stop_ids=a) == [cut(i, {a}) for i in range(3)]
    assert generate(MODEL, PROMPTS, 6, stop_ids=[a, b]) == [cut(i, {a, b}) for i in range(3)]
    assert generate(MODEL, PROMPTS, 6, stop_ids={a, b}) == [cut(i, {a, b}) for i in range(3)]
    assert generate(MODEL, PROMPTS, 6, stop_ids=[[a], [], [b]]) == [cut(i, s) for i, s in enumerate(({a}, set(), {b}))]
    assert generate(MODEL, PROMPTS, 6, stop_ids=[]) == texts
    with pytest.raises(ValueError, match="stop_ids names 2 rows, there are 3"):
        generate(MODEL, PROMPTS, 6, stop_ids=[[a], [b]])


@pytest.mark.parametrize("many", [False, True])
def test_the_models_own_end_is_the_default(many):
    text = greedy(PROMPTS[0], 6)
    end = text[7 + 2]
    model = toy(seed=11, eos_token_id=(end, 49) if many else end)
    assert generate(model, PROMPTS[0], 6) == greedy(PROMPTS[0], 6, {end, 49} if many else {end})
    assert generate(model, PROMPTS[0], 6, stop_ids=[]) == text


def test_a_tensor_gives_a_tensor_padded_behind():
    ids = torch.tensor([PROMPTS[0][:3], PROMPTS[2][:3]])
    rows = [greedy(r, 5) for r in ids.tolist()]
    got = generate(MODEL, ids, 5)
    assert got.dtype == torch.int64 and got.tolist() == rows
    stop = rows[0][3]
    cut = [greedy(r, 5, {stop}) for r in ids.tolist()]
    assert len(cut[0]) == 4 < len(cut[1])
    for pad, got in (
        (0, generate(MODEL, ids, 5, stop_ids=stop)),
        (9, generate(MODEL, ids, 5, stop_ids=stop, pad_token_id=9)),
        (8, generate(toy(seed=11, pad_token_id=8), ids, 5, stop_ids=stop)),
        (6, generate(toy(seed=11, eos_token_id=(6, 7)), ids, 5, stop_ids=stop)),
        (9, generate(toy(seed=11, pad_token_id=8, eos_token_id=6), ids, 5, stop_ids=stop, pad_token_id=9)),
    ):
        assert got.tolist() == [cut[0] + [pad] * (len(cut[1]) - 4), cut[1]]


def test_lists_come_back_as_lists():
    one = greedy(PROMPTS[1], 3)
    assert generate(MODEL, PROMPTS[1], 3) == one
    assert generate(MODEL, [PROMPTS[1]], 3) == [one]
    assert generate(MODEL, tuple(PROMPTS[1]), 3) == one
    assert ids_for(0, [7, 3, 5]) == PROMPTS  # the caller's lists are not written to


def test_the_callback_hears_every_token_once_and_in_order():
    heard: dict[int, list[int]] = {0: [], 1: [], 2: []}
    texts = generate(MODEL, PROMPTS, 4, on_token=lambda row, token: heard[row].append(token))
    assert [p + heard[b] for b, p in enumerate(PROMPTS)] == texts


def test_stream_yields_steps():
    steps = list(stream(MODEL, PROMPTS, 4))
    want = [greedy(p, 4)[len(p) :] for p in PROMPTS]
    assert [s.index for s in steps] == [0, 1, 2, 3]
    assert [[s.tokens[b] for s in steps] for b in range(3)] == want
    assert [s.finished for s in steps] == [[False] * 3] * 3 + [[True] * 3]
    assert next(stream(MODEL, PROMPTS[0], 4)).token == want[0][0]
    stop = want[1][0]
    steps = list(stream(MODEL, PROMPTS, 3, stop_ids=[[], [stop], []]))
    assert [s.tokens[1] for s in steps] == [stop, None, None] and [s.finished[1] for s in steps] == [True] * 3


def test_stream_is_lazy_and_keeps_no_graph(calls):
    it = stream(MODEL, PROMPTS[0], 50)
    assert calls == []
    next(it), next(it)
    assert len(calls) == 2
    cache = make_cache("growing", MODEL, 1)
    next(stream(MODEL, PROMPTS[0], 2, cache=cache))
    assert not cache.k[0].requires_grad and torch.is_grad_enabled()


# ---- continuing


@pytest.mark.parametrize("kind", ["growing", "full", "sliding", "quantized", "paged"])
def test_a_conversation_goes_on_in_its_cache(kind, calls):
    cache = make_cache(kind, MODEL, 1, 60)
    first = generate(MODEL, PROMPTS[0], 4, cache=cache)
    calls.clear()
    # the last token of the answer was not fed: it opens the next turn
    more = first[-1:] + [3, 1, 4]
    second = generate(MODEL, more, 4, cache=cache)
    assert calls[0] == (1, 4, 1)
    assert first[:-1] + second == greedy(first + [3, 1, 4], 4)


def test_two_generations_with_new_caches_do_not_know_each_other():
    first = generate(MODEL, PROMPTS[0], 5)
    generate(MODEL, PROMPTS[1], 5)
    assert generate(MODEL, PROMPTS[0], 5) == first


# ---- sampling


def test_a_seed_repeats_a_text_and_another_one_does_not():
    def text(seed):
        return generate(MODEL, PROMPTS[0], 20, temperature=1.0, seed=seed)

    assert text(1) == text(1) != text(2)
    assert len({tuple(text(s)) for s in range(8)}) == 8


def test_without_a_seed_texts_differ_and_torch_manual_seed_repeats_them():
    torch.manual_seed(0)
    a = [generate(MODEL, PROMPTS[0], 20, temperature=1.0) for _ in range(2)]
    torch.manual_seed(0)
    b = [generate(MODEL, PROMPTS[0], 20, temperature=1.0) for _ in range(2)]
    assert a == b and a[0] != a[1]
    state = torch.get_rng_state()
    generate(MODEL, PROMPTS[0], 3)  # greedy leaves the global generator alone
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("kind", ["full", "paged", None], ids=str)
def test_a_sampled_row_does_not_depend_on_its_neighbours(kind):
    options = {"temperature": 1.0, "seed": 5, "cache": kind}
    row0 = generate(MODEL, [PROMPTS[0]], 10, **options)[0]
    assert generate(MODEL, PROMPTS, 10, **options)[0] == row0
    assert generate(MODEL, [PROMPTS[0], [1], [2, 3]], 10, **options)[0] == row0
    both = generate(MODEL, [PROMPTS[0], PROMPTS[0]], 10, **options)
    assert both[0] == row0 != both[1]  # rows draw apart
    stops = [both[1][7]]
    assert generate(MODEL, [PROMPTS[0], PROMPTS[0]], 10, stop_ids=[[], stops], **options)[0] == row0


def test_temperature_zero_is_greedy_and_a_low_one_nearly():
    assert generate(MODEL, PROMPTS[0], 6, temperature=0) == greedy(PROMPTS[0], 6)
    assert generate(MODEL, PROMPTS[0], 6, temperature=1e-4, seed=0) == greedy(PROMPTS[0], 6)
    assert generate(MODEL, PROMPTS[0], 6, temperature=5.0, top_k=1, seed=0) == greedy(PROMPTS[0], 6)
    assert generate(MODEL, PROMPTS[0], 6, temperature=5.0, top_p=1e-6, seed=0) == greedy(PROMPTS[0], 6)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("top_k", [None, 1, 3, 50, 99])
@pytest.mark.parametrize("top_p", [None, 0.1, 0.5, 0.9, 1.0])
def test_probabilities_against_a_direct_computation(temperature, top_k, top_p):
    logits = causal_logits(MODEL, PROMPTS[0])[-2:]
    got = Sampler(temperature, top_k, top_p).probabilities(logits)
    for row, p in zip(logits.tolist(), got.tolist()):
        order = sorted(range(50), key=lambda i: -row[i])[: top_k or 50]
        weight = {i: 2.718281828459045 ** (row[i] / temperature) for i in order}
        total, kept, mass = sum(weight.values()), {}, 0.0
        for i in order:
            if top_p is not None and mass >= top_p:
                break
            kept[i] = weight[i] / total
            mass += kept[i]
        for i in range(50):
            assert abs(p[i] - kept.get(i, 0.0)) < 1e-12


def test_draws_follow_the_probabilities():
    sampler, logits = Sampler(1.0, top_k=4, seed=0), causal_logits(MODEL, PROMPTS[0])[-1:]
    want, counts = sampler.probabilities(logits)[0], torch.zeros(50)
    for _ in range(4000):
        counts[sampler(logits, [0])[0]] += 1
    assert (counts[want == 0] == 0).all()
    assert (counts / 4000 - want).abs().max() < 0.03


@pytest.mark.parametrize(
    "options,message",
    [
        ({"temperature": -1.0}, "temperature=-1.0 must be 0 .greedy. or more"),
        ({"top_k": 0}, "top_k=0 must be at least 1, or None"),
        ({"temperature": float("nan")}, "temperature=nan must be 0 .greedy. or more"),
        ({"temperature": "hot"}, "temperature='hot' must be 0 .greedy. or more"),
        ({"top_k": 1.5}, "top_k=1.5 must be at least 1, or None"),
        ({"top_p": "all"}, "top_p='all' must lie in"),
        ({"seed": "a"}, "seed='a' must be an int, or None"),
        ({"max_new_tokens": None}, "max_new_tokens=None must be an int"),
        ({"top_p": 0.0}, r"top_p=0.0 must lie in \(0, 1\], or be None"),
        ({"top_p": 1.5}, r"top_p=1.5 must lie in"),
        ({"max_new_tokens": 0}, "max_new_tokens=0 must be at least 1"),
        ({"max_new_tokens": True}, "max_new_tokens=True must be an int"),
        ({"max_new_tokens": 2.0}, "max_new_tokens=2.0 must be an int"),
        ({"prefill_chunk": 0}, "prefill_chunk=0 must be at least 1"),
        ({"cache": "static"}, "cache kind 'static' is not known; kinds are"),
    ],
    ids=str,
)
def test_bad_options_are_refused_before_anything_runs(options, message, calls):
    with pytest.raises((ValueError, TypeError), match=message):
        stream(MODEL, [1, 2], **options)  # at the call, not at the first token
    assert calls == []


@pytest.mark.parametrize("stop_ids", [-1, [3, 50], [[3], [99]]], ids=str)
def test_a_stop_that_can_never_come_is_refused(stop_ids):
    with pytest.raises(ValueError, match=r"stop id (-1|50|99) can never come: ids run from 0 to 49"):
        generate(MODEL, [[1, 2], [3]], 2, stop_ids=stop_ids)


def test_a_pad_below_zero_is_refused():
    with pytest.raises(ValueError, match="pad_token_id=-5 must be at least 0"):
        generate(MODEL, torch.tensor([[1, 2]]), 2, pad_token_id=-5)


@pytest.mark.parametrize("stop_ids,bad", [("ab", "'a'"), ([1.5], "1.5"), ([[True]], "True")], ids=str)
def test_stop_ids_are_ints(stop_ids, bad):
    with pytest.raises(TypeError, match=f"stop id {bad} must be an int"):  # int() would have made 1.5 an id
        stream(MODEL, [1, 2], stop_ids=stop_ids)


@pytest.mark.parametrize(
    "ids,error,message",
    [
        ([], ValueError, "prompt 0 is empty: there must be at least one token"),
        ([[1], []], ValueError, "prompt 1 is empty"),
        (torch.zeros(0, 3, dtype=torch.int64), ValueError, "ids has no rows|prompt"),
        ([[1, 50]], ValueError, "prompt 0 contains id 50, outside the vocabulary: ids run from 0 to 49"),
        ([[1], [-1]], ValueError, "prompt 1 contains id -1, outside"),
        ([1, 2.5], TypeError, "prompt 0 contains 2.5: token ids are ints"),
        ([True, 1], TypeError, "prompt 0 contains True: token ids are ints"),
        ([2.5, 1], TypeError, "prompt 0 is 2.5: it must be a list of token ids"),
        (["hello"], TypeError, "prompt 0 is 'hello': it must be a list of token ids"),
        ("hello", TypeError, r"ids must be a tensor \(B, T\) or a list of token ids, not str; encode text first"),
        (torch.tensor([1, 2]), ValueError, r"ids must be an integer tensor \(B, T\), not torch.int64 of shape \(2,\)"),
        (torch.tensor([[0.5]]), ValueError, "not torch.float32 of shape"),
    ],
    ids=[str(i) for i in range(12)],
)
def test_bad_prompts(ids, error, message):
    for run in (generate, stream):
        with pytest.raises(error, match=message):
            run(MODEL, ids, 4)


def test_a_cache_that_is_too_small_says_so_before_the_first_token(calls):
    cache = make_cache("full", MODEL, 1, 10)
    with pytest.raises(
        CacheFull, match="0 tokens held, 7 in the prompt and 5 to come need max_length=11, the cache has"
    ):
        generate(MODEL, PROMPTS[0], 5, cache=cache)
    assert calls == [] and cache.lengths == [0]
    assert generate(MODEL, PROMPTS[0], 4, cache=cache) == greedy(PROMPTS[0], 4)
    with pytest.raises(CacheFull, match="10 tokens held, 1 in the prompt"):
        generate(MODEL, [1], 1, cache=cache)
    with pytest.raises(ValueError, match="3 prompts for a cache of 1 rows: make it with batch_size=3"):
        generate(MODEL, PROMPTS, 1, cache=make_cache("full", MODEL, 1, 10))
    with pytest.raises(TypeError, match="not a cache"):
        generate(MODEL, [1], 1, cache=3)


@pytest.mark.parametrize("chunk", [None, 2])
def test_a_prompt_that_does_not_fit_the_pool_leaves_it_empty(chunk):
    cache = make_cache("paged", MODEL, 1, block_size=2, num_blocks=3)
    with pytest.raises(PoolExhausted, match="4 more blocks of 2 tokens are needed and 3 of 3 are free"):
        generate(MODEL, PROMPTS[0], 1, cache=cache, prefill_chunk=chunk)
    assert cache.lengths == [0] and cache.pool.used_blocks == 0
    assert call(MODEL, cache, [[1]], [0])[0].shape == (1, 50)
