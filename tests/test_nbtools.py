"""The notebook tools, on a small project of their own."""

import base64
import io
import json
import re

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from kvlab import nbclean, nbtools

README = "".join(f"<!-- begin {part} -->\n<!-- end {part} -->\n" for part in ("badge", "clone", "notebooks"))
EXERCISE = """\
# TASK 01.1: how many bytes?
# <solution>
answer = 6 * 7
# </solution>
print("checked", answer)"""


@pytest.fixture
def project(tmp_path):
    """A project with one solved notebook, not built yet."""
    (tmp_path / "pyproject.toml").write_text('[project.urls]\nRepository = "https://github.com/someone/fork"\n')
    (tmp_path / "README.md").write_text(README)
    save(tmp_path, new_code_cell(EXERCISE, id="exercise"), new_code_cell("1 + 1", id="plain"))
    return tmp_path


def save(root, *cells, name="01_first.ipynb"):
    nb = new_notebook(cells=[new_markdown_cell("# 01 · First steps", id="title"), *cells])
    nb.metadata.kvlab = {"able": "count", "minutes": 5, "gpu": "no"}
    nbclean.write(nb, root / "notebooks" / "solutions" / name)


def read(root, solved=False):
    return nbformat.read(root / "notebooks" / ("solutions" if solved else "") / "01_first.ipynb", 4)


# ---- the blank notebook ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("block", "blank"),
    [
        ("# <solution>\nanswer = 1\n# </solution>", "answer = ..."),
        ("# <solution>\nx == 1\n# </solution>", "..."),
        ("# <solution>\ndef f():\n    return 1\n# </solution> f = None", "f = None"),
        ("def f(x):\n    # <solution>\n    y = x\n    return y\n    # </solution> return", "def f(x):\n    return"),
        ("a = 1\n# <solution>\nb = 2\n# </solution>\nc = 3\n", "a = 1\nb = ...\nc = 3\n"),
        ("# <solution>\nb = 2\n# </solution>\n# <solution>\nc = 3\n# </solution>", "b = ...\nc = ..."),
        ("nothing = 'to solve'", "nothing = 'to solve'"),
    ],
)  # fmt: skip
def test_a_solution_block_becomes_its_placeholder(block, blank):
    assert nbtools.blank_source(block) == blank


@pytest.mark.parametrize(
    "block", ["# <solution>\na", "a\n# </solution>", "# <solution>\n# </solution>", "# <solution>\na\n# <solution>\nb"]
)
def test_unpaired_markers_are_refused(block):
    with pytest.raises(ValueError, match="cell 7: .*solution>"):
        nbtools.blank_source(block, "cell 7")


def test_build_writes_blank_badge_setup_and_table_and_is_then_content(project):
    assert set(nbtools.build(project)) == {
        "README.md",
        "notebooks/01_first.ipynb",
        "notebooks/solutions/01_first.ipynb",
    }
    assert nbtools.build(project, save=False) == []
    blank, solved = read(project), read(project, solved=True)
    assert (
        [c.id for c in blank.cells] == [c.id for c in solved.cells] == ["title", "badge", "setup", "exercise", "plain"]
    )
    assert "answer = ...\n" in blank.cells[3].source and "6 * 7" not in nbformat.writes(blank)
    assert "colab.research.google.com/github/someone/fork/blob/main/notebooks/01_first.ipynb" in blank.cells[1].source
    assert "/fork/blob/main/notebooks/solutions/01_first.ipynb" in solved.cells[1].source
    text = (project / "README.md").read_text()
    assert "git clone https://github.com/someone/fork && cd fork\n" in text
    assert "[First steps](notebooks/01_first.ipynb)" in text and "| count | 5 | no |" in text


def test_check_sees_an_edited_blank_setup_cell_or_address(project):
    nbtools.build(project)
    blank = read(project)
    blank.cells[3].source = "answer = 42"
    nbclean.write(blank, project / "notebooks" / "01_first.ipynb")
    assert nbtools.build(project, save=False) == ["notebooks/01_first.ipynb"]
    nbtools.build(project)
    assert "answer = ..." in read(project).cells[3].source
    solved = read(project, solved=True)
    solved.cells[2].source = "%pip install -U torch"
    nbclean.write(solved, project / "notebooks" / "solutions" / "01_first.ipynb")
    assert nbtools.build(project, save=False) == ["notebooks/solutions/01_first.ipynb"]
    nbtools.build(project)
    (project / "pyproject.toml").write_text('[project.urls]\nRepository = "https://github.com/other/name"\n')
    assert len(nbtools.build(project, save=False)) == 3


