"""Notebook 07 in JupyterLab: the pool's slider and play button move its step, and the film plays; nothing fails."""

import re

import pytest

pytestmark = pytest.mark.browser
NOTEBOOK = "solutions/07_paged_cache.ipynb"


def step_of(label):
    return int(re.search(r"step (\d+): ", label)[1])


@pytest.mark.timeout(900)
def test_the_pool_follows_its_slider_and_plays(run_notebook, push_every_slider, tracebacks):
    from playwright.sync_api import expect

    page = run_notebook(NOTEBOOK, until="show_plotly(")
    labels = push_every_slider(page)
    assert [step_of(label) for label in labels] == [24, 25], "the explorer has one slider: the step"
    assert all("192 slots over 65 steps" in label for label in labels), labels

    explorer = page.locator(".widget-vbox", has=page.locator(".widget-play")).first
    picture = explorer.locator("[role=img][aria-label]").first
    play = explorer.locator(".widget-play button")
    play.first.click()
    expect(picture).to_have_attribute("aria-label", re.compile(r"step (2[7-9]|[3-6]\d): "), timeout=20_000)
    play.nth(0).click()  # pause, on the same button
    assert explorer.locator("[data-error]").count() == 0

    explorer.locator("select").select_option(label="64 slots reserved")
    expect(picture).to_have_attribute("aria-label", re.compile("192 slots over 108 steps"), timeout=10_000)

    film = page.locator(".js-plotly-plot").first
    film.scroll_into_view_if_needed()
    film.locator("text=play").first.click()
    shown = film.locator(".slider-label").first
    expect(shown).to_have_text(re.compile(r"model step ([3-9]|\d\d)"), timeout=30_000)
    assert tracebacks(page) == []
