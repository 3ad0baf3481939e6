"""evaluate() and recall(): figures against dense references in float64, whatever the chunking, batch and cache."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from oracles import causal_logits, dense_logits, ids_for, rule_of, toy
from planted import Plain

from kvlab import evaluate, make_cache, recall
from kvlab.caches import KINDS, CacheFull
from kvlab.measure import memory
from kvlab.quality import Quality, bootstrap, facts, reference, streamed, table

MODEL = toy(seed=21)
N = 70
TEXTS = ids_for(5, [N, N, N])
EXACT = {"full": "full", "growing": "growing", "paged": "paged", "wide": ("sliding", {"window": N})}
LOSSY = {
    "window": ("sliding", {"window": 9}),
    "sinks": ("sliding", {"window": 9, "sinks": 3}),
    "sinks in the cache": ("sliding", {"window": 9, "sinks": 3, "sinks_at": "cache"}),
    "int4": ("quantized", {"k_bits": 4, "v_bits": 4, "group_size": 8, "residual_length": 0}),
    "int2 by token": ("quantized", {"k_bits": 2, "v_bits": 2, "key_axis": "token", "group_size": 8,
                                    "residual_length": 5}),
}  # fmt: skip


def by_hand(text: list[int], spec) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """nll, KL and agreement of one text from two dense passes, with torch's own losses."""
    kind, options = (spec, {}) if isinstance(spec, str) else spec
    full, this = causal_logits(MODEL, text)[:-1], dense_logits(MODEL, text, rule_of(kind, options))[:-1]
    nll = F.cross_entropy(this, torch.tensor(text[1:]), reduction="none")
    kl = F.kl_div(this.log_softmax(-1), full.log_softmax(-1), reduction="none", log_target=True).sum(-1)
    return nll, kl, this.argmax(-1) == full.argmax(-1)


def assert_by_hand(found: Quality, texts: list[list[int]], spec) -> None:
    for row, text in enumerate(texts):
        nll, kl, agree = by_hand(text, spec)
        torch.testing.assert_close(found.nll[row], nll, rtol=0, atol=1e-12)
        torch.testing.assert_close(found.kl[row], kl, rtol=0, atol=1e-12)
        assert torch.equal(found.agree[row], agree)


# ---- evaluate


@pytest.mark.parametrize("chunk", [1, 7, 64, 1000])
def test_exact_caches_give_the_nll_of_one_dense_pass(chunk):
    for name, found in evaluate(MODEL, TEXTS[0], EXACT, chunk).items():
        assert_by_hand(found, TEXTS[:1], "full")
        assert found.kl.abs().max() < 1e-12 and found.agree.all(), name
        assert found.tokens == N and found.chunk == chunk and found.nll.shape == (1, N - 1)
        assert found.nll.dtype == found.kl.dtype == torch.float64


