"""python -m kvlab.gpu_check [--out FOLDER] [--device cuda|mps|cpu] [--quick]: does every cache work on this card?

Under two minutes, with torch, numpy and matplotlib alone. Every cache against no cache in fp32, fp16 and bf16; nbytes
against the allocator; rings and block tables that wrap; forks; then tokens/s, peak memory and the attention kernels.
Exit code 0 if every check passed, 1 if one failed.
"""

from __future__ import annotations

import argparse
import gc
import platform
import time
from pathlib import Path

import torch

from kvlab.gpu_check import allocator, latent, logits, report, speed
from kvlab.gpu_check.setup import Check, dtypes_of, has_fp8, make_model
from kvlab.measure import about, best_dtype, memory
from kvlab.measure.about import device_for


def run(device=None, quick: bool = False, out: str | Path | None = None, progress=print) -> tuple[bool, dict]:
    """Run all parts -> (all passed, {"checks": [...], "speed": [...], "text": ...}); out: folder for JSON and PNG.

    quick: tiny sizes, as always on a CPU. Raises ValueError for a device that is not there.
    """
    device = device_for(device)
    quick = quick or device.type == "cpu"
    with memory(device):  # the first use imports much of torch: let it, and let the collector pass over all that
        torch.zeros(1, device=device)
    gc.collect()
    gc.freeze()
    try:
        with torch.no_grad():
            return _run(device, quick, out, progress)
    finally:
        gc.unfreeze()


def _run(device: torch.device, quick: bool, out, progress) -> tuple[bool, dict]:
    began = time.perf_counter()
    dtypes, note = dtypes_of(device)
    notes = [note] if note else []
    if not has_fp8(device):
        notes.append(f"fp8 left out: {device.type} has no conversion to it")
    size, best = "tiny" if quick else "small", best_dtype(device)
    checks: list[Check] = []

    def part(words, results):
        start = time.perf_counter()
        checks.extend(results)
        progress(f"{words}: {time.perf_counter() - start:.1f} s")

    part("logits", logits.check_logits(device, dtypes, size))
    part("latent attention", latent.check_latent(device, dtypes, size))
    part("codes", logits.check_codecs(device, dtypes))
    part("ring wrap", logits.check_ring(device, best, size))
    part("block reuse", logits.check_blocks(device, torch.float32, size))
    part("forks", logits.check_forks(device, torch.float32, size))
    B, T, n_layers, n_kv, D = (2, 96, 2, 2, 16) if quick else (2, 2048, 4, 8, 64)
    part("bytes", allocator.check_bytes(device, best, B, T, n_layers, n_kv, D))
    start = time.perf_counter()
    model = make_model(device, best, "tiny" if quick else "large")
    B, prompt, new, repeats = (2, 48, 6, 1) if quick else (8, 512, 65, 3)
    rows = speed.speed_of(model, B, prompt, new, repeats)
    progress(f"speed: {time.perf_counter() - start:.1f} s")
    seconds = time.perf_counter() - began
    config, dtype = model.config, str(best).removeprefix("torch.")
    notes.append(
        f"speed: {config.num_hidden_layers} layers of hidden size {config.hidden_size}, {config.num_key_value_heads} "
        f"of {config.num_attention_heads} heads keep keys, {dtype}; batch {B}, prompt {prompt}, {new} new tokens"
    )
    line = about(device)
    versions = {
        "torch": torch.__version__, "python": platform.python_version(), "cuda": torch.version.cuda,
        "device": str(device), "platform": platform.platform(),
    }  # fmt: skip
    words = report.text(line, checks, rows, notes, seconds)
    files = report.save(Path(out), line, checks, rows, notes, seconds, versions) if out is not None else []
    passed = all(c.ok for c in checks)
    return passed, {"checks": checks, "speed": rows, "text": words, "files": files}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m kvlab.gpu_check", description="Check every cache on this device.")
    parser.add_argument("--out", metavar="FOLDER", help="write results.json and results.png there")
    parser.add_argument("--device", help="cuda, mps or cpu; default: the best one that is there")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, as always on a CPU")
    options = parser.parse_args(argv)
    try:
        passed, result = run(options.device, options.quick, options.out)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    print("\n" + result["text"])
    for path in result["files"]:
        print(f"written: {path}")
    return 0 if passed else 1
