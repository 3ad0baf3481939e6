"""44 published configurations, each to the byte, from their fields alone."""

import pytest

from kvlab.memory import architecture, estimate

from .facts import lines, question

CASES = lines("model_configs.jsonl")


def test_all_cases_are_here():
    assert len(CASES) == 44 and all(c["source"] and c["sure"] for c in CASES)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c["model"].split("/")[-1])
def test_bytes(case):
    config = question(case)["config"]
    for tokens in (8192, 32768):
        found = estimate(config, batch_size=1, seq_len=tokens, kv_dtype="fp16")
        assert found.kv_cache_bytes + found.state_bytes == case[f"expected_bytes_at_{tokens}_tokens"]
    assert found.state_bytes == case["expected_state_bytes"]
    assert found.kv_bytes_per_token == case["expected_bytes_per_token"]
    assert found.warnings == () or all("weights unknown" in w for w in found.warnings)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c["model"].split("/")[-1])
def test_growth_past_all_windows(case):
    config, far = question(case)["config"], 10**6
    more = estimate(config, seq_len=far + 1).kv_cache_bytes - estimate(config, seq_len=far).kv_cache_bytes
    assert more == case["expected_bytes_per_token_past_windows"]


@pytest.mark.parametrize("case", CASES, ids=lambda c: c["model"].split("/")[-1])
def test_layers(case):
    kinds = architecture(question(case)["config"]).kinds
    expected = case["expected_layers"]
    if not any(expected.values()):  # an encoder: nothing is kept at all
        assert set(kinds) == {"none"}
        return
    assert kinds.get("full", 0) + kinds.get("latent", 0) == expected["full_layers"]
    assert kinds.get("sliding", 0) == expected["sliding_layers"]
    assert kinds.get("state", 0) == expected["state_layers"]
    assert kinds.get("none", 0) + kinds.get("shared", 0) == expected["no_cache_layers"]
