"""figures/memory_explorer.html without a browser: it is as generated, whole, and knows what the catalog knows."""

import json
import re
from pathlib import Path

import pytest

from kvlab import gallery
from kvlab.memory import estimate, gpus, models
from kvlab.plots import memory_page, theme

SAVED = Path(__file__).parents[2] / "figures" / "memory_explorer.html"
PAGE = memory_page.page()


def test_the_saved_page_is_as_generated(tmp_path):
    assert gallery.draw("memory_explorer", tmp_path) == [tmp_path / "memory_explorer.html"]
    assert (tmp_path / "memory_explorer.html").read_text(encoding="utf-8") == PAGE
    assert SAVED.read_text(encoding="utf-8") == PAGE, "run: make figures"


def test_the_page_needs_nothing_from_elsewhere():
    assert "{{" not in PAGE
    assert not re.search(r"https?:|//cdn|<script[^>]+src|<link[^>]+stylesheet|@import|url\(|fetch\(|XMLHttp", PAGE)
    assert len(PAGE) < 120_000


def test_every_model_whose_weights_are_known_and_every_card_is_there():
    data = json.loads(re.search(r'id="data">(.*?)</script>', PAGE, re.S)[1])
    assert {m["name"] for m in data["models"]} == {m["name"] for m in models() if estimate(m["name"]).params}
    assert [(c["name"], c["bytes"]) for c in data["cards"]] == [(g["name"], g["memory_mib"] * 2**20) for g in gpus()]
    assert data["start"]["model"] in {m["name"] for m in data["models"]}
    assert data["start"]["card"] in {c["name"] for c in data["cards"]}


def test_every_control_has_a_label_and_the_verdict_is_announced():
    for id in re.findall(r'<(?:select|input) id="([\w-]+)"', PAGE):
        assert re.search(rf'<label>(?:(?!</label>).)*id="{id}"', PAGE, re.S), id
    assert re.search(r'id="verdict" role="status" aria-live="polite"', PAGE)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_words_have_contrast(scheme):
    light, dark = re.findall(r":root\{([^}]*)\}", memory_page.colors())
    of = dict(part.split(":") for part in (light if scheme == "light" else dark).strip(";").split(";"))
    for words in ("ink", "muted", "alert"):
        assert theme.contrast(of[f"--{words}"], of["--paper"]) >= 4.5, words
    assert theme.contrast(of["--fits-ink"], of["--fits"]) >= 4.5
    for shape in ("cache", "weights", "alert"):
        assert theme.contrast(of[f"--{shape}"], of["--paper"]) >= 3, shape
