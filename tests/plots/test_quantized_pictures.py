"""Notebook 05's pictures: every stop of every slider, and that they show what the codecs and the calculator say."""

import pytest
import torch
from sweeping import swept

from kvlab import rounding
from kvlab.caches.codecs import make_codec
from kvlab.exercise_list import smollm2
from kvlab.memory import estimate, max_batch, memory_bytes
from kvlab.plots import byte, charts, data, figures, quantized, speed


@pytest.fixture(scope="module")
def explorers():
    """One of each: making one draws its PNG, and every test asks for its data alone."""
    keys = outlier_keys()
    return {
        "byte": byte.ByteExplorer(strict=True),
        "channels": quantized.ChannelExplorer(keys, keys.flip(0), layer=1, head=0, strict=True),
        "bytes": quantized.BytesExplorer(smollm2(), "SmolLM2", strict=True),
        "speed": speed.SpeedExplorer(strict=True),
    }


def at(explorer, **values):
    return explorer.data({**explorer.values, **values})


def text_rows(explorer, **values):
    slots = at(explorer, **values)["panels"][0]
    return {row["label"]: [c["text"] for c in row["cells"]] for row in slots["rows"]}


def outlier_keys(layers=2, heads=2, S=150, D=16):
    k = torch.randn(layers, heads, S, D, generator=torch.Generator().manual_seed(0))
    k[..., 5] += 20
    return k


# ---- one number


