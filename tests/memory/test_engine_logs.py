"""48 lines that engines printed, each within its tolerance, predicted from the model's configuration alone."""

import pytest

from kvlab.memory import ConfigError, estimate, kv_tokens, number_format
from kvlab.memory.engines import concurrency, engine_name, hybrid_block_size, pool, predict, required_bytes, split_label
from kvlab.memory.logs import explain, parse_log

from .facts import lines, question

CASES = lines("engine_logs.jsonl")
SWAP = 4 * 2**30  # vLLM's default swap space, and VLLM_CPU_KVCACHE_SPACE's
BYTES = [c for c in CASES if c["kind"] != "ratio"]
POOLS = [c for c in CASES if c["kind"] == "cpu_swap_blocks"]


def by_id(cases):
    return pytest.mark.parametrize("case", cases, ids=lambda c: c["id"])


def test_all_cases_are_here_with_their_reasons():
    assert len(CASES) == 48
    assert all(c["tolerance"] > 0 and c["because"] and c["source"] for c in CASES)


@by_id(BYTES)
def test_bytes(case):
    asked = question(case)
    found = predict(asked["engine"], asked["model"], asked["tokens"], asked["kv_dtype"], asked["tp"])
    held = found.kv_bytes + found.state_bytes if asked["kind"] == "state" else found.kv_bytes
    assert held == pytest.approx(case["bytes_logged"], rel=case["tolerance"])
    assert held == case["expected_bytes"]


@by_id(POOLS)
def test_blocks_in_swap_space(case):
    asked = question(case)
    assert pool(SWAP, asked["model"], asked["kv_dtype"], asked["tp"]) == case["expected_cpu_blocks"]


@by_id([c for c in BYTES if c["kind"] in ("cpu_swap_blocks", "pool", "required", "max_len")])
def test_bytes_per_token_per_gpu(case):
    asked = question(case)
    one = predict(asked["engine"], asked["model"], 1, asked["kv_dtype"], asked["tp"])
    assert one.kv_bytes == case["expected_bytes_per_token_per_gpu"]


def test_nvfp4_against_fp8():
    case = next(c for c in CASES if c["id"] == "gemma3-27b-nvfp4-vs-fp8")
    asked = question(case)
    sizes = [estimate(asked["model"], seq_len=16, kv_dtype=f).kv_bytes_per_token for f in ("fp8", asked["kv_dtype"])]
    assert sizes[0] / sizes[1] == pytest.approx(asked["tokens_nvfp4"] / asked["tokens_fp8"], abs=case["tolerance"])
    assert sizes[0] / sizes[1] == pytest.approx(case["expected_ratio"], abs=1e-4)


def test_a_pool_sized_without_tensor_parallelism():
    case = next(c for c in CASES if c["id"] == "hf-cb-48566")
    asked = question(case)
    alone, shared = (
        predict(asked["engine"], asked["model"], asked["block_size"], asked["kv_dtype"], tp).kv_bytes
        for tp in (1, asked["tp"])
    )
    assert alone / shared == case["expected_ratio"]
    assert asked["blocks_after"] / asked["blocks_before"] == pytest.approx(alone / shared, rel=case["tolerance"])


@by_id([c for c in BYTES if c["kind"] in ("pool", "required", "llama_cpp") and "mla" not in c["model"].lower()])
def test_printed_lines_are_read_back(case):
    """From the line to the bytes, by logs.py alone."""
    if case["engine"] == "tensorrt-llm (pytorch backend)" or case["kind"] != "llama_cpp":
        values = explain(case["printed"]).values
        gib = values.get("kv_gib") or values.get("k_gib", 0) + values.get("v_gib", 0)
        if case["kind"] == "required":
            gib = values["needed_gib"]
        assert gib * 2**30 == pytest.approx(case["bytes_logged"], rel=1e-9)
    elif "K (" in case["printed"]:
        values = explain(case["printed"]).values
        assert (values["k_mib"] + values.get("v_mib", 0)) * 2**20 == pytest.approx(case["bytes_logged"], rel=1e-9)
        assert values["n_ctx"] == case["tokens"]