@pytest.mark.parametrize("chunk", [1, 7, 64])
@pytest.mark.parametrize("name", LOSSY)
def test_lossy_caches_give_what_a_dense_pass_under_their_rule_gives(name, chunk):
    found = evaluate(MODEL, TEXTS[:1], {name: LOSSY[name]}, chunk)[name]
    assert_by_hand(found, TEXTS[:1], LOSSY[name])
    assert found.mean_kl > 1e-3 and 0 < found.top1 < 1, "this case must lose something"
    assert found.perplexity == pytest.approx(math.exp(by_hand(TEXTS[0], LOSSY[name])[0].mean()), rel=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_can_be_evaluated_and_the_chunk_does_not_matter(kind):
    small = {"sliding": {"window": 9}, "quantized": {"group_size": 8, "residual_length": 8}}
    small |= dict.fromkeys(("heavy_hitter", "random", "first_last"), {"budget": 12})
    one, other = (evaluate(MODEL, TEXTS[0][:40], {kind: (kind, small.get(kind, {}))}, chunk)[kind] for chunk in (3, 40))
    torch.testing.assert_close(one.nll, other.nll, rtol=0, atol=1e-12)
    torch.testing.assert_close(one.kl, other.kl, rtol=0, atol=1e-12)
    assert (one.kl >= -1e-12).all() and one.nbytes >= one.nbytes_in_use > 0


def test_rows_of_a_batch_are_as_alone():
    specs = {"full": "full", **LOSSY}
    together = evaluate(MODEL, torch.tensor(TEXTS), specs, 16)
    for row, text in enumerate(TEXTS):
        alone = evaluate(MODEL, torch.tensor(text), specs, 16)
        for name in specs:
            torch.testing.assert_close(together[name].nll[row], alone[name].nll[0], rtol=0, atol=1e-12)
            torch.testing.assert_close(together[name].kl[row], alone[name].kl[0], rtol=0, atol=1e-12)
    assert together["full"].nbytes == 3 * alone["full"].nbytes
    assert together["full"].bytes_per_token == alone["full"].bytes_per_token


def test_bytes_are_those_of_the_cache_that_has_seen_the_text():
    found = evaluate(MODEL, TEXTS[0], {**EXACT, **LOSSY})
    for name, spec in {**EXACT, **LOSSY}.items():
        kind, options = (spec, {}) if isinstance(spec, str) else spec
        cache = make_cache(kind, MODEL, 1, N, **options)
        with torch.no_grad():
            MODEL(torch.tensor(TEXTS[:1]), cache)
        assert (found[name].nbytes, found[name].nbytes_by) == (cache.nbytes, cache.nbytes_by()), name
        assert found[name].nbytes_in_use == cache.nbytes_in_use, name
        assert found[name].bytes_per_token == cache.nbytes / N
    per_token = MODEL.config.kv_bytes_per_token(8)
    assert found["full"].bytes_per_token == per_token and found["window"].nbytes == 9 * per_token


def test_a_readers_own_cache_needs_no_more_than_append():
    found = evaluate(MODEL, TEXTS[0], {"mine": lambda model, batch_size, max_length: Plain()}, 16)["mine"]
    assert_by_hand(found, TEXTS[:1], "full")
    assert found.nbytes is None and found.bytes_per_token is None and " - " in str(found)


def test_a_factory_is_told_the_sizes():
    asked = []

    def make(model, batch_size, max_length):
        asked.append((model, batch_size, max_length))
        return make_cache("full", model, batch_size, max_length)

    evaluate(MODEL, TEXTS, {"mine": make})
    assert asked == [(MODEL, 3, N)]


def test_the_reference_may_be_any_cache_and_may_be_shared():
    window = LOSSY["window"]
    found = evaluate(MODEL, TEXTS[0], {"full": "full", "window": window}, 16, reference=window)
    this, base = (dense_logits(MODEL, TEXTS[0], rule_of(*s))[:-1].log_softmax(-1) for s in (("full", {}), window))
    kl = F.kl_div(this, base, reduction="none", log_target=True).sum(-1)
    torch.testing.assert_close(found["full"].kl[0], kl, rtol=0, atol=1e-12)
    assert found["window"].kl.abs().max() == 0
    shared = reference(MODEL, TEXTS[0], window, 5)
    again = evaluate(MODEL, TEXTS[0], {"full": "full", "window": window}, 16, reference=shared)
    for name in found:
        torch.testing.assert_close(again[name].kl, found[name].kl, rtol=0, atol=1e-12)
        assert again[name].nbytes == found[name].nbytes


def test_the_reference_is_run_once(monkeypatch):
    fed, run = [], MODEL.run

    def counted(ids, pos, cache):
        fed.append(ids.shape[1])
        return run(ids, pos, cache)

    monkeypatch.setattr(MODEL, "run", counted)
    shared = reference(MODEL, TEXTS[0], chunk=16)
    assert sum(fed) == N
    evaluate(MODEL, TEXTS[0], {"full": "full", "growing": "growing"}, 16, reference=shared)
    assert sum(fed) == 2 * N, "a candidate made as the reference was is not run again; any other is, once"
    assert max(fed) == 16
    evaluate(MODEL, TEXTS[0], {"full": "full", "growing": "growing", "paged": "paged"}, 16)
    assert sum(fed) == 5 * N


def test_no_more_than_a_chunk_of_logits_is_held():
    model = toy(vocab_size=4000)
    text = ids_for(9, [96], 4000)[0]
    with memory() as used:
        evaluate(model, text, {"full": "full", "window": LOSSY["window"]}, chunk=4)
    all_logits = 96 * 4000 * 8
    assert all_logits / 24 < used.peak < all_logits / 5


# ---- bugs that these tests must notice


def off_by_one(scores):
    return lambda reference, hidden, tick: scores(replace(reference, ids=reference.ids.roll(-1, 1)), hidden, tick)


def kl_the_other_way_round(scores):
    def swapped(reference, hidden, tick):
        hidden = torch.cat(list(hidden), 1)
        nll, _, agree = scores(reference, [hidden], tick)
        return nll, scores(replace(reference, hidden=hidden), [reference.hidden], tick)[1], agree

    return swapped


def last_prediction_lost(scores):
    return lambda *args: tuple(x[:, :-1] for x in scores(*args))


@pytest.mark.parametrize("bug", [off_by_one, kl_the_other_way_round, last_prediction_lost])
def test_planted_bugs_are_found(bug, monkeypatch):
    found = evaluate(MODEL, TEXTS[:1], {"window": LOSSY["window"]}, 16)["window"]
    assert_by_hand(found, TEXTS[:1], LOSSY["window"])
    monkeypatch.setattr(streamed, "_score", bug(streamed._score))
    found = evaluate(MODEL, TEXTS[:1], {"window": LOSSY["window"]}, 16)["window"]
    with pytest.raises(AssertionError):
        assert_by_hand(found, TEXTS[:1], LOSSY["window"])


def test_forgetting_between_chunks_is_found(monkeypatch):
    def forgetful(model, ids, cache, chunk):
        for part in ids.split(chunk, 1):
            yield model.norm(model.run(part, torch.arange(part.shape[1])[None], None))

    monkeypatch.setattr(streamed, "_stream", forgetful)
    found = evaluate(MODEL, TEXTS[:1], {"growing": "growing"}, 16)["growing"]
    with pytest.raises(AssertionError):
        assert_by_hand(found, TEXTS[:1], "full")


# ---- Quality


def made(nll, first=1, name="made") -> Quality:
    nll = torch.tensor(nll, dtype=torch.float64)
    return Quality(name, nll, nll / 10, nll < 2, 800, {"keys": 800}, 800, nll.shape[1] + first, 4, first)


def test_after_keeps_predictions_of_tokens_from_there_on():
    q = made([[0.0, 1, 2, 3], [4, 5, 6, 7]])  # of the tokens at 1, 2, 3, 4
    assert q.after(3).nll.tolist() == [[2, 3], [6, 7]] and q.after(3).first == 3
    assert q.after(3).agree.tolist() == [[False, False], [False, False]] and q.after(3).kl.shape == (2, 2)
    assert q.after(3).after(4).nll.tolist() == [[3], [7]] and q.after(3).after(2).nll.tolist() == [[2, 3], [6, 7]]
    assert q.after(0).nll.tolist() == q.after(1).nll.tolist() == q.nll.tolist()
    assert q.after(3).perplexity == pytest.approx(math.exp(4.5))
    assert q.after(3).bytes_per_token == q.bytes_per_token == 80
    with pytest.raises(ValueError, match=r"after\(5\): the text has 5 tokens"):
        q.after(5)
    with pytest.raises(ValueError, match="n=-1"):
        q.after(-1)


def test_after_the_first_window_a_window_has_lost_something():
    found = evaluate(MODEL, TEXTS[0], {"full": "full", "window": LOSSY["window"]})
    late, early = found["window"].after(9), found["window"].nll[:, :8]
    torch.testing.assert_close(early, found["full"].nll[:, :8], rtol=0, atol=1e-12)
    assert late.nll.shape[1] + early.shape[1] == N - 1
    assert (late.kl[:, 1:] > 0).all() and late.kl[0, 0] < 1e-12  # the query at 8, of token 9, still sees everything


def test_over_text_averages_runs_of_predictions():
    q = made([[0.0, 2, 4, 6, 1]])
    middles, values = q.over_text(2)
    assert middles == [2, 4, 5] and values == pytest.approx([math.e, math.e**5, math.e])
    assert q.over_text(2, "kl")[1] == pytest.approx([0.1, 0.5, 0.1]) and q.over_text(2, "top1")[1] == [0.5, 0, 1]
    assert q.after(3).over_text(2)[0] == [4, 5]
    with pytest.raises(ValueError, match="of='nll'"):
        q.over_text(2, "nll")


def test_the_spread_is_that_of_the_text_and_the_seed():
    rng = torch.Generator().manual_seed(0)
    noise = (3 + torch.randn(4, 800, generator=rng, dtype=torch.float64)).tolist()
    q = made(noise)
    s = q.spread()
    assert s == q.spread() and s != q.spread(seed=1)
    assert s.low < s.value < s.high and s.value == pytest.approx(q.perplexity)
    # independent tokens: the interval of a mean of 3200 with deviation 1
    assert math.log(s.high / s.low) == pytest.approx(2 * 1.96 / math.sqrt(3200), rel=0.15)
    # equal blocks: as if there were 64 times fewer
    blocks = [[x for x in row[:50] for _ in range(32)] for row in noise]
    b = made(blocks).spread(block=32)
    assert math.log(b.high / b.low) == pytest.approx(2 * 1.96 / math.sqrt(200), rel=0.2)
    assert made([[2.0] * 100]).spread().low == pytest.approx(math.exp(2))


def test_versus_cancels_what_is_hard_for_both():
    rng = torch.Generator().manual_seed(0)
    base = 3 + torch.randn(1, 600, generator=rng, dtype=torch.float64)
    worse = made((base + 0.01).tolist(), name="worse").versus(made(base.tolist()))
    assert worse.low == pytest.approx(math.exp(0.01)) == worse.high == worse.value
    with pytest.raises(ValueError, match="from position 1 on.*from 5 on"):
        made([[1.0] * 9]).versus(made([[1.0] * 9]).after(5))


@pytest.mark.parametrize("bad", [{"block": 0}, {"resamples": 1}])
def test_a_bootstrap_of_nothing_is_refused(bad):
    with pytest.raises(ValueError, match=f"{next(iter(bad))}={next(iter(bad.values()))}"):
        bootstrap(torch.ones(1, 9), **bad)


def test_the_table_is_tidy():
    caches = {"full": "full", "int4 of some length": LOSSY["int4"], 9: ("sliding", {"window": 9})}
    lines = table(evaluate(MODEL, TEXTS[0], caches)).split("\n")
    assert len(lines) == 5 and len({len(line) for line in lines}) == 1
    assert "perplexity" in lines[0] and lines[2].startswith("full ") and "100.0%" in lines[2]


# ---- bad input of evaluate


def used(model, batch_size, max_length):
    cache = make_cache("full", model, batch_size, max_length)
    with torch.no_grad():
        model(torch.tensor([[1, 2]] * batch_size), cache)
    return cache


ONE = make_cache("full", MODEL, 1, N)
BAD = {
    "str": ({"ids": "text"}, TypeError, "encode"),
    "empty": ({"ids": []}, ValueError, "0 tokens"),
    "empty row": ({"ids": [[]]}, ValueError, "0 tokens"),
    "one token": ({"ids": [3]}, ValueError, "1 tokens; there must be at least 2"),
    "ragged": ({"ids": [[1, 2, 3], [1, 2]]}, ValueError, "2, 3 tokens"),
    "words": ({"ids": ["a", "b"]}, TypeError, "encode"),
    "floats": ({"ids": [0.5, 1.5]}, ValueError, "integer"),
    "three dimensions": ({"ids": torch.zeros(1, 2, 3, dtype=torch.long)}, ValueError, "integer tensor"),
    "outside the vocabulary": ({"ids": [1, 50]}, ValueError, "token id 50"),
    "too long": ({"ids": [1] * 4097}, ValueError, "4097 tokens; the model was made for 4096"),
    "chunk 0": ({"chunk": 0}, ValueError, "chunk=0"),
    "chunk 1.5": ({"chunk": 1.5}, TypeError, "chunk=1.5"),
    "no caches": ({"caches": {}}, ValueError, "caches is empty"),
    "a list": ({"caches": ["full"]}, TypeError, "dict"),
    "unknown kind": ({"caches": {"x": "fulll"}}, ValueError, "x: cache kind 'fulll' is not known"),
    "unknown option": ({"caches": {"x": ("full", {"window": 3})}}, ValueError, "no option 'window'"),
    "no dict": ({"caches": {"x": ("sliding", 64)}}, TypeError, "kind and a dict"),
    "a number": ({"caches": {"x": 3}}, TypeError, "x is an int"),
    "a cache": ({"caches": {"x": ONE}}, TypeError, "x is a FullCache"),
    "no cache made": ({"caches": {"x": lambda *a: None}}, TypeError, "x: "),
    "wrong batch": ({"caches": {"x": lambda m, b, n: make_cache("full", m, 2, n)}}, ValueError, "x.* 2 rows.* has 1"),
    "window larger than the text": (
        {"caches": {"w": ("sliding", {"window": 96, "sinks": 4})}}, ValueError, "w: .*before 100 tokens.*text has",
    ),
    "budget larger than the text": (
        {"caches": {"h": ("heavy_hitter", {"budget": 99})}}, ValueError, "h: .*nothing before 99 tokens.*keep fewer",
    ),
    "used": ({"caches": {"x": used}}, ValueError, "x.*holds 2 tokens already"),
    "too short": ({"caches": {"x": lambda m, b, n: make_cache("full", m, b, 9)}}, CacheFull, "max_length"),
    "twice the same": ({"caches": {"x": lambda *a: ONE, "y": lambda *a: ONE}}, ValueError, "y: .*same cache as x"),
    "reference kind": ({"reference": "fulll"}, ValueError, "reference: cache kind 'fulll'"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_before_anything_runs(name, monkeypatch):
    options, error, words = BAD[name]
    if name != "used":
        monkeypatch.setattr(MODEL, "run", None)
    with pytest.raises(error, match=words):
        evaluate(MODEL, **{"ids": TEXTS[0], "caches": {"full": "full"}, **options})


def test_a_reference_of_another_text_or_model_is_refused():
    other = reference(MODEL, TEXTS[1])
    with pytest.raises(ValueError, match="another model or text"):
        evaluate(MODEL, TEXTS[0], {"full": "full"}, reference=other)
    with pytest.raises(ValueError, match="another model or text"):
        evaluate(toy(seed=1), TEXTS[1], {"full": "full"}, reference=other)


# ---- recall

CHARS = toy(seed=3, vocab_size=128)
FACT, QUESTION = "The {place} has {number}. ", "\nThe {place} has"
SHORT = {"fact": FACT, "question": QUESTION, "filler": "abc def, ghi jkl. ", "seeds": range(4), "lead": 11}


class Letters:
    """A tokenizer whose tokens are single characters."""

    def encode(self, text, add_special_tokens=True):
        return [ord(c) for c in text]


def texts(distances, **changes):
    o = {**SHORT, **changes}
    return facts.Texts(CHARS, Letters(), distances, *(o[n] for n in ("seeds", "lead", "fact", "question", "filler")))


def read(row) -> str:
    return "".join(map(chr, row.tolist()))


@pytest.mark.parametrize("distance", [30, 31, 64, 200])
def test_the_distance_is_exact_for_each_digit(distance):
    t = texts([distance])
    for row in t.row(distance):
        text = read(row)
        number = text[-4:]
        assert number.isdecimal() and text.count(number) == 2 and text.index(number) == t.key
        for digit in range(4):
            key, query = text.index(number) + digit, len(text) - 4 + digit - 1
            assert query - key == distance
    assert len({read(row) for row in t.row(distance)}) == 4 and len({read(row)[-4:] for row in t.row(distance)}) == 4


def test_shorter_distances_begin_as_longer_ones():
    t = texts([40, 90])
    assert torch.equal(t.row(40)[:, : t.cut(40)], t.row(90)[:, : t.cut(40)])


@pytest.mark.parametrize("chunk", [1, 16, 500])
@pytest.mark.parametrize("spec", ["full", "growing", "paged", ("sliding", {"window": 20}),
                                  ("sliding", {"window": 40, "sinks": 4})], ids=str)  # fmt: skip
def test_recall_is_that_of_one_dense_pass(spec, chunk):
    distances = [40, 33, 90]
    found = recall(CHARS, Letters(), spec, distances, chunk=chunk, **SHORT)
    assert found.distances == (33, 40, 90) and found.logprob.shape == found.exact.shape == (3, 4)
    t, kind = texts(distances), (spec, {}) if isinstance(spec, str) else spec
    for i, distance in enumerate(found.distances):
        assert found.fact_end[i] == distance - len("4827. ") + 1
        for b, row in enumerate(t.row(distance).tolist()):
            logits = dense_logits(CHARS, row[:-1], rule_of(*kind))[-4:]
            right = logits.log_softmax(-1)[range(4), row[-4:]]
            assert found.logprob[i, b] == pytest.approx(right.mean().item(), abs=1e-12)
            assert found.exact[i, b] == (logits.argmax(-1).tolist() == row[-4:])
    assert found.probability == pytest.approx(found.logprob.exp().mean(1).tolist())


def test_what_the_model_is_fed(monkeypatch):
    """A spy on the ids: the text is read once, and each question starts where its distance says."""
    fed, forward = [], CHARS.forward

    def spied(ids, cache=None, pos=None, logits_to_keep=0):
        fed.append((cache.lengths[0], read(ids[0])))
        return forward(ids, cache, pos, logits_to_keep)

    monkeypatch.setattr(CHARS, "forward", spied)
    recall(CHARS, Letters(), "full", [50, 90], chunk=500, **SHORT)
    t = texts([50, 90])
    Q, rows = t.question.shape[1], {d: read(t.row(d)[0]) for d in (50, 90)}
    want = []
    for distance, start in ((50, 0), (90, t.cut(50))):
        row, cut = rows[distance], t.cut(distance)
        want += [(start, row[start:cut]), (cut, row[cut : cut + Q])]
        want += [(cut + Q + i, row[cut + Q + i]) for i in range(3)]
    assert fed == want


@pytest.mark.parametrize("distance", [39, 40])
def test_a_window_sees_the_fact_just_if_the_distance_is_below_it(distance):
    """One layer, window 40: another digit in the fact changes its query's logits at distance 39, not at 40."""
    one, rule = toy(seed=3, vocab_size=128, num_hidden_layers=1), rule_of("sliding", {"window": 40})
    t = texts([distance])
    row = t.row(distance)[0].tolist()
    for digit in range(4):
        other = list(row)
        other[t.key + digit] = ord("x")
        this, that = (dense_logits(one, ids[:-1], rule)[digit - 4] for ids in (row, other))
        assert torch.equal(this, that) == (distance == 40)


def test_seeds_are_rows_that_do_not_depend_on_each_other():
    window = ("sliding", {"window": 40, "sinks": 4})
    together = recall(CHARS, Letters(), window, [60, 80], **SHORT)
    again = recall(CHARS, Letters(), window, [60, 80], **SHORT)
    assert torch.equal(together.logprob, again.logprob)
    for seed in range(4):
        alone = recall(CHARS, Letters(), window, [60, 80], **{**SHORT, "seeds": [seed]})
        torch.testing.assert_close(alone.logprob[:, 0], together.logprob[:, seed], rtol=0, atol=1e-12)


def test_a_cache_that_cannot_fork_reads_the_text_anew():
    mine = recall(CHARS, Letters(), lambda *a: Plain(), [40, 60, 90], **SHORT)
    full = recall(CHARS, Letters(), "full", [40, 60, 90], **SHORT)
    torch.testing.assert_close(mine.logprob, full.logprob, rtol=0, atol=1e-12)


def test_a_dict_of_caches_gives_a_dict():
    windows = {w: ("sliding", {"window": w}) for w in (20, 200)}
    found = recall(CHARS, Letters(), windows, 60, **SHORT)
    assert list(found) == [20, 200] and found[20].name == 20
    full = recall(CHARS, Letters(), "full", 60, **SHORT)
    torch.testing.assert_close(found[200].logprob, full.logprob, rtol=0, atol=1e-12)


class Sure:
    """A model that always says what a text says next, but for some digits."""

    config, device = CHARS.config, torch.device("cpu")

    def __init__(self, rows, wrong=()):
        self.rows, self.wrong = rows, wrong

    def __call__(self, ids, cache, logits_to_keep=0):
        pos = cache.next_positions(ids.shape[1])
        k = torch.zeros(len(ids), 1, ids.shape[1], 2)
        cache.append(0, k, k, pos)
        cache.advance(pos)
        says = self.rows[:, cache.lengths[0]].clone()
        for row, digit in self.wrong:
            if cache.lengths[0] == self.rows.shape[1] - 4 + digit:
                says[row] = 0
        return torch.full((len(ids), 1, 128), -1.0).scatter(2, says[:, None, None], 9.0)


def test_exact_means_every_digit():
    rows = texts([60]).row(60)
    found = recall(Sure(rows), Letters(), "full", 60, **SHORT)
    assert found.share == [1.0] and found.share_spread[0].low == pytest.approx(0.51, abs=0.01)
    for digit in range(4):
        found = recall(Sure(rows, [(2, digit)]), Letters(), "full", 60, **SHORT)
        assert found.exact.tolist() == [[True, True, False, True]] and found.share == [0.75]
    assert "75%" in str(found) and found.share_spread[0].high < 1
    low, high = found.probability_spread[0].low, found.probability_spread[0].high
    assert low <= found.probability[0] <= high


BAD_RECALL = {
    "negative": ({"distances": [-1]}, ValueError, "distance=-1"),
    "too short": ({"distances": [90, 10]}, ValueError, "distance 10 is too short: fact and question alone take 2"),
    "too long": ({"distances": 4090}, ValueError, "distance 4090 and lead 11 make .*; the model takes 4096"),
    "no distances": ({"distances": []}, ValueError, "distances is empty"),
    "half": ({"distances": [60.5]}, TypeError, "60.5"),
    "no seeds": ({"seeds": []}, ValueError, "seeds is empty"),
    "a number of seeds": ({"seeds": 8}, TypeError, r"seeds=8.*range\(8\)"),
    "lead": ({"lead": -2}, ValueError, "lead=-2"),
    "chunk": ({"chunk": 0}, ValueError, "chunk=0"),
    "filler": ({"filler": ""}, ValueError, "filler=''"),
    "fact": ({"fact": "The {place}."}, ValueError, "number"),
    "question": ({"question": "And {place} is {number}?"}, ValueError, "question="),
    "kind": ({"cache": "fulll"}, ValueError, "fulll: cache kind 'fulll'"),
    "wrong batch": ({"cache": lambda m, b, n: make_cache("full", m, 1, n)}, ValueError, "1 rows, the text has 4"),
    "used": ({"cache": used}, ValueError, "holds 2 tokens already"),
}


@pytest.mark.parametrize("name", BAD_RECALL)
def test_recall_refuses_bad_input(name):
    options, error, words = BAD_RECALL[name]
    with pytest.raises(error, match=words):
        recall(CHARS, Letters(), **{"cache": "full", "distances": [60], **SHORT, **options})
