"""JupyterLab on the loopback interface, and the system's Chromium to look at it. Skipped where there is no Chromium."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import nbformat
import pytest

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
PICTURE = "[role=img][aria-label]"
HANDLE = ".noUi-handle, .ui-slider-handle"  # ipywidgets 8, ipywidgets 7
RUN_ALL = """async () => {
  const app = window.jupyterapp, panel = app.shell.currentWidget;
  await panel.context.ready;                       // without these four waits, "run all" silently does nothing
  await panel.sessionContext.ready;
  await panel.sessionContext.session.kernel.info;
  await panel.revealed;
  await app.commands.execute('notebook:run-all-cells');
}"""


@pytest.fixture(scope="session")
def lab(tmp_path_factory):
    """(address, folder) of a running JupyterLab whose root is `folder`; its settings are its own, not the user's."""
    home, folder = tmp_path_factory.mktemp("jupyter"), tmp_path_factory.mktemp("notebooks")
    (home / "labconfig").mkdir()
    news = {"disabledExtensions": {"@jupyterlab/apputils-extension:announcements": True}}  # its pop-up covers the page
    (home / "labconfig" / "page_config.json").write_text(json.dumps(news))
    tracker = home / "settings" / "@jupyterlab" / "notebook-extension" / "tracker.jupyterlab-settings"
    tracker.parent.mkdir(parents=True)
    tracker.write_text(json.dumps({"windowingMode": "none"}))  # else cells out of sight are not in the page
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = os.environ | {
        "JUPYTER_CONFIG_DIR": str(home),
        "JUPYTER_DATA_DIR": str(home / "data"),
        "JUPYTER_RUNTIME_DIR": str(home / "runtime"),
        "JUPYTERLAB_SETTINGS_DIR": str(home / "settings"),
        "JUPYTERLAB_WORKSPACES_DIR": str(home / "workspaces"),
        "KVLAB_BUDGET": "quick",
        "OMP_NUM_THREADS": "1",  # on a busy machine, threads that wait for each other take minutes over seconds
    }
    command = [sys.executable, "-m", "jupyter", "lab", "--no-browser", "--allow-root", "--expose-app-in-browser"]
    command += ["--ip=127.0.0.1", f"--port={port}", "--ServerApp.port_retries=0", "--IdentityProvider.token="]
    command += [f"--ServerApp.root_dir={folder}"]
    log = open(home / "log.txt", "w")  # noqa: SIM115  it outlives this block
    server = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            try:
                urllib.request.urlopen(f"{address}/api", timeout=1).close()
                break
            except OSError:
                assert server.poll() is None, (home / "log.txt").read_text()
                time.sleep(0.1)
        yield address, folder
    finally:
        server.terminate()
        server.wait(20)
        log.close()


@pytest.fixture(scope="session")
def browser():
    if CHROMIUM is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(
            "no Chromium on this machine (on Debian: apt install chromium)"
        )
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # Chromium's own sandbox does not start for root, as in CI's containers
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-dev-shm-usage"])
        yield browser
        browser.close()


@pytest.fixture
def run_notebook(browser, lab):
    """run_notebook(name, until=None): open a copy of that notebook (a path in notebooks/, or one that lies in the lab's
    folder), run its cells, all of them or those up to the first that holds the text `until`, and return the page."""
    address, folder = lab
    page = browser.new_page(viewport={"width": 1400, "height": 1000})

    def run(name, until=None, seconds=600):
        if (path := NOTEBOOKS / name).exists():  # a copy: the run must not touch the saved one
            nb, name = nbformat.read(path, 4), path.name
            if until is not None:  # test-notebooks runs the rest
                nb.cells = nb.cells[: 1 + next(i for i, cell in enumerate(nb.cells) if until in cell.source)]
            nbformat.write(nb, folder / name)
        page.set_default_timeout(60_000)
        page.goto(f"{address}/lab/tree/{name}?reset")
        page.wait_for_function("window.jupyterapp?.shell.currentWidget?.context?.path !== undefined")
        page.set_default_timeout(seconds * 1000)
        page.evaluate(RUN_ALL)
        page.set_default_timeout(10_000)
        return page

    yield run
    page.close()


@pytest.fixture
def page(browser, request):
    """The file PAGE of the test module, open in a tab; errors and asked: what it complained of and asked for."""
    page = browser.new_page(viewport={"width": 1100, "height": 900})
    page.errors, page.asked = [], []
    page.on("pageerror", lambda error: page.errors.append(str(error)))
    page.on("console", lambda message: page.errors.append(message.text))
    page.on("request", lambda asked: page.asked.append(asked.url))
    page.goto(request.module.PAGE.as_uri())
    yield page
    page.close()


@pytest.fixture
def tracebacks():
    """tracebacks(page): what failed in the notebook's cells and callbacks, as shown."""
    stderr = ".jp-OutputArea-output[data-mime-type='application/vnd.jupyter.stderr']"
    return lambda page: page.locator(stderr, has_text="Traceback").all_inner_texts()


@pytest.fixture
def push_every_slider():
    return _push_every_slider


def _push_every_slider(page) -> list[str]:
    """Move each slider of the page's first explorer by one step; return what the picture's aria-label said at first and
    after each step. Fails if a step does not change it within 10 seconds, or if an error stands in the picture's place.
    """
    from playwright.sync_api import expect

    explorer = page.locator(".widget-vbox", has=page.locator(PICTURE)).filter(has=page.locator(HANDLE)).first
    explorer.scroll_into_view_if_needed()
    picture = explorer.locator(PICTURE).first
    said = [picture.get_attribute("aria-label")]
    for handle in explorer.locator(HANDLE).all():
        if not handle.is_visible():
            continue
        at_end = handle.get_attribute("aria-valuenow") == handle.get_attribute("aria-valuemax")
        handle.focus()
        handle.press("ArrowLeft" if at_end else "ArrowRight")
        expect(picture).not_to_have_attribute("aria-label", said[-1], timeout=10_000)
        assert explorer.locator("[data-error]").count() == 0, explorer.locator("[data-error]").first.inner_text()
        said.append(picture.get_attribute("aria-label"))
    return said
