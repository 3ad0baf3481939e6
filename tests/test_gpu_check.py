"""The GPU check with tiny sizes on the CPU: it passes, writes its files, and fails when a cache is wrong."""

import gc
import json
import os
import subprocess
import sys

import pytest
import torch

from kvlab.attention import View
from kvlab.caches import FullCache, OffloadedCache, QuantizedCache, SlidingWindowCache
from kvlab.gpu_check import allocator, logits, main, run
from kvlab.gpu_check.setup import VARIANTS, Check, dtypes_of
from kvlab.gpu_check.speed import kernels

CPU = torch.device("cpu")
# all that a bare machine with torch, numpy and matplotlib may lack
LACKING = ("tqdm", "ipywidgets", "plotly", "IPython", "gguf", "tokenizers", "safetensors", "rich", "transformers")


def test_it_runs_with_torch_numpy_and_matplotlib_alone(tmp_path):
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({LACKING!r}))\n"
        "from kvlab.gpu_check import main\n"
        f"sys.exit(main(['--device', 'cpu', '--quick', '--out', {str(tmp_path / 'out')!r}]))"
    )
    env = os.environ | {"OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=290)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "FAIL" not in done.stdout and "checks passed" in done.stdout
    result = json.loads((tmp_path / "out" / "results.json").read_text())
    assert result["passed"] and result["versions"]["torch"] == torch.__version__ and "torch" in result["about"]
    assert (tmp_path / "out" / "results.png").read_bytes().startswith(b"\x89PNG")

    parts = {c["part"] for c in result["checks"]}
    assert parts >= {f"logits, {dtype}" for dtype in ("float32", "float16", "bfloat16")}
    assert parts >= {"codes", "ring wrap", "block reuse", "fork", "bytes: nbytes", "bytes: requested"}
    for part in ("logits, float32", "bytes: nbytes"):
        assert {c["name"] for c in result["checks"] if c["part"] == part} >= {v.name for v in VARIANTS}
    speed = {row["name"]: row for row in result["speed"]}
    assert set(speed) == {"no cache", *(v.name for v in VARIANTS)}
    for row in speed.values():
        assert row["tokens_per_s"] > 0 and row["peak_bytes"] > 0 and row["attention"]["decode"]["backend"] != "unknown"


@pytest.fixture(autouse=True)
def light_collector():
    """The memory meter collects garbage often: let it pass over what was there before."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def failed(checks):
    return {(c.part, c.name) for c in checks if not c.ok}


def test_a_wrong_cache_fails_its_logits(monkeypatch):
    right = FullCache._write

    def wrong(self, layer, k, v, step):  # shows the newest value one position late
        view = right(self, layer, k, v, step)
        return View(view.k, view.v.roll(1, 2), view.pos, all_visible=view.all_visible)

    monkeypatch.setattr(FullCache, "_write", wrong)
    with torch.no_grad():
        checks = list(logits.check_logits(CPU, [torch.float32, torch.bfloat16], "tiny"))
        checks += logits.check_forks(CPU, torch.float32, "tiny")
    parts = ("logits, float32", "logits, bfloat16", "fork")
    assert failed(checks) == {(part, name) for part in parts for name in ("full", "offloaded")}  # which is a full one


def test_keys_and_values_on_another_device(monkeypatch):
    """As with a card, though both devices are the CPU here: what is moved is checked, and what is not fails."""
    monkeypatch.setattr(OffloadedCache, "_away", lambda self, device: True)
    monkeypatch.setattr(OffloadedCache, "_ahead", lambda self, device: True)
    for part in (logits, allocator):
        monkeypatch.setattr(part, "variants_of", lambda device: [v for v in VARIANTS if v.kind == "offloaded"])

    def checks():
        with torch.no_grad():
            yield from logits.check_logits(CPU, [torch.float32], "tiny")
            yield from logits.check_forks(CPU, torch.float32, "tiny")
            yield from allocator.check_bytes(CPU, torch.float32, 2, 64, 2, 2, 16)

    assert failed(checks()) == set()
    monkeypatch.setattr(OffloadedCache, "_send", lambda self, *args: None)
    assert failed(checks()) == {("logits, float32", "offloaded"), ("fork", "offloaded")}


def test_a_ring_that_grows_and_wrong_nbytes_fail(monkeypatch):
    right = SlidingWindowCache.nbytes_by

    def too_many(self):
        return {"keys": right(self)["keys"] + max(self.lengths) ** 2}

    monkeypatch.setattr(SlidingWindowCache, "nbytes_by", too_many)
    with torch.no_grad():
        ring = list(logits.check_ring(CPU, torch.float32, "tiny"))
        weighed = list(allocator.check_bytes(CPU, torch.float32, 2, 128, 2, 2, 16))
    names = {v.name for v in VARIANTS if v.kind == "sliding"}
    assert failed(ring) == {("ring wrap", name) for name in names}
    assert failed(weighed) == {("bytes: nbytes", name) for name in names}


def test_bytes_that_are_kept_and_not_told_fail(monkeypatch):
    right = QuantizedCache.nbytes_by
    monkeypatch.setattr(QuantizedCache, "nbytes_by", lambda self: right(self) | {"tail": 0})
    checks = list(allocator.check_bytes(CPU, torch.float32, 2, 128, 2, 2, 16))
    assert {part for part, _ in failed(checks)} == {"bytes: nbytes"}
    assert {name for _, name in failed(checks)} == {v.name for v in VARIANTS if v.kind == "quantized"}


def test_the_exit_code_says_whether_all_passed(monkeypatch, tmp_path, capsys):
    import kvlab.gpu_check as module

    result = {"checks": [], "speed": [], "text": "the report", "files": [tmp_path / "results.json"]}
    for passed, code in ((True, 0), (False, 1)):
        monkeypatch.setattr(module, "run", lambda *a, passed=passed: (passed, result))
        assert main(["--quick"]) == code
    assert "the report" in capsys.readouterr().out


def test_a_failed_check_fails_the_run(monkeypatch):
    import kvlab.gpu_check as module

    nothing = {name: lambda *a: iter(()) for name in ("check_logits", "check_codecs", "check_ring", "check_blocks")}
    for name, empty in nothing.items():
        monkeypatch.setattr(module.logits, name, empty)
    monkeypatch.setattr(module.logits, "check_forks", lambda *a: [Check("fork", "full", False, 1.0, 0.1, "logit")])
    monkeypatch.setattr(module.allocator, "check_bytes", lambda *a: iter(()))
    monkeypatch.setattr(module.speed, "speed_of", lambda *a: [])
    passed, result = run("cpu", quick=True, progress=lambda line: None)
    assert not passed and "FAILED: fork: full" in result["text"]


@pytest.mark.parametrize("name", ["cuda:99", "tpu", "meta", "xla"])
def test_a_device_that_is_not_there(name, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--device", name])
    assert stop.value.code == 2 and name in capsys.readouterr().err


def test_every_dtype_is_checked_on_a_cpu():
    assert dtypes_of(CPU) == ([torch.float32, torch.float16, torch.bfloat16], "")


def test_the_attention_backend_is_named():
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q = torch.randn(1, 2, 8, 16)

    def attend():
        return torch.nn.functional.scaled_dot_product_attention(q, q, q)

    assert kernels(attend, CPU)["backend"] == "flash (CPU)"
    with sdpa_kernel(SDPBackend.MATH):
        assert kernels(attend, CPU)["backend"] == "math"