def test_build_keeps_a_blanks_outputs_where_its_code_stayed(project):
    nbtools.build(project)
    blank = read(project)
    for cell in blank.cells[2:]:
        cell.outputs, cell.execution_count = [new_output("stream", name="stdout", text=f"from {cell.id}")], 1
    nbclean.write(blank, project / "notebooks" / "01_first.ipynb")
    solved = read(project, solved=True)
    solved.cells[3].source = solved.cells[3].source.replace("how many bytes?", "how many bits?")
    nbclean.write(solved, project / "notebooks" / "solutions" / "01_first.ipynb")
    nbtools.build(project)
    blank = read(project)
    assert [len(c.outputs) for c in blank.cells[2:]] == [1, 0, 1]


def test_cells_for_the_solved_notebook_alone_are_left_out(project):
    why = new_markdown_cell("because", id="why", metadata={"tags": ["solution"]})
    save(project, why, new_code_cell(EXERCISE, id="e"))
    nbtools.build(project)
    assert "why" in [c.id for c in read(project, solved=True).cells]
    assert "why" not in [c.id for c in read(project).cells]


def test_mistakes_are_told_in_one_sentence(project):
    nbtools.build(project)
    nbclean.write(new_notebook(), project / "notebooks" / "02_orphan.ipynb")
    with pytest.raises(ValueError, match=r"02_orphan\.ipynb has no source notebooks/solutions/02_orphan\.ipynb"):
        nbtools.build(project)
    (project / "notebooks" / "02_orphan.ipynb").unlink()
    (project / "README.md").write_text("no markers")
    with pytest.raises(ValueError, match="README.md must hold <!-- begin badge -->"):
        nbtools.build(project)
    with pytest.raises(ValueError, match=r"'https://example\.org/x'; Colab opens https://github\.com"):
        nbtools.colab_url("https://example.org/x", "a.ipynb")


# ---- the setup cell -------------------------------------------------------------------------------------------------
def run_setup(tmp_path, monkeypatch, modules):
    """Runs the setup cell up to `import kvlab`, as if none were installed; returns (pip calls, sys.path[0])."""
    import importlib.util
    import sys
    from types import SimpleNamespace

    code = nbtools.SETUP.replace("{url}", "https://github.com/someone/fork").split("import kvlab.measure\n")[0]
    code = re.sub(r"%pip (.*)", r"pip('\1')", code)
    asked = []
    found = SimpleNamespace(origin=None) if (tmp_path / "kvlab").exists() else None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "modules", {**sys.modules, **modules})
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "setup", "exec"), {"pip": asked.append})
    return asked, sys.path[0]


def test_setup_on_colab_installs_without_touching_what_colab_has(tmp_path, monkeypatch):
    asked, _ = run_setup(tmp_path, monkeypatch, {"google.colab": object()})
    assert asked == ["install -q --no-deps git+https://github.com/someone/fork gguf"]


def test_setup_uses_a_clone_above_or_below_the_notebook(tmp_path, monkeypatch):
    package = tmp_path / "kvlab" / "kvlab"  # the clone is called kvlab as well: importable by name, yet empty
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    asked, first = run_setup(tmp_path, monkeypatch, {"google.colab": object()})
    assert asked == [] and first == str(tmp_path / "kvlab")


def test_setup_elsewhere_says_what_to_do(tmp_path, monkeypatch):
    with pytest.raises(ModuleNotFoundError, match="git clone https://github.com/someone/fork"):
        run_setup(tmp_path, monkeypatch, {})


# ---- what is saved --------------------------------------------------------------------------------------------------
def png(inches=4):
    from matplotlib.figure import Figure

    figure, buffer = Figure((inches, inches)), io.BytesIO()
    figure.subplots().plot([1, 3, 2])
    figure.savefig(buffer, format="png", dpi=100)
    return base64.b64encode(buffer.getvalue()).decode()


def displayed(**data):
    return new_output("display_data", data={k.replace("__", "/"): v for k, v in data.items()})


def cleaned(*outputs):
    nb = new_notebook(cells=[new_code_cell("x", outputs=list(outputs), execution_count=9)])
    return nbclean.clean(nb).cells[0].outputs


def test_clean_keeps_the_twin_and_drops_what_needs_a_kernel():
    widget, twin = {nbclean.WIDGET: {"model_id": "1"}}, png()
    assert cleaned(new_output("display_data", data={**widget, "text/plain": "VBox()"})) == []
    (kept,) = cleaned(new_output("display_data", data={**widget, "image/png": twin, "text/plain": "in words"}))
    assert set(kept.data) == {"image/png", "text/plain"} and kept.data["text/plain"] == "in words"
    plotly = {nbclean.PLOTLY: {"data": []}, "text/html": "<script>Plotly.newPlot()</script>"}
    assert cleaned(new_output("display_data", data=plotly)) == []
    for mime in ("image/png", nbclean.TWIN):
        (kept,) = cleaned(new_output("display_data", data={**plotly, mime: twin, "text/plain": "in words"}))
        assert set(kept.data) == {"image/png", "text/plain"}


