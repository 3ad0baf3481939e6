"""check_answer and hint: right answers pass, known mistakes are explained, blanks are guided, nothing raises."""

import math

import numpy as np
import pytest
import torch

import kvlab
from kvlab.exercise_kinds import CacheClass, Function, Number
from kvlab.exercise_list import EXERCISES, count_rows, llama_3b, llama_7b, smollm2

NUMBERS = [id for id, e in EXERCISES.items() if isinstance(e, Number)]


class Grows:
    """A right cache with nothing but append."""

    def __init__(self):
        self.k, self.v, self.pos = {}, {}, {}

    def append(self, layer, k, v, pos):
        if layer in self.k:
            k, v = torch.cat((self.k[layer], k), 2), torch.cat((self.v[layer], v), 2)
            pos = torch.cat((self.pos[layer], pos), 1)
        self.k[layer], self.v[layer], self.pos[layer] = k, v, pos
        return kvlab.View(k, v, pos)


def rows(prompt, new):
    return sum(prompt + i for i in range(new)), prompt + new - 1


def one_tensor(nbytes):
    a = -(-nbytes // 512) * 512
    return a, 2 * 2**20 if a <= 2**20 else 20 * 2**20 if a < 10 * 2**20 else -(-a // 2**21) * 2**21


class Ring(Grows):
    """A right sliding cache: two sinks and the last six tokens."""

    window, sinks = 6, 2

    def slot(self, p):
        return p if p < 2 else 2 + (p - 2) % 6

    def append(self, layer, k, v, pos):
        if layer not in self.k:
            self.k[layer], self.v[layer] = k.new_zeros(2, len(k), k.shape[1], 8, k.shape[3])
            self.pos[layer] = pos.new_full((len(pos), 8), -1)
        held = self.k[layer], self.v[layer], self.pos[layer]
        view = [torch.cat(pair, dim) for pair, dim in zip(zip(held, (k, v, pos)), (2, 2, 1))]
        for row, t in (pos >= 0).nonzero().tolist():
            at = self.slot(int(pos[row, t]))
            held[0][row, :, at], held[1][row, :, at], held[2][row, at] = k[row, :, t], v[row, :, t], pos[row, t]
        return kvlab.View(*view, self.window, self.sinks)


def round_per_channel(k, bits, group):
    x = k.unflatten(1, (-1, group))
    low, high = x.amin(2, keepdim=True), x.amax(2, keepdim=True)
    scale = ((high - low) / (2**bits - 1)).clamp(min=1e-8)
    return (low + scale * ((x - low) / scale).round()).flatten(1, 2)


RIGHT = {
    "00.1": 2 * 28 * 8 * 128 * 2,
    "00.2": 4096,  # 2 GiB / 512 KiB
    "01.1": rows,
    "01.2": Grows,
    "01.3": 3072,  # 2 * 576 * (2*576 + 2*192 + 3*1536) / (4 * 576)
    "02.1": lambda layers, hidden, heads, kv, dim: 2 * layers * kv * (dim or hidden // heads) * 2,
    "02.2": 61 * (512 + 64) * 2,
    "02.3": lambda kv, tp: 80 * 2 * max(1, kv // tp) * 128 * 2,
    "03.1": 64,  # MiB: a layer's 4,096 keys and values of 32 heads of 128, in fp16
    "03.2": one_tensor,
    "03.3": lambda k, n: k[:, :, k.shape[2] - n :].clone(),
    "05.1": 2**18 // 2 + 2**18 // 64 * 4,  # 2**18 numbers: half a byte each, and 4 bytes for each 64
    "05.2": lambda codes: codes[..., ::2] + 16 * codes[..., 1::2],
    "05.3": round_per_channel,
    "02.4": lambda s, full, sliding, window: s * full + min(s, window) * sliding,
    "04.1": lambda free, texts, prompt, each: max(0, free // (texts * each) - (prompt - 1)),
    "04.2": Ring,
    "06.1": 15534,  # 2**30 bytes, 60 * 576 * 2 a token
    "06.2": lambda s, p, newest, safe: min((s[i], p[i], i) for i in range(len(p)) if newest - p[i] >= safe)[2],
    "06.3": lambda owners, heads, dim, size: sum(i == o for i, o in enumerate(owners)) * heads * 2 * dim * size,
    "07.1": 181,  # block 11, place 5
    "07.2": lambda tokens, new, size: math.ceil((tokens + new) / size) - math.ceil(tokens / size),
    "07.3": lambda prompt, common, size: min(common // size, (prompt - 1) // size) * size,
    "04.3": 35,  # 30 * 34 = 1,020 is the first to pass 1,000
}


def test_every_exercise_has_a_right_answer_here_and_hints():
    assert set(RIGHT) == set(EXERCISES)
    for id, exercise in EXERCISES.items():
        assert len(exercise.hints) >= 2, id


@pytest.mark.parametrize("id", RIGHT)
def test_a_right_answer_is_right(id):
    verdict = kvlab.check_answer(id, RIGHT[id])
    assert verdict.ok and verdict and verdict.raise_if_wrong() is verdict
    assert repr(verdict).startswith(f"{id}: right.")


@pytest.mark.parametrize("id", RIGHT)
@pytest.mark.parametrize("blank", [..., None])
def test_a_blank_gets_guidance(id, blank):
    verdict = kvlab.check_answer(id, blank)
    assert not verdict.ok and not verdict.answered
    assert f"kvlab.hint('{id}')" in repr(verdict) and "to do" in repr(verdict)
    with pytest.raises(AssertionError, match="to do"):
        verdict.raise_if_wrong()


def test_a_blank_function_and_a_blank_class_get_guidance():
    class Empty(Grows):
        def append(self, layer, k, v, pos):
            return ...

    for id, given in (("01.1", lambda p, n: (..., ...)), ("01.1", lambda p, n: None), ("01.2", Empty)):
        verdict = kvlab.check_answer(id, given)
        assert not verdict.ok and not verdict.answered, verdict
        assert f"kvlab.hint('{id}')" in repr(verdict)


@pytest.mark.parametrize("id", NUMBERS)
@pytest.mark.parametrize(
    "given, words",
    [("12", "quotes"), (True, "a bool"), ([12], "a list"), (max, "call it first"), ({}, "a dict"), (math.nan, "nan"),
     (torch.ones(2), "a Tensor"), (-1, "greater than 0"), (0, "greater than 0"), (math.inf, "too large"),
     (10**400, "too large")],
)  # fmt: skip
def test_a_wrong_type_or_an_impossible_number_is_named(id, given, words):
    verdict = kvlab.check_answer(id, given)
    assert not verdict.ok and verdict.answered
    assert words in repr(verdict)


@pytest.mark.parametrize("id", NUMBERS)
def test_numbers_of_numpy_and_torch_count(id):
    for kind in (int, float, np.int64, np.float64, lambda x: np.array(x), lambda x: torch.tensor(float(x))):
        assert kvlab.check_answer(id, kind(RIGHT[id])).ok


@pytest.mark.parametrize("id", NUMBERS)
def test_every_known_mistake_of_a_number_is_explained_and_none_is_right(id):
    exercise = EXERCISES[id]
    mistakes = exercise.mistakes()
    assert len(mistakes) >= 4
    for value, sentence in mistakes:
        assert abs(value - RIGHT[id]) > exercise.tolerance, sentence
        verdict = kvlab.check_answer(id, value)
        assert not verdict.ok
        assert any(other in repr(verdict) for v, other in mistakes if v == value), (value, verdict)
    some = kvlab.check_answer(id, 1.0001 * RIGHT[id] + 5)
    assert not some.ok and "too large." in repr(some)
    assert "too small" in repr(kvlab.check_answer(id, 0.99 * RIGHT[id] - 5))


def test_the_named_mistakes_of_the_memory_formula():
    c = llama_3b()
    right = c.kv_bytes_per_token(2)
    assert right == RIGHT["00.1"]
    for wrong, words in (
        (right // 2, "a factor 2 is missing"),
        (right * 3, "query heads"),  # 24 query heads share 8 KV heads
        (right // 28, "one layer"),
        (right * 2, "fp32"),
        (right * 8, "bits"),
    ):
        assert words in repr(kvlab.check_answer("00.1", wrong)), wrong
    assert "2^30" in repr(kvlab.check_answer("00.2", 2 * 10**9 // 524288))


def test_the_answers_follow_kvlab_and_not_a_table():
    assert llama_7b().kv_bytes_per_token(2) == 524288
    assert EXERCISES["00.2"].answer() == 2 * 2**30 // llama_7b().kv_bytes_per_token(2)
    c = smollm2()
    matrices = sum(
        p.numel() for name, p in kvlab.GPT(c.with_(num_hidden_layers=1, layer_types=None)).named_parameters()
        if "proj" in name
    )  # fmt: skip
    assert EXERCISES["01.3"].answer() == 2 * matrices // (4 * c.num_attention_heads * c.head_dim)


def test_rows_are_counted_on_a_model():
    assert count_rows(4, 3) == (4 + 5 + 6, 4 + 1 + 1)
    assert count_rows(1, 1) == (1, 1)


@pytest.mark.parametrize(
    "wrong, words",
    [
        (lambda p, n: (p + n - 1, rows(p, n)[0]), "swapped"),
        (lambda p, n: (rows(p, n)[0] + n, p + n), "Off by one"),
        (lambda p, n: (rows(p, n)[0], p + n), "Rows with a cache: off by one"),
        (lambda p, n: (rows(p, n)[0] + n, p + n - 1), "Rows without a cache: off by one"),
        (lambda p, n: (rows(p, n)[0], n), "forward passes"),
        (lambda p, n: (n * p, p + n - 1), "the text grows"),
        (lambda p, n: (p + n - 1, p + n - 1), "every pass computes the whole text"),
        (lambda p, n: (rows(p, n)[0], 1000), "gives 1,000 for rows with a cache; counted were 1"),
        (lambda p, n: p, "must return"),
        (lambda p, n: ("a", "b"), "must return"),
        (lambda p: p, "raised TypeError"),
        (lambda p, n: 1 / 0, "raised ZeroDivisionError"),
        (17, "the function"),
    ],
)
def test_wrong_functions_are_explained(wrong, words):
    verdict = kvlab.check_answer("01.1", wrong)
    assert not verdict.ok
    assert words in repr(verdict)


@pytest.mark.parametrize(
    "id, wrong, words",
    [
        ("02.1", lambda n, h, q, kv, d: 2 * n * h * 2, "hidden size"),
        ("02.1", lambda n, h, q, kv, d: 2 * n * h, "two things are wrong"),
        ("02.1", lambda n, h, q, kv, d: 2 * n * kv * (h // q) * 2, "guess for head_dim"),
        ("02.1", lambda n, h, q, kv, d: 2 * n * q * (d or h // q) * 2, "query heads"),
        ("02.1", lambda n, h, q, kv, d: n * kv * (d or h // q) * 2, "a factor 2"),
        ("02.1", lambda n, h, q, kv, d: 2 * n * kv * d * 2, "raised TypeError"),  # d is None for most files
        ("02.2", 2 * 70272, "stored once"),
        ("02.2", 62464, "rotary part"),
        ("02.2", 1748992, "ordinary attention"),
        ("02.2", 4997120, "MLA switched off"),
        ("02.3", lambda kv, tp: 40960 * kv // tp, "part of a head"),
        ("02.3", lambda kv, tp: 40960 * kv, "nothing is divided"),
        ("02.3", lambda kv, tp: 40960 * kv / tp, "part of a head"),
        ("02.4", lambda s, f, w, n: s * (f + w), "window is ignored"),
        ("02.4", lambda s, f, w, n: s * f, "left out"),
        ("02.4", lambda s, f, w, n: s * f + n * w, "shorter than the window"),
        ("02.4", lambda s, f, w, n: min(s, n) * (f + w), "all layers"),
    ],
)
def test_the_bugs_of_calculators_are_explained(id, wrong, words):
    verdict = kvlab.check_answer(id, wrong)
    assert not verdict.ok and words.lower() in repr(verdict).lower(), verdict


def test_no_known_mistake_of_a_function_is_right():
    for id, exercise in EXERCISES.items():
        if isinstance(exercise, Function):
            right = [exercise.answer(*case) for case in exercise.cases]
            for wrong, sentence in exercise.mistakes + exercise.confusions:
                assert [wrong(*case) for case in exercise.cases] != right, (id, sentence)


def test_a_wrong_cache_is_explained():
    class Forgets(Grows):
        def append(self, layer, k, v, pos):
            return kvlab.View(k, v, pos)

    class Breaks(Grows):
        def append(self, layer, k, v, pos):
            raise KeyError("planted")

    assert isinstance(EXERCISES["01.2"], CacheClass)
    for given, words in (
        (Forgets, "Earlier tokens are missing"),
        (Breaks, "planted"),
        (Grows(), "the class itself"),
        (lambda: 3, "the class itself"),
        (dict, "raised AttributeError"),
    ):
        verdict = kvlab.check_answer("01.2", given)
        assert not verdict.ok and words in repr(verdict), verdict


@pytest.mark.parametrize("id", RIGHT)
def test_hints_come_one_at_a_time_and_then_end(id):
    hints = EXERCISES[id].hints
    first = kvlab.hint(id, restart=True)
    assert repr(first) == str(first) == f"{id}, hint 1 of {len(hints)}: {hints[0]}"
    for text in hints[1:]:
        assert text in kvlab.hint(id)
    for _ in range(2):
        assert "no more hints" in kvlab.hint(id)
    assert kvlab.hint(id, restart=True) == first


def test_an_unknown_exercise_names_those_that_exist():
    for call in (lambda: kvlab.check_answer("07.9", 1), lambda: kvlab.hint("07.9")):
        with pytest.raises(ValueError, match=r"no exercise '07.9'; there are 00.1, 00.2, 01.1"):
            call()
    with pytest.raises(ValueError, match=r"no exercise \[\]"):
        kvlab.hint([])