def test_the_byte_explorer_moves_with_every_control(explorers, capsys):
    shown = swept(explorers["byte"], capsys)
    assert len(shown["value"]) == 41 and len(shown["group"]) == 3 and len(shown["bits"]) == 5
    assert len(shown["outlier"]) == 6


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("group", [2, 4, 8])
@pytest.mark.parametrize("value", [-2.0, 0.0, 0.5, 2.0])
def test_its_codes_are_those_of_the_cache(explorers, bits, group, value):
    explorer, values = explorers["byte"], {"bits": bits, "group": group, "value": value}
    rows = text_rows(explorer, **values)
    x = explorer.numbers({**explorer.values, **values})
    codes = [int(c) for c in rows["code"]]
    words = [f"{c:0{bits}b}" for c in codes]
    assert rows.get("bits", words) == words and len(codes) == group and ("bits" in rows) == (bits < 8)
    zero, scale = x.min().item(), (x.max() - x.min()).item() / (2**bits - 1)
    for number, code, back, error in zip(x.tolist(), codes, rows["comes back"], rows["error"]):
        assert abs(zero + scale * code - number) <= scale / 2 * 1.01 + 2e-3
        assert float(back) == pytest.approx(number + float(error), abs=0.011)
    said = at(explorer, **values)["sentence"]
    first = int(words[0], 2)
    for i, word in enumerate(words[1 : 8 // bits], 1):
        first |= int(word, 2) << bits * i
    if group >= 8 // bits:
        assert f"0x{first:02X}." in said


@pytest.mark.parametrize("bits", ["fp8", "fp8_e5m2"])
def test_its_fp8_bits_are_the_float(explorers, bits):
    exponent = 4 if bits == "fp8" else 5
    for value in (-2.0, -0.3, 0.0, 0.1, 1.7):
        rows = text_rows(explorers["byte"], bits=bits, value=value)
        said = at(explorers["byte"], bits=bits, value=value)["sentence"]
        code, back = rows["code"][0], rows["comes back"][0]
        sign, power, fraction = said.split(f"{code} is ")[1].split(".")[0].split()
        assert len(power) == exponent and len(fraction) == 7 - exponent
        e, f = int(power, 2), int(fraction, 2) / 2 ** len(fraction)
        bias = 2 ** (exponent - 1) - 1
        size = (1 + f) * 2.0 ** (e - bias) if e else f * 2.0 ** (1 - bias)
        assert float(back) == pytest.approx(size * (-1) ** int(sign), abs=0.006)


def test_an_outlier_costs_its_neighbours_in_int4_and_not_in_fp8(explorers):
    lost = {}
    for bits in (4, "fp8"):
        for outlier in (1, 32):
            rows = text_rows(explorers["byte"], bits=bits, outlier=outlier)
            lost[bits, outlier] = max(abs(float(e)) for e in rows["error"][:-1])
    assert lost[4, 32] > 3 * lost[4, 1] and lost["fp8", 32] == lost["fp8", 1]


def test_the_stairs_have_as_many_steps_as_codes(explorers):
    for bits, steps in ((4, 16), (2, 4)):
        stairs = at(explorers["byte"], bits=bits)["panels"][1]
        assert len({round(y, 6) for y in stairs["series"][1]["y"]}) == steps
        assert stairs["title"] == f"{steps} values come back"


def test_the_grids_are_the_floats_own():
    e4m3, e5m2, *_ = byte.float_grids()["series"]
    assert e4m3["x"][0] == 2.0**-9 and e4m3["x"][-1] + e4m3["y"][-1] == 448
    assert e5m2["x"][0] == 2.0**-16 and e5m2["x"][-1] + e5m2["y"][-1] == 57344
    assert dict(zip(e4m3["x"], e4m3["y"]))[1.0] == 1 / 8 and dict(zip(e5m2["x"], e5m2["y"]))[1.0] == 1 / 4


# ---- channels


def test_the_channel_explorer_moves_with_every_control(explorers, capsys):
    shown = swept(explorers["channels"], capsys)
    assert len(shown["layer"]) == len(shown["head"]) == len(shown["what"]) == 2 and len(shown["bits"]) == 3


def test_its_errors_are_those_of_the_codecs(explorers):
    picture = at(explorers["channels"], layer=1, head=0)
    size, token, channel = picture["panels"]
    x = outlier_keys()[1, 0, :128]
    for panel, axis in ((token, "token"), (channel, "channel")):
        codec = make_codec(4, axis, 64, 16)
        off = (codec.decode(*codec.encode(x[None, None]), dtype=x.dtype)[0, 0] - x).abs()
        for row, values in zip(panel["rows"], panel["values"]):
            assert values == pytest.approx(off[int(row)].tolist(), abs=1e-3)
    assert token["hi"] == channel["hi"] > 0
    assert [max(range(16), key=row.__getitem__) for row in size["values"]] == [5] * len(size["values"])
    assert "channel 5 is" in picture["sentence"]


def test_the_outlier_map_has_a_row_for_each_head():
    keys = outlier_keys(layers=3)
    picture = quantized.outlier_map(keys, "a note")
    assert len(picture["values"]) == 6 and all(row[5] == max(row) > 5 for row in picture["values"])
    assert picture["rows"] == ["layer 0", "", "layer 1", "", "layer 2", ""]
    assert charts.draw(picture).startswith("<svg")


# ---- bytes and quality


def test_the_bytes_explorer_moves_with_every_control(explorers, capsys):
    shown = swept(explorers["bytes"], capsys)
    assert len(shown["tokens"]) == 9 and len(shown["group"]) == 4 and len(shown["residual"]) == 4


@pytest.mark.parametrize("axis", ["channel", "token"])
@pytest.mark.parametrize("tokens, group, residual", [(128, 16, 0), (1024, 64, 64), (32768, 128, 128)])
def test_its_bars_are_what_the_calculator_holds(explorers, axis, tokens, group, residual):
    picture = at(explorers["bytes"], tokens=tokens, group=group, residual=residual, axis=axis)
    assert sum(picture["bars"][0]["values"]) == tokens * smollm2().kv_bytes_per_token(2)
    options = {"key_axis": axis, "group_size": group, "residual_length": residual}
    for bits, bar in zip((8, "fp8", 4, 2), picture["bars"][1:]):
        want = estimate(smollm2(), 1, tokens, cache="quantized", k_bits=bits, v_bits=bits, **options).held_bytes
        assert sum(bar["values"]) == want
    assert ("int4 saves 4" in picture["sentence"]) is False


def test_the_frontier_joins_the_points_of_a_line_by_bytes():
    points = [("full", "", 100, 10.0, 0), ("per token", "int4", 30, 12.0, 0.1), ("per token", "int2", 20, 90.0, 2.0),
              ("fp8", "e4m3", 60, 10.5, 0.01)]  # fmt: skip
    picture = quantized.frontier(points, "Memory against perplexity")
    left, right = picture["panels"]
    for panel in (left, right):  # the full cache loses nothing and has no KL: the sentence names it
        assert [s["label"] for s in panel["series"]] == ["per token", "fp8 e4m3"]
        assert panel["series"][0]["x"] == [20, 30] and panel["series"][0]["names"] == ["int2", "int4"]
    assert left["series"][0]["y"] == pytest.approx([8.0, 0.2]) and left["series"][1]["y"] == pytest.approx([0.05])
    words = data.describe(picture)
    assert "int2 800 %" in words and "100 B, perplexity 10" in picture["sentence"]
    luck = quantized.frontier([*points[:3], ("fp8", "e4m3", 60, 9.9, 0.01)], "Memory against perplexity")
    assert luck["panels"][0]["series"][1]["y"] == [quantized.LEAST]  # less than the full cache's: drawn as no loss
    assert figures.draw(picture).png()[:4] == b"\x89PNG"


def test_growth_leaves_out_what_is_not_rounded_yet():
    e = torch.cat((torch.zeros(3, 64), torch.full((3, 136), 0.25)), 1) * torch.tensor([[1.0], [2], [4]])
    layers, text = quantized.error_growth({"int4 per token": e})["panels"]
    assert layers["series"][0]["y"] == [0.25, 0.5, 1.0] and layers["series"][0]["x"] == [1, 2, 3]
    assert text["series"][0]["x"] == [96, 160, 196] and text["series"][0]["y"] == [1.0] * 3


# ---- speed


def test_the_speed_explorer_moves_with_every_control(explorers, capsys):
    shown = swept(explorers["speed"], capsys)
    assert len(shown["model"]) == 3 and len(shown["card"]) == 5 and len(shown["length"]) == 8


@pytest.mark.parametrize("model, card, tokens", [("llama-7b", "a100-40gb", 2048), ("llama-3.1-8b", "l4", 8192)])
def test_its_lines_end_at_the_largest_batch(explorers, model, card, tokens):
    lines, bars = at(explorers["speed"], model=model, card=card, length=tokens)["panels"]
    for series, bar, kv in zip(lines["series"], bars["bars"], speed.SPEED_FORMATS.values()):
        most = max_batch(model, memory_bytes(card), tokens, kv_dtype=kv, weights_dtype="fp16")
        assert bar["values"] == [most] and series["x"][-1] == most
        assert speed.speed_limit(model, card, most + 1, tokens, kv) is None
    e = estimate("llama-7b", 8, 2048, "int4/64")
    want = 8 * 1555e9 / (e.weights_bytes + e.kv_cache_bytes)
    assert speed.speed_limit("llama-7b", "a100-40gb", 8, 2048, "int4/64") == pytest.approx(want)


def test_it_says_what_does_not_fit(explorers):
    values = {"card": "l4", "length": 32768, "batch": 1}
    assert "fp16 does not fit" in at(explorers["speed"], **values)["sentence"]
    assert "does not fit, not even in int4" in at(explorers["speed"], model="llama-2-13b", **values)["sentence"]


def test_the_work_table_has_a_line_for_each_way():
    w = rounding.Work(products=2_000_000, elementwise=0, written=2**20, peak=2**10)
    table = speed.work_table({"fold": (2**21, w), "decode": (2**21, w)}).split("\n")
    assert len(table) == 3 and len({len(line) for line in table}) == 1
    assert all(word in table[1] for word in ("fold", "2 MiB", "2 MFLOP", "0 FLOP", "1 MiB", "1 KiB"))


def test_two_numbers_in_int2_share_a_byte_with_two_that_are_not_shown(explorers):
    picture = at(explorers["byte"], bits=2, group=2)
    assert "four codes" in picture["sentence"] and all(len(r["cells"]) == 2 for r in picture["panels"][0]["rows"])