def test_clean_merges_streams_and_drops_progress_bars_and_overwritten_lines():
    bar = "sweep:  40%|████      | 2/5 [00:01<00:02]\rsweep: 100%|██████████| 5/5 [00:03<00:00]\n"
    parts = [new_output("stream", name=n, text=t) for n, t in (("stderr", bar), ("stdout", "a"), ("stdout", "b\n"))]
    (kept,) = cleaned(*parts, new_output("stream", name="stdout", text="old\rnew\n"))
    assert kept.text == "ab\nnew\n"


def test_clean_renumbers_and_drops_editor_and_timing_metadata(tmp_path):
    cell = new_code_cell(
        "x", execution_count=7, metadata={"execution": {"iopub": "12:00"}, "scrolled": True, "tags": ["t"]}
    )
    nb = new_notebook(cells=[new_code_cell("y", execution_count=3), cell])
    nb.metadata.update(widgets={"a": 1}, language_info={"name": "python", "version": "3.11.7"})
    nb = nbclean.clean(nb, tmp_path)
    assert [c.execution_count for c in nb.cells] == [1, 2] and nb.cells[1].metadata == {"tags": ["t"]}
    assert "widgets" not in nb.metadata and nb.metadata.language_info == {"name": "python"}


def test_clean_shrinks_pictures_and_twice_changes_nothing():
    from PIL import Image

    big = png()
    (once,) = cleaned(displayed(image__png=big))
    assert len(once.data["image/png"]) < len(big)
    image = Image.open(io.BytesIO(base64.b64decode(once.data["image/png"])))
    assert image.size == (400, 400)
    assert cleaned(displayed(image__png=once.data["image/png"])) == [once]


def test_clean_names_no_folder_of_the_machine(tmp_path):
    text = f"{tmp_path}/kvlab/x.py:3: UserWarning"
    nb = new_notebook(cells=[new_code_cell("x", outputs=[new_output("stream", name="stderr", text=text)])])
    assert nbclean.clean(nb, tmp_path).cells[0].outputs[0].text == "kvlab/x.py:3: UserWarning"


ABOUT = "a CPU, 2 cores, 2 threads · fp32 · torch 2.13.0 · Python 3.11.7 · kvlab 0.1.0\n"


def good(tmp_path, change=lambda nb: None):
    outputs = [new_output("stream", name="stdout", text=ABOUT), displayed(image__png=png(1))]
    nb = new_notebook(cells=[new_code_cell("x", id="first", outputs=outputs, execution_count=1)])
    nb.metadata.kernelspec = {"name": "python3", "display_name": "Python 3"}
    change(nb)
    nbclean.write(nb, tmp_path / "n.ipynb")
    return nbclean.problems(tmp_path / "n.ipynb")


def test_a_good_notebook_has_no_problems(tmp_path):
    assert good(tmp_path) == []


@pytest.mark.parametrize(
    ("said", "change"),
    [
        ("more than 307,200", lambda nb: nb.cells[0].outputs.append(displayed(text__plain="x" * 310_000))),
        ("python3", lambda nb: nb.metadata.pop("kernelspec")),
        ("metadata.widgets", lambda nb: nb.metadata.update(widgets={})),
        ("1501 characters", lambda nb: nb.cells[0].update(source="x" * 1501)),
        ("has not been run", lambda nb: nb.cells[0].update(execution_count=None)),
        (
            "error: E: v",
            lambda nb: nb.cells[0].outputs.append(new_output("error", ename="E", evalue="v", traceback=[])),
        ),
        ("widget or a script", lambda nb: nb.cells[0].outputs.append(displayed(text__html="<script>1</script>"))),
        ("no picture", lambda nb: nb.cells[0].outputs.pop()),
        ("states the device", lambda nb: nb.cells[0].outputs.pop(0)),
        ("/home/someone", lambda nb: nb.cells[0].outputs.append(displayed(text__plain="in /home/someone/kvlab"))),
    ],
)
def test_each_problem_is_named(tmp_path, said, change):
    assert any(said in problem for problem in good(tmp_path, change))


@pytest.mark.parametrize("second", ["same", None])
def test_cells_without_an_id_of_their_own_are_named(tmp_path, second):
    good(tmp_path)
    raw = json.loads((tmp_path / "n.ipynb").read_text())
    cells = [{**raw["cells"][0], "id": name} for name in ("same", second)]
    raw["cells"] = [{k: v for k, v in cell.items() if v is not None or k != "id"} for cell in cells]
    (tmp_path / "n.ipynb").write_text(json.dumps(raw))
    assert any("id of its own" in problem for problem in nbclean.problems(tmp_path / "n.ipynb"))
