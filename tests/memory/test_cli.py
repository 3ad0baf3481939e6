"""kvlab fit: tables, JSON, exit codes, logs, and one sentence for every mistake."""

import io
import json
import subprocess
import sys

import pytest

from kvlab.memory import estimate
from kvlab.memory.cli import main
from kvlab.memory.logs import explain

LLAMA = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


def run(capsys, *argv):
    code = main([str(a) for a in argv])
    out, err = capsys.readouterr()
    return code, out, err


def test_fits_and_does_not(capsys):
    assert run(capsys, "llama-2-7b", "--gpu", "a100-80gb")[0] == 0
    code, out, _ = run(capsys, "llama-2-7b", "--gpu", "t4", "--batch", 4, "--seq", 2048)
    assert code == 3
    for words in ("4.00", "12.55", "does not fit", "524,288 bytes a token", "what would help", "int8 weights"):
        assert words in out
    assert run(capsys, "llama-2-7b")[0] == 0  # no card, nothing to fit into
    assert run(capsys, "llama-2-7b", "--memory-gib", 10)[0] == 3


def test_a_batch_that_no_list_could_hold(capsys):
    code, out, err = run(capsys, "llama-2-7b", "--gpu", "t4", "--batch", 10**12, "--json")
    assert code == 3 and not err and json.loads(out)["batch_size"] == 10**12


def test_json_has_the_names_of_estimate(capsys):
    argv = [
        "gemma-3-12b",
        "--gpu",
        "l4",
        "--batch",
        2,
        "--seq",
        4096,
        "--kv-dtype",
        "q8_0:q4_0",
        "--weights-dtype",
        "int4",
    ]
    code, out, err = run(capsys, *argv, "--json")
    found = json.loads(out)
    expected = estimate("gemma-3-12b", 2, 4096, "q8_0:q4_0", weights_dtype="int4").as_dict()
    assert {k: found[k] for k in expected} == json.loads(json.dumps(expected))
    assert code == 0 and found["fits"] and not err
    assert found["free_bytes"] == found["memory_bytes"] - found["total_bytes"]
    for name in (
        "kv_cache_bytes",
        "state_bytes",
        "kv_bytes_per_token",
        "weights_bytes",
        "total_bytes",
        "layers",
        "advice",
    ):
        assert name in found


def test_a_file_a_folder_and_a_ragged_batch(capsys, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "vocab_size": 100, "intermediate_size": 128}))
    for source in (tmp_path, tmp_path / "config.json"):
        code, out, _ = run(capsys, source, "--gpu", "t4", "--seq", "10,20,30", "--layout", "paged", "--json")
        assert code == 0 and json.loads(out)["kv_cache_bytes"] == (16 + 32 + 32) * 2 * 2 * 64 * 2


def test_weights_that_are_not_known(capsys, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "model_type": "brand_new"}))
    code, _, err = run(capsys, tmp_path, "--gpu", "t4")
    assert code == 2 and "--params" in err
    assert run(capsys, tmp_path, "--gpu", "t4", "--params", "7b")[0] == 0
    code, out, _ = run(capsys, tmp_path)
    assert code == 0 and "brand_new" in out  # the warning is visible


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "which model"),
        (["lama-2-7b"], "did you mean"),
        (["llama-2-7b", "--gpu", "t44"], "did you mean"),
        (["llama-2-7b", "--gpu", "t4", "--memory-gib", "3"], "one of them"),
        (["llama-2-7b", "--memory-gib", "-1"], "more than 0"),
        (["llama-2-7b", "--memory-gib", "nan"], "more than 0"),
        (["llama-2-7b", "--batch", "0"], "batch_size=0"),
        (["llama-2-7b", "--batch", "many"], "many"),
        (["llama-2-7b", "--seq", "-5"], "--seq=-5"),
        (["llama-2-7b", "--seq", "long"], "long"),
        (["llama-2-7b", "--tp", "3"], "32 attention heads"),
        (["llama-2-7b", "--kv-dtype", "fp3"], "unknown number format 'fp3'"),
        (["llama-2-7b", "--layout", "heap"], "heap"),
        (["llama-2-7b", "--params", "big"], "7e9 or 7b"),
        (["llama-2-7b", "--nonsense"], "--nonsense"),
        (["./no-such-folder/config.json"], "cannot read"),
        (["--log", "./no-such.log"], "cannot read"),
        (["llama-2-7b", "--log", "-"], "leave out"),
    ],
)
def test_bad_usage_is_one_sentence_and_exit_code_2(capsys, argv, words):
    code, out, err = run(capsys, *argv)
    assert code == 2 and words in err and err.count("\n") == 1 and not out


