"""A notebook whose widget swallowed an error is red; one whose widgets work is green. Real kernels run each case."""

import shutil
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import nbformat
import pytest

ROOT = Path(__file__).parents[2]
FAIL = "def f(n=1):\n    raise ZeroDivisionError('the planted error')\n"
WORK = "def f(n=1):\n    print(n)\n"
EXPLORER = """
view = widgets.HTML({first!r})
slider = widgets.IntSlider(1)
slider.observe(lambda change: setattr(view, "value", {later!r}), "value")
display(widgets.VBox([slider, view]))
slider.value = 2
"""
ALERT = '<div role="alert" data-error="ZeroDivisionError">the planted error</div>'
CASES = {
    "red_interact": FAIL + "widgets.interact(f, n=(1, 3))",
    "red_interactive_output": FAIL + "display(widgets.interactive_output(f, {'n': widgets.IntSlider(1)}))",
    "red_with_output": FAIL + "out = widgets.Output()\ndisplay(out)\nwith out:\n    f()",
    "red_capture": FAIL + "out = widgets.Output()\ndisplay(out)\nf = out.capture()(f)\nf()",
    "red_output_never_shown": FAIL + "with widgets.Output():\n    f()",
    "red_explorer": EXPLORER.format(first="<svg></svg>", later=ALERT),
    "red_plain": FAIL + "f()",
    "green_interact": WORK + "widgets.interact(f, n=(1, 3))",
    "green_interactive_output": WORK + "display(widgets.interactive_output(f, {'n': widgets.IntSlider(1)}))",
    "green_with_output": WORK + "out = widgets.Output()\ndisplay(out)\nwith out:\n    f()",
    "green_explorer": EXPLORER.format(first=ALERT, later="<svg>mended: the text data-error=1 is no attribute</svg>"),
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """{case: failure message or None} of one nbmake run over all cases, under the repository's own conftest.py."""
    folder = tmp_path_factory.mktemp("cases")
    shutil.copy(ROOT / "conftest.py", folder)
    for name, code in CASES.items():
        cells = ["import ipywidgets as widgets\nfrom IPython.display import display", code, "'the end'"]
        nb = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
        nb.metadata.kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
        nbformat.write(nb, folder / f"{name}.ipynb")
    command = [sys.executable, "-m", "pytest", "--nbmake", "-n", "2", "-q", "--junitxml=report.xml", "."]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 1, done.stdout + done.stderr
    found = {}
    for case in ElementTree.parse(folder / "report.xml").iter("testcase"):
        failure = case.find("failure")
        found[case.get("name").removesuffix(".ipynb")] = (
            None if failure is None else failure.get("message") + failure.text
        )
    return found


@pytest.mark.parametrize("case", CASES)
def test_hidden_widget_errors_are_red_and_working_widgets_green(outcomes, case):
    if case.startswith("red"):
        assert outcomes[case] is not None, "a notebook with an error passed"
        assert "the planted error" in outcomes[case]
    else:
        assert outcomes[case] is None
