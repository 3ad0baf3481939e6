"""Workloads: seeded, clipped as stated, and traces that are read whole or not at all."""

import statistics
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlab.workloads import Arrival, prompt_ids, read_trace, workload, write_trace


def test_lengths_have_the_stated_medians_and_fit_the_model():
    made = workload(4000)
    assert statistics.median(r.prompt_tokens for r in made) == pytest.approx(128, rel=0.05)
    assert statistics.median(r.output_tokens for r in made) == pytest.approx(128, rel=0.05)
    assert max(r.total_tokens for r in made) == 1024  # some are clipped
    assert min(min(r.prompt_tokens, r.output_tokens) for r in made) >= 1
    assert all(r.arrival == 0 and r.prefix_tokens == 0 for r in made)
    assert len({r.id for r in made}) == 4000


def test_a_seed_is_a_workload():
    assert workload(50) == workload(50) == workload(80)[:50]
    assert workload(50) != workload(50, seed=1)
    lengths = lambda made: [(r.prompt_tokens, r.output_tokens) for r in made]  # noqa: E731
    assert lengths(workload(50, rate=0.5, burst=3)) == lengths(workload(50))


def test_poisson_arrivals_keep_their_rate_with_and_without_bursts():
    for burst in (1, 8):
        times = [r.arrival for r in workload(8000, rate=0.25, burst=burst)]
        assert times == sorted(times) and times[0] == 0
        assert times[-1] / 8000 == pytest.approx(4, rel=0.15)
        assert len(set(times)) == 8000 // burst
    gaps = [b - a for a, b in zip(times[::8], times[8::8])]
    assert statistics.stdev(gaps) == pytest.approx(statistics.mean(gaps), rel=0.15)  # exponential


def test_a_shared_prompt_stands_in_front_of_every_prompt_and_is_clipped_with_it():
    plain, shared = workload(100), workload(100, shared_prefix=40)
    assert all(b.prompt_tokens == min(a.prompt_tokens + 40, 1023) for a, b in zip(plain, shared))
    a, b = shared[:2]
    ids = prompt_ids(a, 1000), prompt_ids(b, 1000)
    assert [len(x) for x in ids] == [a.prompt_tokens, b.prompt_tokens]
    assert ids[0][:40] == ids[1][:40] and ids[0][40:60] != ids[1][40:60]
    assert ids[0] == prompt_ids(a, 1000) != prompt_ids(a, 1000, seed=1)
    assert all(0 <= i < 1000 for x in ids for i in x)
    tight = workload(20, shared_prefix=500, max_model_len=300)
    assert all(r.prefix_tokens == r.prompt_tokens == 299 and r.output_tokens == 1 for r in tight)


@pytest.mark.parametrize(
    "options, says",
    [
        ({"n": 0}, "n=0 must be at least 1"),
        ({"n": 2.0}, "n=2.0 must be an int"),
        ({"rate": 0}, "rate=0 must be at least 1e-9"),
        ({"rate": 5e-324, "burst": 2}, "rate=5e-324 must be at least 1e-9"),
        ({"rate": float("nan")}, "rate=nan must be finite"),
        ({"rate": "1"}, "rate='1' must be a number"),
        ({"burst": 0}, "burst=0"),
        ({"shared_prefix": -1}, "shared_prefix=-1"),
        ({"max_model_len": 1}, "max_model_len=1 must be at least 2"),
        ({"prompt_median": 0.5}, r"medians must be between 1 and 10\^9 tokens, not 0.5 and 128"),
        ({"output_median": 1e300}, "not 128 and 1e\\+300"),
        ({"rate": 10**400}, "must be finite"),
        ({"sigma": -1}, "sigma=-1"),
        ({"sigma": float("inf")}, "sigma=inf"),
        ({"seed": -1}, "seed=-1"),
    ],
)
def test_bad_options_are_named(options, says):
    with pytest.raises((ValueError, TypeError), match=says):
        workload(**{"n": 3, **options})


def test_an_arrival_cannot_be_senseless():
    for bad, says in [
        ({"id": ""}, "id=''"),
        ({"id": 5}, "id=5 must be a text"),
        ({"id": "a "}, "id='a ' must be a text of printable characters, no space before or behind"),
        ({"id": "a\rb"}, "id='a.rb' must be a text of printable"),
        ({"prefix_id": "\n"}, "prefix_id='.n' must be a text of printable"),
        ({"prefix_id": 3}, "prefix_id=3 must be a text"),
        ({"prompt_tokens": 0}, "prompt_tokens=0"),
        ({"output_tokens": True}, "output_tokens=True"),
        ({"arrival": -1}, "arrival=-1"),
        ({"prefix_tokens": 6}, "prefix_tokens=6 must be at most the prompt's 5"),
    ]:
        with pytest.raises((ValueError, TypeError), match=says):
            Arrival(**{"id": "a", "prompt_tokens": 5, "output_tokens": 5, **bad})


# ---- traces


names = st.text(max_size=8).map(lambda s: "".join(c for c in s if c.isprintable()).strip()).filter(len)


@st.composite
def arrivals(draw):
    ids = draw(st.lists(names, min_size=1, max_size=6, unique=True))
    made = []
    for name in ids:
        prompt = draw(st.integers(1, 5000))
        prefix = draw(st.integers(0, prompt))
        arrival = draw(st.floats(0, 1e6))
        made.append(
            Arrival(name, prompt, draw(st.integers(1, 5000)), arrival, prefix, draw(st.sampled_from(["", "a"]) | names))
        )
    return sorted(made, key=lambda r: r.arrival)


