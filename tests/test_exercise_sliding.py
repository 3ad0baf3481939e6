"""The exercises of notebook 04: wrong answers that readers give, and the sentence that each gets."""

import numpy as np
import pytest
import torch

import kvlab
from kvlab.exercise_sliding import largest_cap, smallest_window
from kvlab.reach import farthest, heard, toy


@pytest.mark.parametrize("texts, prompt, spare", [(1, 5, 0), (3, 2, 7), (2, 9, 1)])
def test_the_cap_is_what_fits_a_real_cache(texts, prompt, spare):
    model = toy(2)
    one = model.config.kv_bytes_per_token(8)
    free = texts * (prompt + 6) * one + spare
    (cap,) = largest_cap(free, texts, prompt, one)
    sizes = []
    for new in (cap, cap + 1):
        cache = kvlab.make_cache("growing", model, texts)
        kvlab.generate(model, [[1] * prompt] * texts, new, cache)
        sizes.append(sum(cache.nbytes_by()[part] for part in ("keys", "values")))
    assert sizes[0] <= free < sizes[1]
    assert largest_cap(one, 1, 50, one) == (0,)


def test_the_window_is_the_smallest_that_is_heard():
    assert smallest_window(30, 1000) == 35
    ids = torch.arange(14)[None]
    for layers, distance in ((1, 4), (2, 5), (3, 9)):
        window, model = smallest_window(layers, distance), toy(layers)
        for w, loud in ((window, True), (window - 1, False)):
            changes = heard(model, ids, 0, 63, lambda w=w, m=model: kvlab.make_cache("sliding", m, window=w))
            assert (farthest(changes)[-1] >= distance) == loud


@pytest.mark.parametrize(
    "wrong, words",
    [
        (lambda f, b, p, t: f // (b * t) - p, "never fed back"),
        (lambda f, b, p, t: max(0, f // (b * t) - p), "never fed back"),
        (lambda f, b, p, t: f // (b * t) - p + 1, "no tokens are 0 tokens"),
        (lambda f, b, p, t: f // (b * t), "prompt is kept too"),
        (lambda f, b, p, t: f // t - p + 1, "shared by all texts"),
        (lambda f, b, p, t: f // t - b * p + 1, "each gets its part"),
        (lambda f, b, p, t: -(-f // (b * t)) - p + 1, "ound down"),
        (lambda f, b, p, t: f / (b * t) - p + 1, "counted were"),
        (lambda f, b, p, t: None, "returns no number yet"),
        (lambda f: f, "raised TypeError"),
        (7, "the function"),
    ],
)
def test_the_cap(wrong, words):
    verdict = kvlab.check_answer("04.1", wrong)
    assert not verdict.ok and words in repr(verdict)


def ring(rule):
    class MyRing:
        window, sinks = 6, 2

        def __init__(self):
            self.held = {}

        def slot(self, p):
            return rule(p, self.window, self.sinks)

        def append(self, layer, k, v, pos):
            (rows, heads, _, dim), slots = k.shape, self.window + self.sinks
            if layer not in self.held:
                room = k.new_zeros(2, rows, heads, slots, dim)
                self.held[layer] = room[0], room[1], torch.full((rows, slots), -1)
            K, V, P = self.held[layer]
            seen = torch.cat((K, k), 2), torch.cat((V, v), 2), torch.cat((P, pos), 1)
            for row, t in (pos >= 0).nonzero().tolist():
                s = self.slot(int(pos[row, t]))
                K[row, :, s], V[row, :, s], P[row, s] = k[row, :, t], v[row, :, t], pos[row, t]
            return kvlab.View(*seen, self.window, self.sinks)

    return MyRing


@pytest.mark.parametrize(
    "rule", [lambda p, w, s: p if p < s else s + (p - s) % w, lambda p, w, s: p if p < s else s + p % w]
)
def test_right_rings(rule):
    verdict = kvlab.check_answer("04.2", ring(rule))
    assert verdict.ok and "never held" not in repr(verdict)


def test_a_ring_of_one_slot_less_is_right_and_hears_of_it():
    """The view holds the old slots and the new key: W - 1 slots are enough."""
    verdict = kvlab.check_answer("04.2", ring(lambda p, w, s: p if p < s else s + (p - s) % (w - 1)))
    assert verdict.ok and "Slot 7 never held a token" in repr(verdict)


def test_an_int_of_numpy_is_an_int():
    assert kvlab.check_answer("04.2", ring(lambda p, w, s: np.int64(p if p < s else s + (p - s) % w))).ok


@pytest.mark.parametrize(
    "rule, words",
    [
        (lambda p, w, s: p % w, "slot(6) is 0, where token 0 lies: a sink"),
        (lambda p, w, s: p % (w + s), "slot(8) is 0, where token 0 lies: a sink"),
        (lambda p, w, s: s + (p - s) % w, "slot(6) is 6, where token 0 lies: a sink"),
        (lambda p, w, s: p if p < s else (p - s) % w, "a sink, which stays"),
        (lambda p, w, s: p, "slot(8) is 8; there are 8 slots, 0 to 7"),
        (lambda p, w, s: min(p, w + s - 1), "Tokens are missing"),
        (lambda p, w, s: p / 2, "a slot is an int"),
        (lambda p, w, s: 1 // p, "raised ZeroDivisionError"),
    ],
)
def test_wrong_rings(rule, words):
    verdict = kvlab.check_answer("04.2", ring(rule))
    assert not verdict.ok and words in repr(verdict), verdict


def test_a_blank_ring_gets_guidance():
    verdict = kvlab.check_answer("04.2", ring(lambda p, w, s: ...))
    assert not verdict.answered and "slot(0) returns no slot yet" in repr(verdict)
    assert "without brackets" in repr(kvlab.check_answer("04.2", ring(lambda p, w, s: p)()))


@pytest.mark.parametrize(
    "given, words",
    [(34, "own key"), (33.333333333333336, "whole number"), (34.333333333333336, "round up"), (33, "round up"),
     (1001, "one layer"), (1000, "30 of them"),
     (29970, "other way round"), (20, "too small"), (100, "too large")],
)  # fmt: skip
def test_the_window(given, words):
    verdict = kvlab.check_answer("04.3", given)
    assert not verdict.ok and words in repr(verdict)
    assert kvlab.check_answer("04.3", 35).ok
