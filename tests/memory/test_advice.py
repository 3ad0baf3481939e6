"""advise(): the cause, steps that really save what they say, and a plan that really fits."""

import pytest

from kvlab.memory import advise, estimate, max_batch, max_seq_len

CASES = [
    ("llama-2-7b", "t4", 4, 2048, "cache"),
    ("llama-2-7b", "a100-80gb", 4, 2048, "fits"),
    ("llama-2-70b", "a100-80gb", 1, 1024, "weights"),
    ("llama-2-13b", "t4", 16, 4096, "both"),
    ("qwen2.5-7b", "l4", 8, 32768, "cache"),
    ("llama-3.1-8b", "rtx-4090", 8, 16384, "cache"),
]


@pytest.mark.parametrize(("model", "card", "batch", "tokens", "cause"), CASES)
def test_cause_and_steps(model, card, batch, tokens, cause):
    found = advise(model, card, batch, tokens)
    assert found.cause == cause
    assert f"{found.estimate.weights_bytes / 2**30:.2f} GiB" in found.diagnosis
    for step in found.steps:
        assert step.saves_bytes > 0 and step.price and step.how
        assert step.saves_bytes + step.total_bytes == found.estimate.total_bytes
        assert step.fits == (step.total_bytes <= found.memory_bytes)
    assert found.max_batch == max_batch(model, card, tokens)
    assert found.max_seq_len == max_seq_len(model, card, batch)


def test_each_step_weighs_what_estimate_weighs():
    found = advise("llama-2-7b", "t4", 4, 2048)
    by_name = {step.name: step.total_bytes for step in found.steps}
    again = {
        "fp8 cache": {"kv_dtype": "fp8"},
        "q8_0 cache": {"kv_dtype": "q8_0"},
        "int4/64 cache": {"kv_dtype": "int4/64"},
        "int8 weights": {"weights_dtype": "int8"},
        "int4 weights": {"weights_dtype": "int4"},
        "2 GPUs": {"tensor_parallel": 2},
        "window 1024 + 4 sinks": {"seq_len": 1028},
        "batch of 1": {"batch_size": 1},
    }
    for name, change in again.items():
        options = {"batch_size": 4, "seq_len": 2048, **change}
        assert by_name[name] == estimate("llama-2-7b", **options).total_bytes, name


def test_the_order_follows_the_cause():
    names = [step.name for step in advise("llama-2-7b", "t4", 4, 2048).steps]
    assert names.index("fp8 cache") < names.index("int8 weights")
    names = [step.name for step in advise("llama-2-70b", "a100-80gb", 1, 1024).steps]
    assert names.index("int8 weights") < names.index("fp8 cache")


def test_the_plan_fits_as_a_whole():
    changes = {
        "paging": {"layout": "paged"},
        "fp8 cache": {"kv_dtype": "fp8"},
        "int4/64 cache": {"kv_dtype": "int4/64"},
        "int8 weights": {"weights_dtype": "int8"},
        "int4 weights": {"weights_dtype": "int4"},
    }
    found = advise("llama-2-13b", "t4", 4, 4096)
    assert found.plan and not any(step.fits for step in found.steps if step.name in changes)
    together = {k: v for name in found.plan for k, v in changes[name].items()}
    assert estimate("llama-2-13b", 4, 4096, **together).total_bytes <= found.memory_bytes
    assert advise("llama-2-7b", "h100", 1, 1024).plan == ()


def test_a_ragged_batch_is_told_to_page():
    found = advise("llama-2-7b", "rtx-4090", seq_len=[500, 600, 700, 20000])
    paging = next(step for step in found.steps if step.name == "paging")
    assert paging.saves_bytes > 10 * 2**30 and found.steps[0] is paging
    assert "paging" not in [s.name for s in advise("llama-2-7b", "t4", seq_len=[5, 9], layout="paged").steps]


def test_no_step_that_does_nothing():
    """A model of states alone gains nothing from a smaller cache, and one with 9 heads cannot be halved."""
    assert not any("cache" in step.name or "window" in step.name for step in advise("mamba-2.8b", "t4", 9, 4096).steps)
    assert not any("GPUs" in step.name for step in advise("smollm2-135m", 2**30, 1, 40000).steps)
    assert "more than the 4096 positions" in advise("llama-2-7b", "a100", 1, 8192).diagnosis
