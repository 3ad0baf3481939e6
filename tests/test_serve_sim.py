"""kvlab serve-sim: its table, its JSON, its exit codes, and one sentence for every mistake."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvlab.cli import main
from kvlab.serving.rivals import RIVALS, simulate
from kvlab.workloads import read_trace, workload, write_trace

README = Path(__file__).parent.parent / "README.md"


def run(capsys, *argv):
    code = main(["serve-sim", *map(str, argv)])
    out, err = capsys.readouterr()
    return code, out, err


def test_the_table_is_the_one_in_the_readme(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    code, out, err = run(capsys, "--requests", 200, "--memory-mib", 64)
    assert code == 0 and not err
    table = "\n".join(line.rstrip() for line in out.splitlines())
    assert f"```text\n{table}\n```" in README.read_text(encoding="utf-8")
    for words in ("64 MiB: 2,912 slots", "182 blocks of 16", "SmolLM2-135M in fp16: 23,040 bytes", "200 requests, all"):
        assert words in table
    rows = [line.split()[0] for line in table.splitlines() if line and line.split()[0] in RIVALS]
    assert rows == list(RIVALS)


def test_json_stands_alone_and_holds_the_figures_of_simulate(capsys):
    code, out, err = run(capsys, "--requests", 30, "--memory-mib", 32, "--rivals", "reserved,paged", "--block-size",
                         "16, 4", "--seed", 3, "--rate", 0.1, "--burst", 2, "--json")  # fmt: skip
    found = json.loads(out)
    assert code == 0 and not err
    assert [f["name"] for f in found["rivals"]] == ["reserved", "paged-16", "paged-4"]
    assert (found["slots"], found["memory_bytes"], found["seed"]) == (32 * 2**20 // 23040, 32 * 2**20, 3)
    made = workload(30, rate=0.1, burst=2, seed=3)
    for f in found["rivals"]:
        expected = simulate(f["name"], made, found["slots"])
        assert {k: v for k, v in f.items() if k != "bytes_read"} == expected.to_dict()
        assert f["bytes_read"] == expected.bytes_read(found["weights_bytes"], 23040)


def test_a_trace_written_is_the_same_workload(capsys, tmp_path):
    path = tmp_path / "t.jsonl"
    options = ["--memory-mib", 32, "--rivals", "paged", "--block-size", 16, "--json"]
    first = json.loads(run(capsys, "--requests", 12, "--shared-prefix", 40, "--write-trace", path, *options)[1])
    again = json.loads(run(capsys, "--trace", path, *options)[1])
    assert first["rivals"] == again["rivals"] and again["prefix_sharing"] and again["trace"] == str(path)
    assert first["rivals"][0]["cached"] > 0
    assert len(read_trace(path)) == 12
    assert json.loads(run(capsys, "--trace", path, "--requests", 5, *options)[1])["requests"] == 5


def test_bad_rows_of_a_trace(capsys, tmp_path):
    path = tmp_path / "t.csv"
    write_trace(path, workload(3))
    with path.open("a") as file:
        file.write("r9,many,4,0,0,\nr2,4,4,0,0,\n")
    code, out, err = run(capsys, "--trace", path)
    assert (code, out) == (2, "") and err.count("\n") == 1
    assert f"{path}, line 5: prompt_tokens='many' must be a whole number (and 1 more bad" in err
    code, out, err = run(capsys, "--trace", path, "--skip-bad-rows", "--json")
    assert code == 0 and json.loads(out)["requests"] == 3
    assert [line.partition(": ")[2].split(":")[0] for line in err.splitlines()] == ["serve-sim"] * 2


def test_another_model_and_what_is_not_counted(capsys):
    out = run(capsys, "--requests", 3, "--memory-mib", 4096, "--model", "llama-2-7b", "--rivals", "paged")[1]
    assert "Llama-2-7b" in out and "524,288 bytes a token" in out
    out = run(capsys, "--requests", 3, "--memory-mib", 4096, "--model", "gemma-3-4b", "--rivals", "paged")[1]
    assert "29 layers with a window are counted as if they kept every token" in " ".join(out.split())


def test_nobody_served_all_is_exit_code_3(capsys):
    code, out, _ = run(capsys, "--requests", 20, "--memory-mib", 8)
    assert code == 3 and "served" in out
    assert run(capsys, "--requests", 20, "--memory-mib", 8, "--max-model-len", 300)[0] == 0


@pytest.mark.parametrize(
    "argv, says",
    [
        (["--requests", 0], "--requests 0 must be between 1 and 1,000,000"),
        (["--requests", "x"], "invalid int value: 'x'"),
        (["--memory-mib", 0], "--memory-mib 0.0 must be more than 0"),
        (["--memory-mib", "nan"], "--memory-mib nan must be more than 0"),
        (["--memory-mib", 0.02], "--memory-mib 0.02 holds less than one token of 23,040 bytes"),
        (["--memory-mib", 1], "paged-64: 45 slots are less than one block: take smaller blocks, or more memory"),
        (["--model", "llama-9"], "llama-9"),
        (["--model", "mamba-2.8b"], "there is nothing to page"),
        (["--kv-dtype", "fp3"], "fp3"),
        (["--max-model-len", 1], "--max-model-len 1 must be between 2 and"),
        (["--batched-tokens", 0], "--batched-tokens 0 must be at least 1"),
        (["--rate", 0], "rate=0.0 must be at least 1e-9"),
        (["--rate", "5e-324", "--burst", 2], "rate=5e-324 must be at least 1e-9"),
        (["--memory-mib", 1e6], "--memory-mib 1e+06 holds 45,511,111 tokens; at most 10,000,000 are simulated"),
        (["--max-model-len", 10**25], "--max-model-len 10000000000000000000000000 must be between 2 and 10,000,000"),
        (["--burst", 0], "burst=0 must be at least 1"),
        (["--seed", -1], "seed=-1 must be at least 0"),
        (["--rivals", "reserve"], "rival 'reserve' is not known"),
        (["--rivals", ","], "--rivals is empty"),
        (["--block-size", "16,x"], "rival 'paged-x' is not known"),
        (["--trace", "missing.csv"], "cannot read missing.csv"),
        (["--trace", "missing.csv", "--rate", 1], "--rate makes a workload and --trace brings one"),
        (["--skip-bad-rows"], "--skip-bad-rows needs a --trace"),
        (["--write-trace", "x.txt"], "x.txt: a trace is a .csv or a .jsonl file"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(argv, says, capsys):
    code, out, err = run(capsys, *argv)
    assert (code, out) == (2, "") and says in err and err.startswith("kvlab: serve-sim: ") and err.count("\n") == 1


def test_wrong_options_do_not_wait_for_torch():
    code = """
import sys
from kvlab.cli import main
assert main(["serve-sim", "--requests", "0"]) == 2 and "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
