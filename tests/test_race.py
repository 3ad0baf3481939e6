"""The race: both lanes write the same text, each on its own clock, and the picture says who was how far."""

import types

import pytest

from kvlab import GPT, ModelConfig
from kvlab.plots import figures
from kvlab.race import Race

TOKENIZER = types.SimpleNamespace(
    stop_ids=(), chat=lambda text: [ord(c) for c in text], decode=lambda ids, skip=True: "".join(f"<{i}>" for i in ids)
)


@pytest.fixture(scope="module")
def model():
    return GPT(ModelConfig(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, vocab_size=128))


def test_both_lanes_write_the_same_text(model):
    race = Race(model, TOKENIZER, "Hello", new_tokens=12).run()
    none, full = race.lane("none"), race.lane("full")
    assert none.tokens == full.tokens and none.text == full.text and len(none.tokens) == 12
    assert none.finished and full.finished and not none.stopped
    for lane in race.lanes:
        assert lane.clock == sorted(lane.clock) and len(lane.clock) == 12
        assert lane.speed() == pytest.approx(12 / lane.now)
        assert lane.speed(4, 7) == pytest.approx(4 / (lane.clock[7] - lane.clock[3]))
    assert str(race).count(full.text) == 2


def test_a_lane_stops_at_the_time_limit_and_says_so(model):
    race = Race(model, TOKENIZER, "Hello", new_tokens=12, seconds=1e-9).run()
    assert [len(lane.tokens) for lane in race.lanes] == [1, 1] and all(lane.stopped for lane in race.lanes)
    assert race.sentence().startswith("No lane finished within")
    assert "stopped by the time limit" in str(race)


def test_the_picture_and_its_words_hold_the_numbers(model):
    race = Race(model, TOKENIZER, "Hello", new_tokens=6).run()
    data = race.data(note="a machine")
    assert [s["variant"] for s in data["series"]] == ["none", "full"]
    assert all(s["y"] == list(range(7)) and s["x"][0] == 0 for s in data["series"])
    first, last = sorted(race.lanes, key=lambda lane: lane.now)
    then = sum(t <= first.now for t in last.clock)
    assert f"{then} by then, finished with 6" in race.sentence()
    assert race.sentence() in figures.draw(data).alt
    bundle, _ = race._repr_mimebundle_()
    assert "image/png" in bundle


def test_the_live_view_escapes_the_text(model):
    race = Race(model, TOKENIZER, "Hello", new_tokens=3).run()
    assert "&lt;" in race.html() and "3 tokens in" in race.html()
    race.lane("full").text = "<script>"
    assert "<script>" not in race.html()


def test_more_than_two_kinds_can_race(model):
    race = Race(model, TOKENIZER, "Hi", new_tokens=4, variants=("full", "growing", "paged")).run()
    assert len({tuple(lane.tokens) for lane in race.lanes}) == 1
