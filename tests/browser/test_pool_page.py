"""figures/pool_explorer.html in a real browser: every step shows what kvlab's trace says; play, keyboard, phones."""

import re
from pathlib import Path

import pytest

from kvlab.plots import pool

pytestmark = pytest.mark.browser
PAGE = Path(__file__).parents[2] / "figures" / "pool_explorer.html"
SWEEP = """() => {
  const said = [], step = document.getElementById("step");
  for (let i = 0; i <= Number(step.max); i++) {
    step.value = i;
    step.dispatchEvent(new Event("input"));
    said.push([[...document.querySelectorAll("#cells span")].map((s) => s.textContent.trim()).join(","),
               document.getElementById("said").textContent]);
  }
  return said;
}"""


@pytest.mark.parametrize("kept", pool.KEPT)
def test_every_step_is_the_traces(page, kept):
    page.locator("#kept").select_option(kept)
    trace = pool.recorded(kept)
    wanted = [
        [",".join(c["text"] for c in pool.cells(trace, step)), pool.said(trace, step)] for step in range(trace.step)
    ]
    assert page.evaluate(SWEEP) == wanted
    assert page.errors == [] and page.asked == [PAGE.as_uri()]


def test_it_plays_and_pauses_and_the_line_goes_along(page):
    from playwright.sync_api import expect

    def line():
        return float(page.locator("#picture line.at").get_attribute("x1"))

    before = line()
    page.locator("#play").focus()
    page.keyboard.press("Enter")
    expect(page.locator("#shown")).to_have_text(re.compile(r"2[7-9]|[3-6]\d"), timeout=10_000)
    assert page.locator("#play").get_attribute("aria-pressed") == "true" and line() > before
    page.keyboard.press("Enter")
    stopped = page.locator("#shown").inner_text()
    page.wait_for_timeout(600)
    assert page.locator("#shown").inner_text() == stopped
    page.locator("#step").focus()
    page.keyboard.press("ArrowRight")
    assert page.locator("#shown").inner_text() == str(int(stopped) + 1)
    page.keyboard.press("End")
    page.locator("#play").click()  # at the end it begins again
    expect(page.locator("#shown")).to_have_text(re.compile(r"^\d$"), timeout=10_000)
    assert page.errors == []


def test_it_fits_a_phone(page):
    page.set_viewport_size({"width": 320, "height": 700})
    assert page.evaluate("document.documentElement.scrollWidth") <= 320
