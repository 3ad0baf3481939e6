"""Eviction in detail: which tokens are kept, in how many bytes, what is refused; and planted bugs that must fail."""

import pytest
import test_operations
import test_rollback
import torch
from cases import generate_case
from eviction_oracle import evicting_logits, eviction_rule
from oracles import Rule, assert_equals_oracle, assert_logits, call, dense_logits, feed, ids_for, in_chunks, toy

import kvlab.model
from kvlab.caches import CacheFull, FirstLastCache, HeavyHitterCache, RandomEvictionCache, RewindError, make_cache
from kvlab.caches.budgeted import EvictingCache
from kvlab.caches.head_slots import HeadSlots

MODEL = toy(seed=7)
FOLLOWED = toy(seed=7, num_hidden_layers=4, kv_owner=(0, 0, 2, 2))
NARROW = toy(seed=7, sliding_window=1)  # every key is seen once, by its own query: all scores are equal
TABLE = [[4, 6], [5, 3]]
LENGTHS = [17, 11]
KINDS = ("heavy_hitter", "random", "first_last")


def hold(kind="heavy_hitter", model=MODEL, **options) -> None:
    """A ragged text in four chunkings and three paddings against the dense reference."""
    rows = ids_for(1, LENGTHS)
    for chunk, padding in ((17, "left"), (7, "scattered"), (3, "right"), (1, "left")):
        cache = make_cache(kind, model, 2, 20, **options)
        rule = eviction_rule(kind, options)
        assert_equals_oracle(model, cache, rows, in_chunks(LENGTHS, chunk), rule, padding)


def kept_by(cache) -> dict[tuple[int, int], list[int]]:
    """(layer, head) -> positions that row 0 holds."""
    found = {}
    for layer, slots in cache.slots.items():
        for head, pos in enumerate(slots.by_head(cache.pos[layer], slots.most, nothing=-1)[0].tolist()):
            found[layer, head] = sorted(p for p in pos if p >= 0)
    return found


def hold_kept(kind="heavy_hitter", model=MODEL, **options) -> None:
    """Token by token the same tokens are kept as in the reference, the newest among them."""
    text, history = ids_for(2, [20])[0], []
    evicting_logits(model, text, eviction_rule(kind, options), history)
    cache = make_cache(kind, model, 1, 30, **options)
    for p, token in enumerate(text):
        call(model, cache, [[token]], [p])
        assert kept_by(cache) == history[p], f"after token {p}"
        assert all(tokens[-1] == p for tokens in kept_by(cache).values()), "the newest token is always kept"


def roll_back(kind: str) -> None:
    test_rollback.test_as_before_the_call((kind, {"budget": 6}), 11, 1)


def rewind() -> None:
    for n in (5, 7):
        test_operations.test_rewind_then_other_tokens(("random", {"budget": 5, "recent": 1}), n)
        test_operations.test_rewind_then_other_tokens(("heavy_hitter", {"budget": 5}), n)


CHECKS = {
    "heavy": lambda: hold(budget=6),
    "heavy, few safe": lambda: hold(budget=6, recent=1),
    "grace": lambda: hold(budget=6, recent=0, grace=3),
    "table": lambda: hold(budget=TABLE, recent=0.3),
    "followed": lambda: hold(model=FOLLOWED, budget=6),
    "ties": lambda: hold_kept(model=NARROW, budget=6, recent=1),
    "kept": lambda: hold_kept(budget=TABLE),
    "random": lambda: hold("random", budget=TABLE, seed=5),
    "first and last": lambda: hold("first_last", budget=TABLE, first=2),
    "rollback": lambda: roll_back("heavy_hitter"),
    "rollback, then rewind": lambda: roll_back("random"),
    "rewind": rewind,
}


@pytest.mark.parametrize("check", CHECKS)
def test_the_rule_is_kept(check):
    CHECKS[check]()


# ---- planted bugs: each must fail one of those checks


def newest_goes(self, layer, pos, may_go):
    return pos.masked_fill(pos > 10**6, -1).argmax(-1)


def not_accumulated(self, step, finish=HeavyHitterCache._finish):
    for score in self.score.values():
        score.zero_()
    finish(self, step)


def padding_counted(self, layer, weights):
    drawn = weights.to(self.score[layer].dtype).sum(2)
    self.drawn[layer] = self.drawn.get(layer, 0) + drawn


def last_layer_counts(self, layer, weights, observe=HeavyHitterCache.observe):
    self.drawn.pop(layer, None)
    observe(self, layer, weights)


def score_is_inherited(self, step):
    for layer, drawn in self.drawn.items():
        self.slots[layer].add(self.score[layer], drawn)
    EvictingCache._finish(self, step)