@pytest.mark.parametrize("ending", ["csv", "jsonl"])
@given(made=arrivals())
def test_a_trace_comes_back_as_it_was_written(ending, made, tmp_path_factory):
    path = tmp_path_factory.mktemp("trace") / f"t.{ending}"
    write_trace(path, made)
    assert read_trace(path) == made


def test_columns_in_any_order_with_defaults_and_sorted_by_arrival(tmp_path):
    path = tmp_path / "t.CSV"
    path.write_text("\ufeffoutput_tokens, arrival ,prompt_tokens\r\n5,2.5,10\r\n\r\n6,,11\r\n", encoding="utf-8")
    assert read_trace(path) == [Arrival("row2", 11, 6), Arrival("row1", 10, 5, 2.5)]


GOOD = "prompt_tokens,output_tokens,id,arrival\n4,5,a,0\n"


@pytest.mark.parametrize(
    "name, text, says",
    [
        ("t.csv", GOOD + "x,5,b,0\n", r"t.csv, line 3: prompt_tokens='x' must be a whole number"),
        ("t.csv", GOOD + "\n4,0,b,0\n", r"line 4: output_tokens=0 must be at least 1"),
        ("t.csv", GOOD + "4.0,5,b,0\n", r"line 3: prompt_tokens='4.0' must be a whole number"),
        ("t.csv", GOOD + "4,,b,0\n", r"line 3: output_tokens is missing"),
        ("t.csv", GOOD + "4,5\n", r"line 3: 2 fields under a header of 4"),
        ("t.csv", GOOD + "4,5,a,0\n", r"line 3: id 'a' stands in line 2 already"),
        ("t.csv", GOOD + "4,5,b,nan\n", r"line 3: arrival=nan must be finite"),
        ("t.csv", GOOD + "4,5,b,-1\n4,0,c,0\n9,9,d,0\n", r"line 3: arrival=-1.0 must be at least 0 \(and 1 more bad"),
        ("t.csv", GOOD + "400,700,b,0\n", r"line 3: 400 \+ 700 tokens are more than max_model_len=1024"),
        ("t.csv", GOOD + '"4,5,b,0\n', r"line 3: "),
        ("t.csv", "prompt,output_tokens\n1,2\n", "column 'prompt' is not known; columns are id, prompt_tokens"),
        ("t.csv", "prompt_tokens,id\n1,2\n", "column 'output_tokens' is missing; there are prompt_tokens, id"),
        ("t.csv", "prompt_tokens,prompt_tokens\n1,2\n", "column 'prompt_tokens' stands there twice"),
        ("t.csv", GOOD.splitlines()[0], "t.csv has no rows"),
        ("t.csv", "", "t.csv has no rows"),
        ("t.jsonl", '{"prompt_tokens": 4}\n', r"t.jsonl, line 1: output_tokens is missing"),
        ("t.jsonl", '{"prompt_tokens": 4, "output_tokens": 2.0}', r"output_tokens=2.0 must be an int"),
        ("t.jsonl", '{"prompt_tokens": 4, "output_tokens": true}', r"output_tokens=True must be an int"),
        ("t.jsonl", '{"prompt_tokens": 4, "output_tokens": 2, "id": []}', r"id=\[\] must be a text"),
        ("t.jsonl", '{"prompt_tokens": 4, "out": 2}', r"key 'out' is not known"),
        ("t.jsonl", "\n[4, 5]\n", r"line 2: a JSON list stands where an object should"),
        ("t.jsonl", '{"prompt_tokens": 4,\n', r"line 1: this is not JSON"),
        ("t.jsonl", '{"prompt_tokens": ' + "9" * 5000 + "}", r"line 1: this is not JSON"),
        ("t.jsonl", '{"prompt_tokens": 4, "output_tokens": 2, "arrival": 1' + "0" * 400 + "}", r"must be finite"),
        ("t.jsonl", '{"prompt_tokens": 4, "output_tokens": 2, "arrival": null, "id": 1.5}', r"id=1.5 must be a text"),
        ("t.txt", "", r"t.txt: a trace is a .csv or a .jsonl file"),
    ],
)
def test_bad_traces_are_named_by_file_and_line(name, text, says, tmp_path):
    (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises((ValueError, TypeError), match=says):
        read_trace(tmp_path / name, max_model_len=1024)


def test_bad_rows_can_be_left_out_and_are_told_one_by_one(tmp_path):
    path, told = tmp_path / "t.csv", []
    path.write_text(GOOD + "4,0,b,0\n7,8,c,0\n4,x,d,0\n", encoding="utf-8")
    assert [r.id for r in read_trace(path, on_bad=told.append)] == ["a", "c"]
    assert [text.split(": ")[0].rpartition(" ")[2] for text in told] == ["3", "5"]
    path.write_text("prompt_tokens,output_tokens\n0,0\n", encoding="utf-8")
    with pytest.raises(ValueError, match="has no good rows"):
        read_trace(path, on_bad=told.append)


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(ValueError, match="cannot read .*missing.csv"):
        read_trace(tmp_path / "missing.csv")
    (tmp_path / "t.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="not a text file in UTF-8"):
        read_trace(tmp_path / "t.csv")
    with pytest.raises(ValueError, match="a .csv or a .jsonl"):
        write_trace(tmp_path / "t.json", workload(2))


def test_no_torch():
    code = "import sys, kvlab.workloads; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
