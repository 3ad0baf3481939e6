"""The exercises of notebook 03: wrong answers that readers give, and the sentence that each gets."""

import pytest
import torch

import kvlab
from kvlab.exercise_watch import MIB, one_tensor, tooth


def test_the_answers_follow_kvlab():
    assert tooth() == 64 * MIB
    assert one_tensor(MIB + 1) == (MIB + 512, 20 * MIB)


@pytest.mark.parametrize(
    "given, words", [(2048, "the whole cache"), (32, "both"), (128, "fp32"), (0.5, "for good"), (64 * MIB, "bytes")]
)
def test_the_tooth(given, words):
    verdict = kvlab.check_answer("03.1", given)
    assert not verdict.ok and words in repr(verdict)


@pytest.mark.parametrize(
    "wrong, words",
    [
        (lambda n: (n, n), "512 bytes are the least"),
        (lambda n: (-(-n // 512) * 512, -(-n // 512) * 512), "whole segments"),
        (lambda n: (-(-n // 512) * 512, 2 * MIB), "up to 1 MiB alone"),
        (lambda n: one_tensor(n)[::-1], "swapped"),
        (lambda n: n, "must return allocated and reserved"),
        (lambda n: (..., ...), "returns no number yet"),
    ],
)
def test_one_tensor(wrong, words):
    verdict = kvlab.check_answer("03.2", wrong)
    assert not verdict.ok and words in repr(verdict)


@pytest.mark.parametrize(
    "wrong, words",
    [
        (lambda k, n: k[:, :, k.shape[2] - n :], "keep a storage of 960 alive"),
        (lambda k, n: k[:, :, k.shape[2] - n :].detach(), "A view"),
        (lambda k, n: k[:, :, -n:].clone(), "-0 is 0"),
        (lambda k, n: k[:, :, :n].clone(), "the first tokens"),
        (lambda k, n: k[:, -n:].clone(), "has shape"),
        (lambda k, n: (k[:, :, 10 - n :] + 1).clone(), "other numbers"),
        (lambda k, n: k[:, :, 10 - n :].tolist(), "a list"),
        (lambda k: k, "raised TypeError"),
        (torch.ones(2), "the function"),
    ],
)
def test_last_tokens(wrong, words):
    verdict = kvlab.check_answer("03.3", wrong)
    assert not verdict.ok and words in repr(verdict)


def test_a_blank_last_tokens_gets_guidance():
    assert not kvlab.check_answer("03.3", lambda k, n: ...).answered