def renumbered(self, layer, k, v, step, write=EvictingCache._write):
    """Positions closed up, as if what is left had always been the text."""
    view = write(self, layer, k, v, step)
    if self.evicts:
        view.pos = view.pos - (view.pos.amax(-1, keepdim=True) + 1 - (view.pos >= 0).sum(-1, keepdim=True))
        view.pos, view.all_visible = view.pos.clamp(min=-1), False
    return view


def one_head_of_the_group(q, view, mask=None, want_weights=False, attend=kvlab.model.attend):
    if not want_weights:
        return attend(q, view, mask)
    n_kv = view.k.shape[1]
    y, _ = attend(q, view, mask, True)
    _, weights = attend(q[:, :: q.shape[1] // n_kv], view, mask, True)
    return y, weights


def newest_of_equals(self, layer, pos, may_go):
    score = self.slots[layer].by_head(self.score[layer], pos.shape[2]).masked_fill(~may_go, float("inf"))
    lowest = may_go & (score <= score.amin(-1, keepdim=True))
    return pos.masked_fill(~lowest, -1).argmax(-1)


def neighbours_slots(self, S, places=HeadSlots.places):
    at, real = places(self, S)
    return (at - self.start[:, None]).clamp(max=self.total - 1), real


def draw_of_the_step(self, layer, head, p, budget, draw=RandomEvictionCache._draw):
    return draw(self, layer, 0, p, budget)


BUGS = {
    "the newest goes": ("heavy", (HeavyHitterCache, "_victim", newest_goes)),
    "the newest goes, by the tokens kept": ("kept", (HeavyHitterCache, "_victim", newest_goes)),
    "grace is ignored": ("grace", (EvictingCache, "safe_of", lambda self, budget: max(1, int(self.recent * budget)))),
    "one token fewer is safe": ("heavy", (EvictingCache, "safe_of", lambda self, budget: budget // 2 - 1)),
    "scores are not accumulated": ("heavy, few safe", (HeavyHitterCache, "_finish", not_accumulated)),
    "padding's weights count": ("heavy, few safe", (HeavyHitterCache, "observe", padding_counted)),
    "a follower's weights replace its owner's": ("followed", (HeavyHitterCache, "observe", last_layer_counts)),
    "a new token inherits its slot's score": ("heavy, few safe", (HeavyHitterCache, "_finish", score_is_inherited)),
    "positions are renumbered": ("heavy", (EvictingCache, "_write", renumbered)),
    "the group is not summed": ("heavy, few safe", (kvlab.model, "attend", one_head_of_the_group)),
    "of equal scores the newest goes": ("ties", (HeavyHitterCache, "_victim", newest_of_equals)),
    "a head reads another's slots": ("table", (HeadSlots, "places", neighbours_slots)),
    "all heads draw alike": ("random", (RandomEvictionCache, "_draw", draw_of_the_step)),
    "the first tokens are not kept": ("first and last", (FirstLastCache, "_victim", lambda s, i, p, may: p.argmin(-1))),
    "a failed step stays": ("rollback", (EvictingCache, "_undo", lambda self, step: self._finish(step))),
    "a failed step's victim is lost": (
        "rollback, then rewind",
        (EvictingCache, "_undo", lambda self, step: self._forget()),
    ),
    "rewind goes too far": ("rewind", (EvictingCache, "_largest_rewind", lambda self, row: self.lengths[row])),
    "rewind forgets no score": ("rewind", (HeavyHitterCache, "_largest_rewind", EvictingCache._largest_rewind)),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_fails_the_check(bug, monkeypatch):
    check, patch = BUGS[bug]
    monkeypatch.setattr(*patch)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        CHECKS[check]()


# ---- what the rules have in common with others


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("budget", [17, 99, [[17, 18], [17, 400]]], ids=str)
def test_within_the_budget_it_is_no_cache_at_all(kind, budget):
    cache = make_cache(kind, MODEL, 2, 17, budget=budget)
    for b, got in enumerate(feed(MODEL, cache, ids_for(1, LENGTHS), [[9, 4], [8, 7]])):
        assert_logits(got, dense_logits(MODEL, ids_for(1, LENGTHS)[b]))


@pytest.mark.parametrize("kind", ["heavy_hitter", "random"])
@pytest.mark.parametrize("recent", [1.0, 6])
def test_a_budget_of_recent_tokens_is_a_window(kind, recent):
    cache = make_cache(kind, MODEL, 2, 20, budget=6, recent=recent)
    assert_equals_oracle(MODEL, cache, ids_for(1, LENGTHS), in_chunks(LENGTHS, 5), Rule(window=6))


def test_first_and_last_is_a_window_with_sinks():
    rows = ids_for(1, LENGTHS)
    one = feed(MODEL, make_cache("first_last", MODEL, 2, 20, budget=7, first=3), rows, in_chunks(LENGTHS, 5))
    other = feed(MODEL, make_cache("sliding", MODEL, 2, 20, window=4, sinks=3), rows, in_chunks(LENGTHS, 5))
    for a, b in zip(one, other):
        assert_logits(a, b)


@pytest.mark.parametrize("kind", KINDS)
def test_a_table_of_one_number_is_that_number(kind):
    rows = ids_for(1, LENGTHS)
    for table in ([[6, 6], [6, 6]], torch.full((2, 2), 6)):
        one = feed(MODEL, make_cache(kind, MODEL, 2, 20, budget=table), rows, in_chunks(LENGTHS, 5))
        other = feed(MODEL, make_cache(kind, MODEL, 2, 20, budget=6), rows, in_chunks(LENGTHS, 5))
        assert all(torch.equal(a, b) for a, b in zip(one, other))


def test_heads_keep_different_tokens():
    cache = make_cache("heavy_hitter", MODEL, 1, 20, budget=6)
    feed(MODEL, cache, [ids_for(1, [17])[0]], [[17]])
    assert len({tuple(tokens) for tokens in kept_by(cache).values()}) > 1


def test_a_seed_repeats_itself_and_another_does_not():
    def kept(seed):
        cache = make_cache("random", MODEL, 1, 40, budget=8, recent=2, seed=seed)
        feed(MODEL, cache, ids_for(1, [40]), [[40]])
        return kept_by(cache)

    assert kept(0) == kept(0) != kept(1)


def test_every_token_that_may_go_is_as_likely_to():
    """2,000 draws among five tokens: each 400 times, give or take four standard deviations (72)."""
    cache = make_cache("random", MODEL, 1, 40, budget=8, recent=4)
    draws = [cache._draw(layer, head, p, 8) for layer in range(2) for head in range(10) for p in range(100)]
    counts = [draws.count(rank) for rank in range(5)]
    assert sum(counts) == 2000 and all(abs(n - 400) < 72 for n in counts), counts


def test_in_float32_the_same_tokens_are_kept_wherever_scores_are_not_close():
    """A near tie may fall the other way, and then the text goes on differently. In most cases there is none."""
    same = 0
    for seed in range(0, 80, 5):
        case = generate_case("heavy_hitter", seed)
        model, rows, kept = case.make_model(torch.float32), ids_for(seed, case.lengths), []
        exact = case.make_model()
        for one in (model, exact):
            cache = case.make_cache(one, 1)
            (logits,) = feed(one, cache, rows[:1], [[len(rows[0])]])
            kept.append((kept_by(cache), logits))
        if kept[0][0] == kept[1][0]:
            same += 1
            assert_logits(kept[0][1], dense_logits(model, rows[0], eviction_rule(case.kind, dict(case.options))), 1e-5)
    assert same >= 14, f"only {same} of 16 texts kept the same tokens"


# ---- bytes


def test_bytes_are_the_sum_of_the_budgets_and_do_not_grow():
    one = 2 * 8 * 8  # a head's key and value of 8 float64
    for kind in KINDS:
        cache = make_cache(kind, MODEL, 2, 99, budget=TABLE, **({"first": 1} if kind == "first_last" else {}))
        sizes = set()
        for p in range(30):
            call(MODEL, cache, [[p], [p + 1]], [p, p])
            sizes.add(cache.nbytes)
        slots = 2 * sum(map(sum, TABLE))
        assert sizes == {slots * (one + 4 + (8 if kind == "heavy_hitter" else 0))}
        assert cache.nbytes_in_use == slots * one


def test_equal_budgets_are_read_where_they_lie():
    cache = make_cache("heavy_hitter", MODEL, 1, 99, budget=6)
    feed(MODEL, cache, ids_for(1, [17]), [[17]])
    assert cache.bytes_copied == 0
    view = cache.append(0, *torch.zeros(2, 1, 2, 1, 8, dtype=torch.float64), torch.tensor([[17]]))
    assert view.k.untyped_storage().data_ptr() == cache.k[0].untyped_storage().data_ptr()
    assert view.all_visible and view.pos.shape == (1, 2, 6)


def test_no_more_slots_than_the_text_can_fill():
    cache = make_cache("heavy_hitter", MODEL, 1, 12, budget=10**9)
    feed(MODEL, cache, ids_for(1, [12]), [[12]])
    assert cache.nbytes == 12 * 4 * (2 * 8 * 8 + 4 + 8) and cache.bounded
    with pytest.raises(CacheFull, match="room for max_length=12"):
        call(MODEL, cache, [[1]], [12])
    assert cache.lengths == [12]


@pytest.mark.parametrize("kind", KINDS)
def test_text_without_end(kind):
    """Past max_length too: the budget alone says how many bytes there are."""
    cache = make_cache(kind, MODEL, 1, 8, budget=6)
    assert not cache.bounded
    text = ids_for(3, [40])[0]
    (got,) = feed(MODEL, cache, [text], [[20], [20]])
    assert_logits(got, dense_logits(MODEL, text, eviction_rule(kind, {"budget": 6})))


# ---- refusals


@pytest.mark.parametrize(
    "kind,options,message",
    [
        ("heavy_hitter", {"budget": 0}, "budget=0 must be at least 1"),
        ("heavy_hitter", {"budget": 0.2}, "budget=0.2 must be an int"),
        ("heavy_hitter", {"budget": True}, "budget=True must be an int"),
        ("heavy_hitter", {"budget": None}, "budget=None must be an int"),
        ("heavy_hitter", {"budget": [4, 5]}, r"budget=\[4, 5\] must be an int, or a table"),
        ("heavy_hitter", {"budget": [[4, 5], [6]]}, "must be an int, or a table with as many ints"),
        ("heavy_hitter", {"budget": []}, r"budget=\[\] must be an int, or a table"),
        ("heavy_hitter", {"budget": [[4, 5], [0, 6]]}, r"budget\[1\]\[0\]=0 must be at least 1"),
        ("heavy_hitter", {"budget": torch.ones(2, 2)}, r"budget\[0\]\[0\]=1.0 must be an int"),
        ("heavy_hitter", {"budget": [[4, 5]]}, "for 1 layers of 2 heads; the model has 2 layers of 2 KV heads"),
        ("random", {"budget": [[4]] * 2}, "for 2 layers of 1 heads; the model has 2 layers of 2 KV heads"),
        ("heavy_hitter", {"budget": 8, "recent": 9}, "recent=9 tokens are more than a budget of 8: at most 8"),
        ("heavy_hitter", {"recent": 1.5}, "recent=1.5 must be a share of the budget from 0.0 to 1.0"),
        ("heavy_hitter", {"recent": -1}, "recent=-1 must be at least 0"),
        ("heavy_hitter", {"recent": "half"}, "recent='half' must be an int"),
        ("heavy_hitter", {"budget": 8, "grace": 8}, "grace=8 keeps 9 tokens safe, more than a budget of 8"),
        ("random", {"budget": [[9, 9], [9, 4]], "grace": 4}, "more than a budget of 4 tokens holds"),
        ("heavy_hitter", {"grace": 0.5}, "grace=0.5 must be an int"),
        ("random", {"seed": -1}, "seed=-1 must be at least 0"),
        ("first_last", {"budget": 4, "first": 4}, "first=4 leaves no room for the newest token in a budget of 4"),
        ("first_last", {"first": 0.5}, "first=0.5 must be an int"),
        ("first_last", {"recent": 3}, "a first_last cache has no option 'recent'; it has budget, first"),
    ],
    ids=str,
)
def test_options_that_make_no_sense(kind, options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        make_cache(kind, MODEL, 1, 20, **options)


def test_a_table_for_another_model_is_refused_at_the_first_append():
    zeros = torch.zeros(1, 3, 1, 8)
    cache = HeavyHitterCache(budget=TABLE)
    with pytest.raises(ValueError, match="a table for 2 layers of 2 heads; layer 0 has 3 KV heads"):
        cache.append(0, zeros, zeros, torch.tensor([[0]]))
    with pytest.raises(ValueError, match="a table for 2 layers of 2 heads; layer 2 has 2 KV heads"):
        cache.append(2, zeros[:, :2], zeros[:, :2], torch.tensor([[0]]))
    assert cache.lengths == [0] and not cache.k


def test_a_chunk_that_would_have_to_evict_inside_itself_is_refused():
    """The model asks max_chunk; who appends by hand may not have."""
    cache = make_cache("heavy_hitter", MODEL, 1, 20, budget=6)
    zeros = torch.zeros(1, 2, 7, 8, dtype=torch.float64)
    assert cache.max_chunk(7) == 6
    with pytest.raises(ValueError, match="7 columns at once: past 6 tokens it is one at a time"):
        cache.append(0, zeros, zeros, torch.arange(7)[None])
    text = ids_for(4, [9])[0]
    assert_logits(
        feed(MODEL, cache, [text], [[9]])[0], dense_logits(MODEL, text, eviction_rule("heavy_hitter", {"budget": 6}))
    )


def test_what_was_evicted_does_not_come_back():
    for kind, largest in (("random", 1), ("first_last", 1), ("heavy_hitter", 0)):
        cache = make_cache(kind, MODEL, 1, 20, budget=6)
        feed(MODEL, cache, ids_for(4, [9]), [[9]])
        with pytest.raises(RewindError, match=f"can forget at most {largest} of them, not 3") as error:
            cache.rewind(3)
        assert error.value.largest == largest
        cache.rewind(largest)
        assert cache._largest_rewind(0) == 0  # twice is once too often
