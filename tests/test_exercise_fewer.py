"""The exercises of notebook 06: wrong answers that readers give, and the sentence that each gets."""

import pytest
import torch

import kvlab
from kvlab.exercise_fewer import VICTIM_MISTAKES, difference_in_a_cache, latent_tokens, shared_bytes, victim_cases
from kvlab.exercise_fewer import which_goes as right
from kvlab.plots.sharing import latent_config


def test_the_latents_tokens_are_the_configs():
    one = latent_config("deepseek-v2").kv_bytes_per_token(2)
    assert one == 69120 and latent_tokens() == 2**30 // one


@pytest.mark.parametrize(
    "given, words",
    [
        (2**30 // 138240, "stands for key and value both"),
        (2**31 // 69120, "2 bytes"),
        (2**30 // 61440, "turned key is missing"),
        (2**30 // (60 * 1088 * 2), "kept once"),
        (2**30 // (69120 * 128), "share one latent"),
        (2**30 // (60 * 128 * 320 * 2), "written out"),
        (69120, "one token takes"),
        (15535, "round down"),
        (15000, "too small"),
    ],
)
def test_tokens_of_a_latent(given, words):
    verdict = kvlab.check_answer("06.1", given)
    assert not verdict.ok and words in repr(verdict)


@pytest.mark.parametrize("wrong, words", [(f, sentence[5:40]) for f, sentence in VICTIM_MISTAKES])
def test_known_mistakes_of_the_rule_are_named(wrong, words):
    verdict = kvlab.check_answer("06.2", wrong)
    assert not verdict.ok and words in repr(verdict)


@pytest.mark.parametrize(
    "wrong, words",
    [
        (lambda s, p, n, safe: 0, "it must be"),
        (lambda s, p, n, safe: True, "an int"),
        (lambda s, p, n, safe: torch.tensor(0), "an int"),
        (lambda s: 0, "raised TypeError"),
        (3, "the function"),
    ],
)
def test_other_mistakes_of_the_rule(wrong, words):
    verdict = kvlab.check_answer("06.2", wrong)
    assert not verdict.ok and words in repr(verdict), verdict


def test_a_rule_that_remembers_is_found_in_the_cache():
    calls = []

    def tired(scores, positions, newest, safe):
        calls.append(1)
        return (
            right(scores, positions, newest, safe)
            if len(calls) <= len(victim_cases())
            else positions.index(min(positions))
        )

    verdict = kvlab.check_answer("06.2", tired)
    assert not verdict.ok and "in a cache" in repr(verdict)
    assert difference_in_a_cache(right) == 0


def test_a_right_rule_passes_and_a_blank_one_gets_guidance():
    assert kvlab.check_answer("06.2", right).ok
    assert not kvlab.check_answer("06.2", lambda *a: ...).answered


@pytest.mark.parametrize(
    "wrong, words",
    [
        (lambda o, h, d, i: len(o) * h * 2 * d * i, "counts every layer"),
        (lambda o, h, d, i: len(set(o)) * h * d * i, "factor 2"),
        (lambda o, h, d, i: len(set(o)) * 2 * d * i, "very KV head"),
        (lambda o, h, d, i: len(set(o)) * h * 2 * d, "itemsize"),
        (lambda o, h, d, i: (len(o) - len(set(o))) * h * 2 * d * i, "what is saved"),
        (lambda o, h, d, i: (max(o) + 1) * h * 2 * d * i, "layers between"),
        (lambda o, h, d, i: 7, "counted were"),
        (lambda o, h, d, i: None, "returns no number yet"),
    ],
)
def test_shared_bytes(wrong, words):
    verdict = kvlab.check_answer("06.3", wrong)
    assert not verdict.ok and words in repr(verdict)


@pytest.mark.parametrize("owners", [(0, 0, 2, 2), (0, 1, 1, 1), (0, 1, 2, 3)])
def test_shared_bytes_are_what_a_cache_weighs(owners):
    config = kvlab.ModelConfig(
        hidden_size=32, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, kv_owner=owners, vocab_size=9
    )
    model = kvlab.GPT(config)
    cache = kvlab.make_cache("full", model, 1, 5)
    model(torch.ones(1, 5, dtype=torch.int64), cache)
    assert cache.nbytes == 5 * shared_bytes(owners, 2, 8, 4)[0]
