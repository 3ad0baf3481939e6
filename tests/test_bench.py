"""kvlab bench: all sides ran the same work, the bytes are right, and nothing is lost. No test looks at seconds."""

import json

import pytest
import torch

import kvlab
from kvlab import bench, cli

SMALL = {"batch": 2, "prompt": 6, "new": 5, "repeats": 2, "progress": False}


@pytest.fixture(scope="module", autouse=True)
def small_reads():
    """The bandwidth of 512 MiB is not what is tested here."""
    from kvlab.measure import bandwidth

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench, "bandwidth", lambda device: bandwidth(device, nbytes=2**22, repeats=3))
        yield


@pytest.fixture(scope="module")
def model():
    return kvlab.GPT(kvlab.ModelConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_key_value_heads=2))


@pytest.fixture(scope="module")
def result(model):
    pytest.importorskip("transformers")
    return bench.run(model, against=["transformers"], **SMALL)


def test_every_side_has_a_row_with_as_many_times_as_repeats(result):
    assert [row.name for row in result.rows] == [*bench.VARIANTS, "DynamicCache", "StaticCache"]
    for row in result.rows:
        assert row.status == "ok" and len(row.prefill) == len(row.decode) == 2
        assert set(result.summary(row)) >= {"prefill_tokens_per_s", "decode_ms_per_token", "floor_ms_per_token"}


def test_exact_sides_wrote_the_same_tokens(result):
    rows = {row.name: row for row in result.rows}
    for name in ("growing", "full", "paged", "offloaded", "DynamicCache", "StaticCache"):
        assert rows[name].same_tokens == 2 * 5, name
    assert rows["none"].same_tokens is None and rows["none"].sampled == 3


def test_bytes_held_and_read_equal_their_closed_forms(result, model):
    rows = {row.name: row for row in result.rows}
    one = model.config.kv_bytes_per_token(4) * 2  # both rows
    weights = sum(p.nbytes for p in model.parameters()) - model.embed_tokens.weight.nbytes
    assert rows["none"].held == 0 and rows["none"].read == weights
    assert rows["full"].held == rows["offloaded"].held == 2 * rows["shared"].held == one * (6 + 5)
    assert rows["DynamicCache"].held == one * (6 + 4)  # the last token is never fed back
    assert rows["StaticCache"].held >= one * (6 + 5)
    mean_length = (7 + 8 + 9 + 10) / 4
    for name in ("growing", "full", "paged", "shared", "offloaded", "DynamicCache", "StaticCache"):
        assert rows[name].read == weights + one * mean_length, name


def test_the_tied_embedding_is_read_once_and_an_untied_one_not():
    config = kvlab.ModelConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1)
    tied, untied = kvlab.GPT(config.with_(tie_word_embeddings=True)), kvlab.GPT(config)
    assert bench._weights_read(tied) == bench._weights_read(untied)


def test_summary_arithmetic():
    row = bench.Row("full", prefill=[2.0, 2.0], decode=[4.0, 4.0], read=3e9)
    made = bench.Result("", "m", 2, 10, 5, "float32", "cpu", 1, 2, 0, 1e9, [row])
    got = made.summary(row)
    assert got["prefill_tokens_per_s"] == 10 and got["prefill_ms_per_token"] == 200
    assert got["decode_tokens_per_s"] == 2 and got["decode_ms_per_token"] == 1000
    assert got["floor_ms_per_token"] == 3000


def test_a_side_that_does_not_fit_keeps_its_row(model, monkeypatch):
    def start(self):
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(bench.Cached, "start", start)
    result = bench.run(model, ["none", "full"], **SMALL)
    assert [row.status for row in result.rows] == ["ok", "did not fit"]
    text = _shown(result)
    assert "did not fit" in text and result.to_dict()["rows"][1]["decode"] == []


def test_the_table_fits_80_columns_and_says_what_was_sampled(result):
    text = _shown(result)
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    for word in ("StaticCache", "tokens/s", "ms/token", "limit", "held", "float32", "int4"):
        assert word in text
    notes = " ".join(bench.notes(result))
    assert "kept on cpu, where the model computes too: nothing is moved or saved" in notes
    assert "3 of 4 steps were run" in notes and torch.__version__ in notes and "GB/s" in notes


def _shown(result):
    from io import StringIO

    from rich.console import Console

    console = Console(file=StringIO(), width=80)
    console.print(bench.table(result))
    return console.file.getvalue()


def test_json_holds_the_raw_times(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(bench, "TOY", kvlab.ModelConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1))
    args = ["bench", "--model", "toy", "--variants", "full,int8", "--prompt", "4", "--new", "3", "--repeats", "2"]
    args += ["--device", "cpu", "--threads", "1"]
    assert cli.main([*args, "--json", "-"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["threads"] == 1 and data["dtype"] == "float32" and data["prompt"] == 4
    assert [row["name"] for row in data["rows"]] == ["full", "int8"]
    assert all(len(row["decode"]) == 2 and row["held"] > 0 for row in data["rows"])
    assert cli.main([*args, "--json", str(tmp_path / "bench.json")]) == 0
    assert "full" in capsys.readouterr().out
    assert json.loads((tmp_path / "bench.json").read_text())["model"] == "toy"


def test_threads_are_as_asked_during_the_run_and_given_back_after_it(model, monkeypatch):
    seen, before = [], torch.get_num_threads()
    monkeypatch.setattr(bench, "_run", lambda *args: seen.append(torch.get_num_threads()))
    bench.run(model, ["full"], threads=before + 1, **SMALL)
    assert (seen, torch.get_num_threads()) == ([before + 1], before)


@pytest.mark.parametrize(
    "wrong, says",
    [
        ({"variants": ["ful"]}, "'ful' is unknown here; choose from none"),
        ({"against": ["vllm"]}, "'vllm' is unknown"),
        ({"new": 1}, "new=1"),
        ({"batch": 0}, "batch=0"),
        ({"threads": 0}, "threads=0"),
        ({"variants": []}, "at least one"),
    ],
)
def test_bad_sizes_and_names_are_refused(model, wrong, says):
    with pytest.raises(ValueError, match=says):
        bench.run(model, **(SMALL | wrong))
