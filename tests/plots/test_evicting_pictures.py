"""The pictures of eviction, every head of their explorer, and the frontier in three drawings."""

import xml.etree.ElementTree as ET

import pytest
import torch
from sweeping import swept

from kvlab.budgets import attention_by_rank
from kvlab.check import tiny_model
from kvlab.frontier import Point
from kvlab.kept import Kept
from kvlab.plots import charts, evicting, figures
from kvlab.quality import evaluate

IDS = torch.randint(0, 499, (40,), generator=torch.Generator().manual_seed(0)).tolist()
POINTS = [
    Point("full cache", "", "full", 1000, 10.0, 0.0, 1.0),
    Point("quantized per channel", "4 bits", "quantized", 300, 10.5, 0.01, 0.95),
    Point("quantized per channel", "2 bits", "quantized", 200, 14.0, 0.3, 0.7),
    Point("heavy hitters", "20 %", "heavy_hitter", 200, 11.0, 0.1, 0.9),
    Point("layers", "shared by 2", "shared", 500, 9e4, 10.0, 0.01),
]


@pytest.fixture(scope="module")
def by_rank():
    return attention_by_rank(tiny_model(), IDS, after=10)


@pytest.fixture(scope="module")
def kept():
    notes = {"heavy hitters": Kept("heavy_hitter", every=2, budget=8), "random": Kept("random", every=2, budget=8)}
    evaluate(tiny_model(), IDS, notes, progress=False)
    return notes


def draws(data):
    ET.fromstring(charts.draw(data))
    picture = figures.draw(data)
    assert any(c.isdigit() for c in picture.alt) and picture.png()[:4] == b"\x89PNG"
    return picture


def test_how_many_keys_draw_a_share():
    shares = torch.tensor([[[0.6, 0.3, 0.1], [0.4, 0.35, 0.25]]], dtype=torch.float64)
    assert evicting.needed(shares, 0.5).tolist() == [[1, 2]]
    assert evicting.needed(shares, 0.89).tolist() == [[2, 3]]


def test_attention_by_rank_falls_and_is_summed_up(by_rank):
    data = evicting.rank_lines(by_rank, "a machine")
    for s in data["series"]:
        assert s["y"] == sorted(s["y"], reverse=True) and s["x"][0] == 1
    half = next(i for i in range(1, 41) if by_rank.mean((0, 1))[:i].sum() >= 0.5)
    assert f"the {half} heaviest draw half" in data["sentence"]
    even, _, pointed = (s["label"] for s in data["series"])
    assert (even, pointed) == ("most even head", "most pointed head")
    draws(data)


def test_the_explorer_shows_every_head(kept, capsys):
    explorer = evicting.KeptExplorer(kept, 1, 1, "a machine", strict=True)
    shown = swept(explorer, capsys)
    assert set(shown) == {"layer", "head", "all"}
    heavy, chance = explorer.data({"layer": 1, "head": 0})["panels"]
    assert heavy["values"] == kept["heavy hitters"].grid(1, 0, 40)[0] and heavy["values"] != chance["values"]
    held = kept["random"].notes[-1][1, 0].tolist()
    said = explorer.data({"layer": 1, "head": 0})["sentence"]
    assert f"random: {sum(0 <= p < 20 for p in held)} of the 8 tokens held are from the first half" in said
    draws(explorer.data(explorer.values))


def test_the_frontier_is_what_nothing_beats_and_what_lies_off_the_scale_is_named():
    data = evicting.frontier(POINTS, 10.0, "Memory against quality", "a machine")
    ink, *lines = data["series"]
    assert ink["x"] == [200, 300, 1000] and ink["y"] == pytest.approx([0.1, 0.05, evicting.LEAST])
    assert [p.title for p in data["off_scale"]] == ["layers, shared by 2"]
    (bits,) = [s for s in lines if s["label"] == "quantized per channel"]
    assert bits["x"] == [200, 300] and bits["names"] == ["2 bits", "4 bits"] and bits["y"] == pytest.approx([0.4, 0.05])
    assert {s["label"] for s in lines} == {"quantized per channel", "heavy hitters, 20 %", "full cache"}
    assert "2 bits 40 % at 200 B" in draws(data).alt


def test_names_that_would_be_printed_over_each_other_are_said_once():
    def point(line, name, nbytes, perplexity):
        return Point(line, name, "quantized", nbytes, perplexity, 0.1, 0.9)

    points = [point("per token", "8 bits", 1000, 10.1), point("per token", "4 bits", 600, 14.0),
              point("per channel", "8 bits", 1010, 10.11), point("per channel", "4 bits", 600, 11.0)]  # fmt: skip
    _, first, second = evicting.frontier(points, 10.0, "Memory against quality")["series"]
    assert first["names"] == ["4 bits", "8 bits"] and second["names"] == ["4 bits", ""]


def test_hovering_tells_bytes_perplexity_kl_and_agreement():
    data = evicting.frontier(POINTS, 10.0, "Memory against quality")
    figure = evicting.plotly_frontier(data, POINTS, 10.0)
    told = [text for trace in figure.data for text in trace.text]
    assert "<b>heavy hitters, 20 %</b><br>200 B<br>perplexity 11.00<br>KL 0.1000 nats<br>top-1 90.0%" in told
    assert all("perplexity" in text for text in told) and len(told) == 7  # four points, three of them on the frontier
