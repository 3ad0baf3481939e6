"""The pictures of sliding windows, the ring at every stop of its explorer, and the numbers that both say."""

import xml.etree.ElementTree as ET

import pytest
import torch
from sweeping import swept

from kvlab.attention import visible
from kvlab.caches import SlidingWindowCache
from kvlab.plots import charts, figures, ring, sliding, theme
from kvlab.quality import Spread

MODELS = ["llama-3.1-8b", "mistral-7b-v0.1", "gemma-3-27b"]
FOUND = {(k, s): Spread(10 + k, 9 + k, 12 + k) for k in (32, 64, 128) for s in (False, True)}
TOLD = {(k, s): Spread(k / 128, 0.0, 1.0) for k in (32, 64, 128) for s in (False, True)}
CHANGES = torch.tensor([[1.0, 0.5, 0.0, 0.0], [2.0, 0.1, 0.01, 0.0], [2.0, 0.1, 0.01, 0.0]])


def pictures():
    yield sliding.cap_bars("llama-7b", 8, 500, [64, 512], 4 * 2**30)
    yield sliding.held_lines({"full": [(8, 800), (16, 800)], "sliding": [(8, 400), (16, 400)]}, 8, "Live", "a machine")
    yield sliding.streamed_lines([(1, 400, 100), (8, 400, 400)], 100, "a machine")
    yield sliding.share_lines([0.5, 0.7], [0.1, 0.1], "a machine")
    yield sliding.perplexity_lines(FOUND, Spread(9, 8, 10))
    yield sliding.recall_lines(TOLD, Spread(1, 0.9, 1), 60, 30)
    yield sliding.heard_map(CHANGES, 2, "Heard", "a machine")
    yield sliding.patterns(MODELS)
    yield sliding.pattern_lines(MODELS)


@pytest.mark.parametrize("data", list(pictures()), ids=lambda d: d["title"])
def test_both_twins_draw_and_say_numbers(data):
    ET.fromstring(charts.draw(data))
    picture = figures.draw(data)
    assert any(c.isdigit() for c in picture.alt) and picture.png()[:4] == b"\x89PNG"


def test_the_cap_counts_all_tokens_but_the_last():
    (bar,) = sliding.cap_bars("llama-7b", 2, 10, [5], 1)["bars"]
    assert sum(bar["values"]) == 2 * 14 * 2**19 and bar["values"][0] == 2 * 10 * 2**19


def test_the_marks_stand_where_the_layers_reach():
    marks = [m["value"] for m in sliding.recall_lines(TOLD, Spread(1, 1, 1), 60, 30)["marks"]]
    assert marks == [3, 61]  # 30 * (3 - 1) = 60


def test_what_is_exactly_zero_stays_empty():
    data = sliding.heard_map(CHANGES, 2, "Heard")
    assert data["rows"] == ["logits", "2", "1"]  # the input at the bottom
    assert data["values"][-1] == [0.0, pytest.approx(-0.30103), None, None]


def test_patterns_are_the_catalogs():
    rows = {r["label"]: "".join(str(c["group"]) for c in r["cells"]) for r in sliding.patterns(MODELS)["rows"]}
    assert rows["Llama-3.1-8B"] == "0" * 24 and rows["Mistral-7B-v0.1: 4,096"] == "1" * 24
    assert rows["gemma-3-27b-it: 1,024"] == "111110" * 4


def test_what_windows_leave():
    shares = {s["label"]: s["y"] for s in sliding.pattern_lines(MODELS, [1024, 4096, 8192])["series"]}
    assert shares["Llama-3.1-8B"] == [1, 1, 1] and shares["Mistral-7B-v0.1"] == [1, 1, 0.5]
    assert shares["gemma-3-27b-it"] == pytest.approx([1, (10 + 52 / 4) / 62, (10 + 52 / 8) / 62])


# ---- the ring


@pytest.mark.parametrize("window, sinks", [(1, 0), (1, 3), (2, 0), (6, 2), (12, 4), (5, 0)])
def test_the_ring_drawn_is_the_ring_of_the_cache(window, sinks):
    for tokens in range(1, ring.TEXT + 1):
        data = ring.ring(tokens, window, sinks)
        text, before, after, distance = (r["cells"] for r in data["rows"])
        seen = visible(torch.tensor([[tokens - 1]]), torch.arange(tokens)[None], window, sinks)[0, 0, 0]
        held = {int(c["text"]) for c in after if c["text"]}
        assert held == set(seen.nonzero()[:, 0].tolist())  # what lies in the slots is what the mask shows
        assert [c["state"] == "evicted" for c in text[:tokens]] == [not s for s in seen.tolist()]
        assert len(after) == window + sinks == len(before) == len(distance)
        assert sum(c["state"] == "new" for c in after) == 1
        assert f"sees {len(held)} of {tokens} tokens" in data["sentence"]
        assert {c["text"] for c in distance} - {""} == {str(tokens - 1 - p) for p in held}


def test_a_slot_that_is_overwritten_is_named():
    data = ring.ring(12, 6, 2)
    assert data["sentence"].startswith("Token 11 goes to slot 5 = 2 + (11 - 2) mod 6 and overwrites token 5.")
    assert data["rows"][1]["cells"][5] == {"text": "5", "group": 0, "state": "evicted"}


def test_in_the_cache_a_sink_stays_at_its_distance():
    for tokens in (9, 20, 24):
        cells = ring.ring(tokens, 6, 2, "cache")["rows"][3]["cells"]
        assert [c["text"] for c in cells[:2]] == ["7", "6"], tokens  # window + sinks - 1 - j
    before = ring.ring(7, 6, 2, "cache")["rows"][3]["cells"]
    assert [c["text"] for c in before[:2]] == ["6", "5"]  # not full yet: where they are in the text


def test_every_stop_of_the_ring_draws_within_a_tick(capsys):
    explorer = ring.RingExplorer()
    shown = swept(explorer, capsys)
    assert all(len(shown[name]) > 1 for name in explorer.by_name), shown


def test_the_explorer_draws_the_caches_slots():
    explorer = ring.RingExplorer().set(token=20, window=4, sinks=1)
    slots = SlidingWindowCache(window=4, sinks=1).positions([21])[0].tolist()
    (label,) = explorer.labels
    assert "slots after: 0 (sink) " + " ".join(f"{p} (new)" if p == 20 else str(p) for p in slots[1:]) in label
    assert theme.number(20) in explorer.snapshot().alt
