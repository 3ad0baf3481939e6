"""The pictures of shared heads, latents and layers, and every stop of their explorer, against models and counters."""

import xml.etree.ElementTree as ET

import pytest
import torch
from sweeping import swept

import kvlab.mla
from kvlab import cost
from kvlab.config import ModelConfig
from kvlab.memory import estimate, max_seq_len, memory_bytes
from kvlab.model import GPT
from kvlab.plots import charts, figures, sharing
from kvlab.sharing import Pair

SMALL = ModelConfig(hidden_size=64, num_attention_heads=4, num_hidden_layers=1, vocab_size=50, kv_lora_rank=24,
                    qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12)  # fmt: skip
PAIRS = [Pair(0, 1, 0.5, 1.2, 0.7), Pair(1, 2, 0.1, 1.1, 0.9)]
SILENCE = [Pair(None, 2, 0.2, 1.2, 0.8), Pair(None, 1, 0.3, 1.1, 0.9)]


@pytest.fixture(scope="module")
def explorer():
    return sharing.SharingExplorer(strict=True)


def pictures():
    yield sharing.heads_drawn()
    yield sharing.form_lines(SMALL, "small", (16, 64, 256))
    yield sharing.owners_drawn([("half", (0, 0, 2, 2)), ("own", (0, 1, 2, 3))])
    yield sharing.alike_map(torch.eye(3, dtype=torch.float64), torch.eye(3, dtype=torch.float64), "a machine")
    yield sharing.price_lines(PAIRS, SILENCE, "a machine")


@pytest.mark.parametrize("data", list(pictures()), ids=lambda d: d["title"])
def test_both_twins_draw_and_say_numbers(data):
    ET.fromstring(charts.draw(data))
    picture = figures.draw(data)
    assert any(c.isdigit() for c in picture.alt) and picture.png()[:4] == b"\x89PNG"


# ---- the explorer


def test_the_explorer_moves_with_every_control(explorer, capsys):
    shown = swept(explorer, capsys)
    assert {name: len(found) for name, found in shown.items()} == {"kv": 6, "rank": 7, "every": 4, "card": 6, "all": 2}


@pytest.mark.parametrize("kv, rank, every", [(8, 512, 1), (1, 64, 4), (32, 448, 2)])
def test_its_bytes_are_the_calculators_and_its_texts_the_longest_that_fit(explorer, kv, rank, every):
    values = {"kv": kv, "rank": rank, "every": every, "card": "a100-40gb"}
    tokens, texts = explorer.data(values)["panels"]
    layers = 32 // every
    want = [32 * 32 * 256 * 2, layers * kv * 256 * 2, 32 * 256 * 2, layers * (rank + 64) * 2]
    assert [b["values"][0] for b in tokens["bars"]] == want
    for (_, _, config), bar in zip(explorer.configs(values), texts["bars"]):
        with torch.device("meta"):
            params = sum(p.numel() for p in GPT(config).parameters())
        exact = max_seq_len(config, memory_bytes("a100-40gb"), params=params)
        assert bar["values"][0] == pytest.approx(exact, rel=1e-4)


def test_a_latent_of_448_takes_the_bytes_of_two_heads(explorer):
    tokens = explorer.data({"kv": 2, "rank": 448, "every": 1, "card": "l4"})["panels"][0]["bars"]
    assert tokens[1]["values"] == tokens[3]["values"]


def test_the_longest_text_is_the_calculators():
    config = ModelConfig(hidden_size=1024, num_hidden_layers=8, num_attention_heads=8, vocab_size=999)
    params = estimate(config).params
    for tokens in (1, 100, 2047, 2048, 2049, 5000):
        room = estimate(config, 1, tokens).total_bytes
        for spare in (-1, 0, 1):
            want = max_seq_len(config, room + spare, params=params)
            assert sharing.longest(config, room + spare, params) == want