def test_windows_in_llama_cpp():
    """Gemma 3 4B at 8192 tokens: 5 full layers, 29 with 1024 + 512 cells; four sequences of window 1024: 4608 cells."""
    line = predict("llama.cpp", "gemma-3-4b", 8192, "f16").line
    assert "160.00 MiB (  8192 cells,   5 layers" in line and "174.00 MiB (  1536 cells,  29 layers" in line
    assert "(  4608 cells" in predict("llama.cpp", "gemma-3-4b", 8192, "f16", sequences=4).line
    laguna = next(c for c in CASES if c["id"] == "laguna-1m-q4")
    found = parse_log(predict("llama.cpp", "laguna", laguna["tokens"], "q4_0").line)
    sizes = [f.values["kv_mib"] * 2**20 for f in found if "kv_layers" in f.values]
    assert sizes == [laguna["full_bytes_logged"], laguna["swa_bytes_logged"]]


def test_states_beside_a_quantized_cache():
    """The 27B hybrid's recurrent states for four sequences: 576 + 22.5 MiB, whatever the cache's format."""
    for kv_dtype in ("f16", "q4_0"):
        assert predict("llama.cpp", "qwen3.6-27b", 4096, kv_dtype, sequences=4).state_bytes == 598.5 * 2**20


def test_multi_head_latent_attention():
    v3 = predict("ik_llama.cpp", "deepseek-v3", 2048, "f16").kv_bytes
    off = predict("ik_llama.cpp", "deepseek-v3", 2048, "f16", mla=False).kv_bytes
    assert (v3, off) == (137.25 * 2**20, 9760 * 2**20)  # ik_llama.cpp issue 285 prints both
    assert predict("vllm", "deepseek-r1", 1, "bf16", 8).kv_bytes == predict("vllm", "deepseek-r1", 1, "bf16").kv_bytes
    padded = next(c for c in CASES if "padded_bytes_per_token" in c)
    assert predict("vllm", padded["model"], 1, "bf16", padded_mla=True).kv_bytes == padded["padded_bytes_per_token"]
    assert number_format("fp8_ds_mla").row_bytes(576) == 656  # vLLM issue 48374


def test_the_other_figures_of_vllm():
    assert concurrency(30218, 16, 16384) == pytest.approx(29.51, abs=0.005)  # vLLM PR 12676
    assert 5970 * 16 == 95520  # vLLM issue 6124
    assert pool(4 * 2**30, "llama-3.1-8b", "bf16") * 16 == 32768
    assert required_bytes("llama-3.1-8b", 34048, "bf16") / 2**30 == pytest.approx(4.16, abs=0.005)
    assert kv_tokens("qwen3-4b", int(4.89 * 2**30)) // 16 * 16 == 35600  # vLLM issue 38516
    assert hybrid_block_size("qwen3-next") == 544


def test_lmdeploy_counts_mib():
    """A block of 64 tokens of Llama-2-7B is 32 MiB."""
    assert "block_size = 32 MB, max_block_count = 10" in predict("lmdeploy", "llama-2-7b", 640).line


@pytest.mark.parametrize("engine", ["vllm", "llama.cpp", "ik_llama.cpp", "sglang", "tensorrt-llm", "lmdeploy"])
def test_what_is_predicted_can_be_read(engine):
    assert explain(predict(engine, "qwen3-8b", 40960, "f16").line).engine in (engine, "llama.cpp")


def test_no_model_is_read_twice_for_a_log(monkeypatch):
    """A figure that no model has is compared with the whole catalog, in every format, on 1, 2, 4 and 8 GPUs."""
    from kvlab.memory import architecture, logs

    read = []
    monkeypatch.setattr(logs, "architecture", lambda config: read.append(1) or architecture(config))
    logs._catalog.cache_clear()
    for tokens in (99_999, 77_777):
        odd = explain(f"Available KV cache memory: 37.77 GiB\nGPU KV cache size: {tokens:,} tokens")
        assert "No model of the catalog" in odd.implications[0]
    assert len(read) == len(logs.models())
    logs._catalog.cache_clear()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: engine_name("nosuch"), "no known engine"),
        (lambda: split_label("DeepSeek-R1, in a hurry"), "in a hurry"),
        (lambda: predict("vllm", "llama-2-7b", 0), "tokens=0"),
        (lambda: predict("vllm", "llama-2-7b", 16, magic=1), "magic"),
        (lambda: predict("vllm", "smollm2-135m", 16, tensor_parallel=2), "9 attention heads"),
        (lambda: pool(SWAP, "mamba-130m"), "no keys and values"),
        (lambda: hybrid_block_size("llama-2-7b"), "does not mix"),
    ],
)
def test_refusals(call, words):
    with pytest.raises(ConfigError, match=words):
        call()
