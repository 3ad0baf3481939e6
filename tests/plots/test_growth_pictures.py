"""The pictures of what a longer text costs: right numbers, and every one of them drawn and put into words."""

import pytest

from kvlab import cost
from kvlab.config import ModelConfig
from kvlab.plots import data, figures, growth

CONFIG = ModelConfig(hidden_size=48, num_hidden_layers=2, num_attention_heads=3)  # an MLP of 8/3 of the width exactly


def test_the_attention_term_has_slope_3_without_a_cache_2_with_and_1_in_a_window():
    lengths = [2**i for i in range(4, 14)]
    picture = growth.flop_lines(CONFIG, 32, lengths, (1024, 8192), "attention")
    assert [round(s["slope"], 1) for s in picture["series"]] == [3.0, 2.0, 1.0]
    picture = growth.flop_lines(CONFIG, 32, lengths, (1024, 8192), "projections")
    assert [round(s["slope"], 1) for s in picture["series"]] == [2.0, 1.0, 1.0]


def test_the_two_terms_meet_at_six_times_the_width():
    counted = {n: cost.step_flops(CONFIG, "none", n) for n in (32, 288, 512)}
    picture = growth.step_terms(CONFIG, counted, "terms")
    assert picture["at"] == 288 == 6 * CONFIG.hidden_size
    assert "288 tokens in view, 6 times" in picture["sentence"]
    head = 2 * CONFIG.hidden_size * CONFIG.vocab_size  # the one row of logits belongs to no layer
    assert counted[288].projections - head == counted[288].attention


def test_seconds_against_length_marks_what_was_sampled():
    cached = {"full": [0.1 * n for n in range(1, 65)], "growing": [0.2 * n for n in range(1, 65)]}
    uncached = (list(range(1, 65)), [0.001 * n**2 for n in range(1, 65)])
    picture = growth.time_lines(cached, uncached, [8, 16, 32, 64], (8, 64), note="a machine")
    by = {s["variant"]: s for s in picture["series"]}
    assert by["none"]["sampled"] == [True] * 4 and by["full"]["sampled"] == [False] * 4
    assert by["full"]["y"] == pytest.approx([0.8, 1.6, 3.2, 6.4])
    assert by["none"]["slope"] == pytest.approx(2) and by["growing"]["slope"] == pytest.approx(1)


def test_the_floor_is_the_time_to_read_once():
    rows = [{"label": "8 tokens", "weights": 4e9, "cache": 1e9, "seconds": 10.0},
            {"label": "9 tokens", "weights": 4e9, "cache": 2e9, "seconds": 5.0}]  # fmt: skip
    picture = growth.floor_bars(rows, 1e9)
    assert [b["values"] for b in picture["bars"]] == [[4, 1, 5], [4, 2, 0]]  # a step below its floor shows no rest
    assert "1.0 GB/s" in picture["sentence"] and "120 %" in picture["sentence"]


def test_a_pass_computes_all_but_its_last_row_again():
    picture = growth.passes(["a", "b"], [" c", "\n", "d"])
    groups = [[cell["group"] for cell in row["cells"]] for row in picture["rows"]]
    assert groups == [[1, 1], [0, 0, 1], [0, 0, 0, 1]]
    assert picture["rows"][2]["cells"][3]["text"] == "\\n"


def test_every_picture_is_drawn_and_said():
    lengths = [2**i for i in range(4, 9)]
    counted = {n: cost.step_flops(CONFIG, "none", n) for n in lengths}
    steps = [0.1] * 256
    for picture in (
        growth.flop_lines(CONFIG, 32, lengths, (32, 256), "total"),
        growth.step_terms(CONFIG, counted, "terms"),
        growth.time_lines({"full": steps}, (list(range(1, 257)), steps), lengths, (32, 256)),
        growth.floor_bars([{"label": "x", "weights": 4, "cache": 1, "seconds": 9.0}], 1),
        growth.width_lines([1, 2, 4], [0.1, 0.1, 0.1]),
        growth.passes(["a"], ["b"]),
    ):
        assert any(c.isdigit() for c in data.describe(picture)) or picture["kind"] == "slots"
        assert figures.draw(picture).png().startswith(b"\x89PNG")


def test_tokens_a_second_grow_with_the_width():
    picture = growth.width_lines([1, 8], [0.5, 1.0])
    assert picture["series"][0]["y"] == [2.0, 8.0]
    assert "Decode: 2 tokens a second. Prefill of 8: 8." in picture["sentence"]


def test_a_saved_png_keeps_every_variants_colour():
    from io import BytesIO

    from PIL import Image

    from kvlab.plots import theme

    kinds = ["none", "growing", "full", "sliding", "quantized", "paged"]
    series = [{"variant": k, "x": [1, 2, 3], "y": [i + 1, i + 2, 3 * i + 4]} for i, k in enumerate(kinds)]
    picture = {"kind": "lines", "title": "six", "series": series, "x": {"label": "x"}, "y": {"label": "y"}}
    image = Image.open(BytesIO(figures.draw(picture).png())).convert("RGB")
    found = {color for _, color in image.getcolors(2**24)}
    assert {theme.rgb(theme.style(k).color) for k in kinds} <= found