def test_what_does_not_fit_is_marked():
    large = sharing.SharingExplorer(hidden=8192, layers=80, heads=64, strict=True)
    texts = large.data({**large.values, "card": "t4"})["panels"][1]
    assert all(bar["values"] is None for bar in texts["bars"])


# ---- a latent's forms


def test_the_catalogs_shapes_are_the_calculators():
    for name in ("deepseek-v2", "deepseek-v3"):
        assert sharing.latent_config(name).kv_bytes_per_token(2) == estimate(name).kv_bytes_per_token


@pytest.mark.parametrize("form", cost.FORMS)
def test_the_bytes_are_those_of_the_tensors_that_attention_gets(form, monkeypatch):
    given, attend = [], kvlab.mla.attend

    def spying(q, view, *args, **kw):
        given.append((view.k, view.v))
        return attend(q, view, *args, **kw)

    monkeypatch.setattr(kvlab.mla, "attend", spying)
    model = GPT(SMALL)
    kvlab.mla.set_form(model, form)
    with torch.no_grad():
        model(torch.ones(1, 16, dtype=torch.int64))
    ((k, v),) = given
    read = k.numel() if form == "absorbed" else k.numel() + v.numel()  # absorbed values are a part of the keys
    *_, right = sharing.form_lines(SMALL, "small", (16,))["panels"]
    (line,) = [s for s in right["series"] if s["label"] == form]
    assert line["y"] == [2 * read]


def test_the_flops_are_one_layers():
    one, prompt, _ = sharing.form_lines(SMALL, "small", (16, 64))["panels"]
    for s in one["series"]:
        assert s["y"] == [cost.latent_flops(SMALL, 1, n, s["label"]).total for n in (16, 64)]
    for s in prompt["series"]:
        assert s["y"] == [cost.latent_flops(SMALL, n, n, s["label"]).total for n in (16, 64)]


# ---- heads and layers


def test_the_heads_drawn_store_what_the_formula_says():
    labels = [row["label"] for row in sharing.heads_drawn(8, 2, 128, 512)["rows"]]
    assert labels == ["MHA: 2,048 numbers", "GQA, 2 KV heads: 512 numbers", "MQA: 256 numbers", "MLA: 576 numbers"]
    read = [[c["group"] for c in row["cells"]] for row in sharing.heads_drawn()["rows"]]
    assert read[1] == [0] * 4 + [1] * 4 and len(set(read[0])) == 8 and len(set(read[2])) == 1


def test_gemma_3n_follows_the_last_own_layer_of_each_type():
    owners = sharing.same_type_owners()
    assert owners[:20] == tuple(range(20)) and set(owners[20:]) == {18, 19} and owners[24] == owners[34] == 19
    drawn = sharing.owners_drawn([("Gemma 3n", owners)])["rows"][0]["cells"]
    assert sum(c["state"] == "new" for c in drawn) == 20  # those that store anything
    one = estimate("gemma-3n-e4b").kv_bytes_per_token
    assert one == 20 * 2 * 2 * 256 * 2


def test_the_prices_are_sorted_by_layer_and_counted():
    data = sharing.price_lines(PAIRS, SILENCE)
    assert [s["x"] for s in data["series"]] == [[1, 2], [1, 2]] and data["series"][1]["y"] == [0.3, 0.2]
    assert "Of 2 layers, 1 lose more" in data["sentence"]


# ---- another memory


def test_the_bus_is_the_pace_where_its_bytes_take_longer_than_the_weights():
    small, middle, large = sharing.offload_times("llama-7b", "a100-40gb", 30e9, (64, 4096, 65536))
    weights = estimate("llama-7b").weights_bytes / 1555e9
    assert small == (64, pytest.approx(weights + 64 * 2**19 / 1555e9), pytest.approx(weights))
    assert middle[2] == pytest.approx(4096 * 2**19 / 30e9)
    assert large == (65536, None, pytest.approx(65536 * 2**19 / 30e9))