@pytest.mark.parametrize("text", ["{", "[1, 2]", "\x00\x01", '"text"', "{}"])
def test_files_that_are_no_configuration(capsys, tmp_path, text):
    path = tmp_path / "config.json"
    path.write_text(text)
    code, _, err = run(capsys, path)
    assert code == 2 and err.count("\n") == 1


def test_the_hub_out_of_reach(capsys, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    code, _, err = run(capsys, "someone/some-model")
    assert code == 2 and "HF_HUB_OFFLINE" in err
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    code, _, err = run(capsys, "someone/some-model")
    assert code == 2 and "cannot be reached" in err


def test_the_hub_in_reach(capsys, monkeypatch):
    """Against a server of the test's own."""
    import http.server
    import threading

    class Hub(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            found = self.path == "/someone/some-model/resolve/main/config.json"
            self.send_response(200 if found else 404)
            self.end_headers()
            if found:
                self.wfile.write(json.dumps(LLAMA).encode())

        def log_message(self, *args):
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    code, out, _ = run(capsys, "someone/some-model", "--json")
    assert code == 0 and json.loads(out)["kv_bytes_per_token"] == 512
    code, _, err = run(capsys, "someone/no-model")
    assert code == 2 and "HTTP 404" in err
    server.shutdown()
    server.server_close()


def test_help(capsys):
    code, out, _ = run(capsys, "--help")
    assert code == 0 and "--kv-dtype" in out


LOGS = {
    "vllm": "Available KV cache memory: 6.51 GiB\nGPU KV cache size: 42,656 tokens\n"
    "Maximum concurrency for 32,768 tokens per request: 1.30x",
    "llama.cpp": "llama_kv_cache: size = 1536.00 MiB (  4096 cells,  32 layers,  1/1 seqs), "
    "K (f16):  768.00 MiB, V (f16):  768.00 MiB",
    "sglang": "KV Cache is allocated. #tokens: 104273, K size: 5.57 GB, V size: 5.57 GB",
    "tensorrt-llm": "[MemUsageChange] Allocated 68.69 GiB for max tokens in paged KV cache (643136).",
    "lmdeploy": "[TM][INFO] [BlockManager] block_size = 32 MB\n[TM][INFO] [BlockManager] max_block_count = 1037",
    "torch": "CUDA out of memory. Tried to allocate 64.00 MiB. GPU 0 has a total capacity of 14.74 GiB of which "
    "12.12 MiB is free. Of the allocated memory 14.10 GiB is allocated by PyTorch, and 480.66 MiB is reserved "
    "by PyTorch but unallocated",
}  # fmt: skip
NAMED = {
    "lmdeploy": "Llama-2-7b",
    "vllm": "Qwen3-14B",
    "llama.cpp": "Phi-3-mini",
    "sglang": "Qwen3-0.6B",
    "tensorrt-llm": "Qwen3-0.6B",
}


@pytest.mark.parametrize("engine", LOGS)
def test_logs_are_explained(engine, capsys, tmp_path):
    report = explain(LOGS[engine])
    assert report.engine == engine and report.findings
    assert NAMED.get(engine, "") in " ".join(report.implications)
    path = tmp_path / "engine.log"
    path.write_text("noise\n" + LOGS[engine] + "\nmore noise")
    code, out, _ = run(capsys, "--log", path)
    assert code == 0 and report.findings[0].meaning.split()[0] in out
    code, out, _ = run(capsys, "--log", path, "--json")
    assert code == 0 and json.loads(out)["values"] == report.values


def test_a_log_from_standard_input(capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO(LOGS["sglang"]))
    assert run(capsys, "--log", "-")[0] == 0


def test_what_logs_imply():
    def said(text):
        return " ".join(explain(text).implications)

    assert "DeepSeek-V3 in q8_0" in said(
        "llama_init_from_model: n_ctx      = 32768\n"
        "llama_init_from_model: KV self size  = 1166.62 MiB, c^KV (q8_0): 1166.62 MiB, kv^T: not used"
    )
    assert "32 bits" in said("llama_model_load_internal: n_ctx      = 512\nkv self size  = 1560.00 MB")
    assert "fragmentation" in said(LOGS["torch"])
    assert "312,208 tokens" in said("# GPU blocks: 19513, # CPU blocks: 819")
    assert "derived" in said(
        "GPU KV cache size: 882,851 tokens\nMaximum concurrency for 131,072 tokens per request: 9.99x"
    )
    assert "needs 4.16 GiB" in said(
        "max seq len (34048), (4.16 GiB KV cache is needed, which is larger than the "
        "available KV cache memory (4.00 GiB)"
    )


@pytest.mark.parametrize(
    ("text", "engine", "values", "words"),
    [
        ("llama_context: n_ctx = 262144\n"
         "llama_kv_cache: size = 6656.00 MiB (262144 cells,  16 layers,  1/1 seqs), "
         "K (q8_0): 4352.00 MiB, V (q4_0): 2304.00 MiB\n"
         "llama_memory_recurrent: size =  149.62 MiB (     1 cells,  64 layers,  1 seqs), R (f32):    5.62 MiB",
         "llama.cpp", {"kv_mib": 6656, "cells": 262144, "state_mib": 149.62}, "Qwen3.6-27B in q8_0:q4_0"),
        ("llama_context: n_ctx = 8192\nllama_kv_cache:      CUDA0 KV buffer size =   544.00 MiB\n"
         "llama_kv_cache:      CUDA1 KV buffer size =   480.00 MiB", "llama.cpp", {"self_mib": 1024}, "Llama-3.1-8B"),
        ("llama_kv_cache_init: kv_size = 4096, offload = 1, type_k = 'f16'\n"
         "llama_init_from_model: KV self size  =  512.00 MiB, K (f16):  256.00 MiB, V (f16):  256.00 MiB",
         "llama.cpp", {"cells": 4096, "self_mib": 512}, "131,072 bytes a token"),
        ("llama_kv_cache: size = 10.00 MiB ( 256 cells, 2 layers, 1 seqs), K (strange9): 5.00 MiB, "
         "V (strange9): 5.00 MiB", "llama.cpp", {"k_type": "strange9"}, "No model of the catalog"),
        ("Loading model weights took 14.9595 GB\n# GPU blocks: 0, # CPU blocks: 512",
         "vllm", {"weights_gib": 14.9595, "blocks": 0}, "no room for the cache"),
        ("The model's max seq len (32768) is larger than the maximum number of tokens that can be stored in KV cache "
         "(5632).", "vllm", {"tokens": 5632, "max_model_len": 32768}, "lower --max-model-len"),
        ("[TensorRT-LLM][INFO] Max tokens in paged KV cache: 643136. Allocating 73759981568 bytes.",
         "tensorrt-llm", {"tokens": 643136, "kv_bytes": 73759981568}, "114,688 bytes a token"),
        ("[TensorRT-LLM][INFO] Number of blocks in KV cache primary pool: 20098\n"
         "[TensorRT-LLM][INFO] Number of tokens per block: 32.", "tensorrt-llm", {"blocks": 20098}, "643,136 tokens"),
        ("Load weight end. type=LlamaForCausalLM, dtype=torch.bfloat16, avail mem=63.91 GB, mem usage=15.05 GB.\n"
         "SWAKVPool mem usage: 12.30 GB, swa size: 104273, full size: 130341",
         "sglang", {"weights_gib": 15.05, "swa_tokens": 104273}, "130,341"),
        ("Mamba Cache is allocated. max_mamba_cache_size: 48, conv_state size: 0.51GB, ssm_state size: 21.60GB",
         "sglang", {"conv_gib": 0.51, "ssm_gib": 21.6}, "22.11 GiB are recurrent states"),
        ("[TM][INFO] [BlockManager] block_size = 32.000 MB, max_block_count = 1037",
         "lmdeploy", {"block_mib": 32, "blocks": 1037}, "66,368 tokens"),
        ("CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 14.76 GiB total capacity; 13.60 GiB already "
         "allocated; 11.75 MiB free; 13.74 GiB reserved in total by PyTorch)", "torch",
         {"card_gib": 14.76, "free": 11.75}, "fragmentation"),
    ],
)  # fmt: skip
def test_engines_word_their_lines_in_several_ways(text, engine, values, words):
    report = explain(text)
    assert report.engine == engine and values.items() <= report.values.items()
    assert words in " ".join(report.implications)


def test_a_log_of_no_engine(capsys, tmp_path):
    path = tmp_path / "x.log"
    path.write_text("hello\n")
    code, _, err = run(capsys, "--log", path)
    assert code == 2 and "no line of a known engine" in err


def test_no_torch_and_no_rich_until_they_are_needed():
    """A fresh interpreter: the calculator, its command and its JSON load neither torch nor rich."""
    code = (
        "import sys, kvlab.memory, kvlab.config; from kvlab.memory.cli import main; "
        "main(['llama-2-7b', '--gpu', 't4', '--json']); "
        "bad = [m for m in ('torch', 'numpy', 'rich', 'transformers') if m in sys.modules]; "
        "sys.exit(str(bad) if bad else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
