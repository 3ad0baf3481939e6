"""The page's JavaScript against kvlab.memory: the same test vectors, made here, through both, in a real browser."""

import json
import random
from pathlib import Path

import pytest

from kvlab.memory import ConfigError, estimate, gpus, max_batch, max_seq_len
from kvlab.plots import memory_page, theme

PAGE = Path(__file__).parents[2] / "figures" / "memory_explorer.html"
NAMES = ("kv_cache_bytes", "state_bytes", "kv_bytes_per_token", "weights_bytes", "activation_bytes", "context_bytes",
         "total_bytes")  # fmt: skip
KEYS = ("model", "batch", "length", "kv", "weights", "tp")


def vectors(seed=0):
    """Every model three times, at random settings, with Python's results beside them."""
    draw, found = random.Random(seed), []
    for model in memory_page.data()["models"] * 3:
        given = {
            "model": model["name"],
            "batch": draw.choice([1, 2, 3, 7, 64, 256]),
            "length": draw.choice([1, 15, 128, 1000, 4096, 5000, 131072, 2**20]),
            "kv": draw.choice(memory_page.KV_DTYPES),
            "weights": draw.choice(memory_page.WEIGHTS_DTYPES),
            "tp": draw.choice([1, 1, 2, 4, 8, 16]),
        }
        options = {"kv_dtype": given["kv"], "weights_dtype": given["weights"], "tensor_parallel": given["tp"]}
        try:
            e = estimate(given["model"], given["batch"], given["length"], **options)
        except ConfigError as error:
            found.append({**given, "error": str(error)})
            continue
        room = draw.choice(gpus())["memory_mib"] * 2**20 if draw.random() < 0.2 else None  # a search takes a while
        result = {name: getattr(e, name) for name in NAMES} | {"said": theme.bytes_(e.total_bytes)}
        if room:
            result["longest"] = max_seq_len(given["model"], room, given["batch"], **options)
            result["largest"] = max_batch(given["model"], room, given["length"], **options)
        found.append({**given, "room": room, "expected": result})
    return found


RUN = """(vectors) => vectors.map((v) => {
  const rest = [v.kv, v.weights, v.tp];
  try {
    const e = kvlab.estimate(v.model, v.batch, v.length, ...rest);
    const found = v.room ? {longest: kvlab.maxSeqLen(v.model, v.room, v.batch, ...rest),
                            largest: kvlab.maxBatch(v.model, v.room, v.length, ...rest)} : {};
    return {...e, said: kvlab.bytes(e.total_bytes), ...found};
  } catch (error) { return {error: error.message}; }
})"""


def test_the_page_computes_what_python_computes(page):
    given = vectors()
    refused = [v for v in given if "error" in v]
    assert len(given) - len(refused) > 200 and len(refused) > 5
    got = page.evaluate(RUN, json.loads(json.dumps(given)))
    for v, result in zip(given, got, strict=True):
        wanted = {"error": v["error"]} if "error" in v else v["expected"]
        assert result == wanted, {k: v[k] for k in KEYS}
    assert page.errors == [] and page.asked == [PAGE.as_uri()]


def test_numbers_are_written_alike(page):
    draw = random.Random(1)
    numbers = [0, 1, 1023, 1024, 1125 * 2**20, 2**30 + 2**27, 2**40] + [draw.randrange(1, 2**45) for _ in range(500)]
    numbers += [n * 2**27 for n in range(1, 200)]  # ties: eighths of a GiB
    assert page.evaluate("(all) => all.map(kvlab.bytes)", numbers) == [theme.bytes_(n) for n in numbers]


def test_a_reader_with_a_keyboard_moves_every_control(page):
    def total():
        return int(page.locator("#n-total").get_attribute("data-bytes"))

    def python():
        v = page.evaluate("kvlab.values()")
        return estimate(v["model"], v["batch"], v["length"], v["kv"], v["tp"], weights_dtype=v["weights"]).total_bytes

    page.locator("#model").focus()  # Tab reaches all controls, in order
    order = []
    for _ in range(7):
        order.append(page.evaluate("document.activeElement.id"))
        page.keyboard.press("Tab")
    assert order == ["model", "card", "batch", "length", "kv", "weights", "tp"]
    for id, key in (("batch", "ArrowRight"), ("length", "ArrowRight"), ("kv", "ArrowDown"), ("weights", "ArrowUp"),
                    ("tp", "ArrowDown"), ("model", "ArrowDown")):  # fmt: skip
        before = total()
        page.locator(f"#{id}").focus()
        page.keyboard.press(key)
        assert total() != before and total() == python(), id
    before = page.locator("#verdict").inner_text()
    page.locator("#card").select_option("NVIDIA H200")
    assert page.locator("#verdict").inner_text() != before
    assert page.locator("#batch").get_attribute("aria-valuetext") == "8 sequences"
    assert page.errors == []


def test_every_stop_of_every_control_draws(page):
    stops = page.evaluate("""() => {
      const said = [];
      for (const control of document.querySelectorAll("#controls select, #controls input")) {
        const start = control.value;
        const all = control.options ? [...control.options].map((o) => o.value)
                                    : Array.from({length: Number(control.max) + 1}, (_, i) => String(i));
        for (const value of all) {
          control.value = value;
          control.dispatchEvent(new Event("input", {bubbles: true}));
          const words = [document.getElementById("verdict").textContent,
                         ...[...document.querySelectorAll("svg[role=img]")].map((s) => s.getAttribute("aria-label"))];
          said.push([control.id, value, words.join(" ")]);
        }
        control.value = start;
      }
      return said;
    }""")
    assert {id for id, _, _ in stops} == {"model", "card", "batch", "length", "kv", "weights", "tp"}
    for id, value, words in stops:
        assert not any(bad in words for bad in ("NaN", "undefined", "Infinity")), (id, value, words)
        assert any(c.isdigit() for c in words)
    assert page.errors == []


def test_what_cannot_be_is_one_sentence_and_no_picture(page):
    page.evaluate("kvlab.put({model: 'openai-community/gpt2', tp: 8}); kvlab.draw()")
    assert page.locator("#verdict").inner_text() == (
        "This cannot be: tensor_parallel=8 does not divide the model's 12 attention heads."
    )
    assert page.locator("#result").is_hidden()
    page.evaluate("kvlab.put({tp: 4}); kvlab.draw()")
    assert page.locator("#result").is_visible()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_phone(page, scheme):
    page.emulate_media(color_scheme=scheme)
    page.set_viewport_size({"width": 320, "height": 700})
    assert page.evaluate("document.documentElement.scrollWidth") <= 320
    for box in page.locator("select, input, svg").all():
        assert box.bounding_box()["x"] + box.bounding_box()["width"] <= 320


def test_the_address_keeps_the_settings(page):
    page.locator("#length").focus()
    page.keyboard.press("End")
    address, total = page.url, page.locator("#n-total").inner_text()
    page.goto("about:blank")
    page.goto(address)
    assert page.locator("#n-total").inner_text() == total
