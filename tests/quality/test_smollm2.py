"""What the notebooks claim of SmolLM2 on real text, measured once: 1,536 tokens of Python's help, in chunks of 64.

Quantized caches here keep no full-precision tail but the group that is being filled (residual_length=0), so that each
query reads codes. Groups are of 64 tokens or, per token, of 64 channels, which is one scale a head.
"""

import pytest

from kvlab import evaluate, recall
from kvlab.pretrained import sample_text
from kvlab.quality import table

TOKENS, CHUNK, WINDOW = 1536, 64, 64


def quantized(bits, key_axis="token"):
    options = {"k_bits": bits, "v_bits": bits, "key_axis": key_axis, "group_size": 64, "residual_length": 0}
    return "quantized", options


def window(sinks):
    return "sliding", {"window": WINDOW - sinks, "sinks": sinks}  # equal bytes, whatever the sinks


CACHES = {
    "full": "full",
    "int8 channel": quantized(8, "channel"),
    "int8 token": quantized(8),
    "fp8": quantized("fp8"),
    "int4 channel": quantized(4, "channel"),
    "int4 token": quantized(4),
    "int2 channel": quantized(2, "channel"),
    "int2 token": quantized(2),
    **{f"window {WINDOW - sinks} + {sinks}": window(sinks) for sinks in (0, 4, 8, 16)},
}


@pytest.fixture(scope="module")
def found(smollm2):
    model, tokenizer = smollm2
    results = evaluate(model, tokenizer.encode(sample_text())[:TOKENS], CACHES, CHUNK)
    print("\n" + table(results))
    print(f"\nof the tokens after the first window alone:\n{table(late(results))}\n")
    return results


def late(results):
    return {name: results[name].after(WINDOW) for name in results if name == "full" or name.startswith("window")}


def test_the_reference_is_a_working_model(found, smollm2):
    full = found["full"]
    assert 5 < full.perplexity < 20 and full.nll.shape == (1, TOKENS - 1)
    assert full.nbytes == TOKENS * smollm2[0].config.kv_bytes_per_token(itemsize=4)


@pytest.mark.parametrize("axis", ["channel", "token"])
def test_int8_costs_less_than_half_a_percent(found, axis):
    ratio = found[f"int8 {axis}"].versus(found["full"])
    assert abs(ratio.value - 1) < 0.005, ratio
    assert found[f"int8 {axis}"].top1 > 0.98


def test_int4_keys_want_a_scale_per_channel(found):
    """KIVI (arXiv 2402.02750): the same bytes, clearly better, by more than the text's own scatter."""
    token, channel, full = found["int4 token"], found["int4 channel"], found["full"]
    assert token.nbytes == channel.nbytes
    assert token.versus(channel).low > 1.005, token.versus(channel)
    assert channel.perplexity - full.perplexity < (token.perplexity - full.perplexity) / 2
    assert channel.mean_kl < token.mean_kl / 2


def test_int2_is_unusable_per_token_and_far_better_per_channel(found):
    token, channel, full = found["int2 token"], found["int2 channel"], found["full"]
    assert token.perplexity > 5 * full.perplexity and token.top1 < 0.5
    assert channel.perplexity < token.perplexity / 3 and channel.perplexity < 2.5 * full.perplexity


def test_fp8_lies_between_int8_and_int4(found):
    assert found["int8 token"].perplexity < found["fp8"].perplexity < found["int4 token"].perplexity
    assert found["int8 token"].mean_kl < found["fp8"].mean_kl < found["int4 token"].mean_kl
    assert found["int4 token"].versus(found["fp8"]).low > 1


def test_kl_orders_the_codes_by_what_they_keep(found):
    """KL to the full cache sees what perplexity, which one lucky token can move, only hints at."""
    order = ["full", "int8 token", "fp8", "int4 channel", "int4 token", "int2 channel", "int2 token"]
    kl, top1 = [found[n].mean_kl for n in order], [found[n].top1 for n in order]
    assert kl == sorted(kl) and top1 == sorted(top1, reverse=True), list(zip(order, kl, top1))
    assert found["int8 channel"].mean_kl < found["fp8"].mean_kl
    assert found["window 60 + 4"].mean_kl < found["window 64 + 0"].mean_kl / 2


def test_bytes_fall_with_the_bits(found):
    order = ["full", "int8 token", "int4 token", "int2 token"]
    sizes = [found[name].nbytes for name in order]
    assert sizes == sorted(sizes, reverse=True)
    assert len({found[f"window {64 - s} + {s}"].nbytes for s in (0, 4, 8, 16)}) == 1
    assert found["fp8"].nbytes_by["scales"] == 0 < found["int8 token"].nbytes_by["scales"]


def test_four_sinks_halve_the_perplexity_of_a_window(found):
    """StreamingLLM (arXiv 2309.17453), at equal bytes, over the tokens after the first window."""
    after = late(found)
    ratio = after["window 64 + 0"].versus(after["window 60 + 4"])
    assert ratio.value >= 2, ratio
    assert ratio.low > 1.5, ratio


@pytest.mark.parametrize("sinks", [8, 16])
def test_more_sinks_add_little(found, sinks):
    after = late(found)
    ratio = after[f"window {64 - sinks} + {sinks}"].versus(after["window 60 + 4"])
    assert 0.95 < ratio.value < 1.1, ratio


def test_within_its_first_window_a_window_loses_nothing(found):
    """The query at position 63 still sees all 64 tokens: up to the token at 64 all predictions are the full cache's."""
    assert found["window 64 + 0"].kl[0, :64].max() < 1e-5 < found["window 64 + 0"].kl[0, 64:].median()


def test_a_fact_is_recalled_as_far_as_the_window_reaches(smollm2):
    near, far = WINDOW - 8, 400
    caches = {"full": "full", "window": ("sliding", {"window": WINDOW - 4, "sinks": 4})}
    found = recall(*smollm2, caches, [near, WINDOW, far], seeds=range(4), lead=16)
    print("", *found.values(), sep="\n")
    assert found["full"].share == [1, 1, 1] and min(found["full"].probability) > 0.8
    assert found["window"].share == [1, 0, 0] and max(found["window"].probability[1:]) < 0.3
