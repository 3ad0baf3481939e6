"""The notebooks' workshop: python -m kvlab.nbtools build | check | run | strip   (for people who write notebooks)

notebooks/solutions/NN_name.ipynb is what you write. From it and the address in pyproject.toml `build` makes
    notebooks/NN_name.ipynb        the blank one, its exercises unanswered
    two cells in both              the Colab badge (after the title) and the setup cell
    README.md                      the parts between <!-- begin NAME --> and <!-- end NAME -->
`check` says what no longer matches. `run` executes notebooks and saves their outputs, cleaned by nbclean.py.

An exercise in a source cell; the text after </solution> is what the blank shows in the block's place (by default
`name = ...` where the block's first line assigns to `name`, else `...`):
    # TASK 01.1: how many bytes does one token add?
    # <solution>
    answer = 2 * 30 * 3 * 64 * 2
    # </solution> answer = ...
    kvlab.check_answer("01.1", answer)
A cell tagged `solution` is left out of the blank. The notebook's metadata.kvlab feeds the README's table:
{"able": "...", "minutes": 30, "gpu": "no"}; the title is the first heading.
"""

from __future__ import annotations

import argparse
import copy
import os
import re
import sys
import tomllib
from pathlib import Path

import nbformat

from .nbclean import clean, hidden_errors, write

ROOT = Path(__file__).resolve().parent.parent
BADGE = "https://colab.research.google.com/assets/colab-badge.svg"

SETUP = """\
# Setup: use the kvlab that is installed or lies nearby. Colab fetches it; torch, ipywidgets, plotly stay as they are.
import importlib.util
import sys
from pathlib import Path

spec = importlib.util.find_spec("kvlab")
if spec is None or spec.origin is None:  # no origin: only a folder of that name, such as a fresh clone
    above = [Path.cwd(), *Path.cwd().parents]
    near = [p for up in above for p in (up, up / "kvlab") if (p / "kvlab" / "__init__.py").exists()]
    if near:
        sys.path.insert(0, str(near[0]))
    elif "google.colab" in sys.modules:
        %pip install -q --no-deps git+{url} gguf
    else:
        raise ModuleNotFoundError("no kvlab here; get it with: git clone {url}")

import kvlab.measure

print(kvlab.measure.about())"""


def repository(root: Path = ROOT) -> str:
    """The project's address, from the one place that holds it: pyproject.toml, [project.urls], Repository."""
    with open(root / "pyproject.toml", "rb") as f:
        return tomllib.load(f)["project"]["urls"]["Repository"].rstrip("/")


def colab_url(url: str, path: str) -> str:
    """Where Colab opens the file `path` of the GitHub repository `url` (its main branch)."""
    if not (match := re.fullmatch(r"https://github\.com/([^/]+/[^/]+?)(\.git)?", url)):
        raise ValueError(f"[project.urls] Repository is {url!r}; Colab opens https://github.com/OWNER/NAME only")
    return f"https://colab.research.google.com/github/{match[1]}/blob/main/{path}"


def blank_source(source: str, where: str = "cell") -> str:
    """A code cell with each <solution> block replaced by its placeholder; ValueError where the markers do not pair."""
    out, block = [], None
    for line in source.split("\n"):
        marker = line.strip()
        if marker == "# <solution>":
            if block is not None:
                raise ValueError(f"{where}: a second <solution> before </solution>")
            block = []
        elif marker.startswith("# </solution>"):
            if not block:
                raise ValueError(f"{where}: </solution> without a <solution> and a line between them")
            assigned = re.match(r"\s*(\w+)\s*=(?!=)", block[0])
            default = f"{assigned[1]} = ..." if assigned else "..."
            indent = line[: len(line) - len(line.lstrip())]
            out.append(indent + (marker.removeprefix("# </solution>").strip() or default))
            block = None
        elif block is None:
            out.append(line)
        else:
            block.append(line)
    if block is not None:
        raise ValueError(f"{where}: <solution> without </solution>")
    return "\n".join(out)


def with_generated_cells(nb, name: str, solved: bool, root: Path = ROOT):
    """A copy of `nb` whose badge and setup cells are as generated: after the title cell, badge first."""
    nb, url = copy.deepcopy(nb), repository(root)
    kept = [cell for cell in nb.cells if cell.id not in ("badge", "setup")]
    if not kept or kept[0].cell_type != "markdown" or not kept[0].source.startswith("# "):
        raise ValueError(f"{name}: the first cell must be markdown and start with the title, '# ...'")
    path = f"notebooks/solutions/{name}" if solved else f"notebooks/{name}"
    other = f"[without the solutions](../{name})" if solved else f"[with solutions](solutions/{name})"
    badge = nbformat.v4.new_markdown_cell(
        f"[![Open in Colab]({BADGE})]({colab_url(url, path)}) &nbsp; {other}", id="badge"
    )
    setup = nbformat.v4.new_code_cell(SETUP.replace("{url}", url), id="setup")
    for old in nb.cells:
        if old.id == "setup" and old.source == setup.source:
            setup.outputs, setup.execution_count = old.outputs, old.execution_count
    nb.cells = [kept[0], badge, setup, *kept[1:]]
    nb.metadata = nbformat.from_dict(
        {
            **({"kvlab": nb.metadata["kvlab"]} if "kvlab" in nb.metadata else {}),
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        }
    )
    return nb


def blank(nb, name: str, old=None, root: Path = ROOT):
    """The blank notebook of the solved `nb`. Cells that did not change keep the outputs of `old`, the blank so far."""
    nb = copy.deepcopy(nb)
    nb.cells = [cell for cell in nb.cells if "solution" not in cell.metadata.get("tags", [])]
    for cell in nb.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
            cell.source = blank_source(cell.source, f"{name}, cell {cell.id}")
    nb = with_generated_cells(nb, name, solved=False, root=root)
    before = {cell.id: cell for cell in old.cells} if old else {}
    for cell in nb.cells:
        same = before.get(cell.id)
        if cell.cell_type == "code" and same and same.source == cell.source:
            cell.outputs, cell.execution_count = same.outputs, same.execution_count
    return nb


def table(root: Path = ROOT) -> str:
    """The README's table of the notebooks that exist."""
    rows = ["| notebook | you will be able to | minutes | GPU | |", "|---|---|---|---|---|"]
    for source in sources(root):
        nb = nbformat.read(source, 4)
        facts = nb.metadata.get("kvlab", {})
        if missing := {"able", "minutes", "gpu"} - set(facts):
            raise ValueError(f"{source.name}: metadata.kvlab lacks {', '.join(sorted(missing))}")
        number, title = source.name[:2], nb.cells[0].source.split("\n")[0].lstrip("# ")
        title = title.removeprefix(number).lstrip(" .:·-")
        badge = f"[![Open in Colab]({BADGE})]({colab_url(repository(root), f'notebooks/{source.name}')})"
        rows.append(
            f"| **{number}** [{title}](notebooks/{source.name})<br>{badge} | {facts['able']} | {facts['minutes']} "
            f"| {facts['gpu']} | [solutions](notebooks/solutions/{source.name}) |"
        )
    return "\n".join(rows)


def readme(text: str, root: Path = ROOT) -> str:
    """README.md with its generated parts renewed."""
    url = repository(root)
    start = next((p.name for p in sources(root)), "00_start_here.ipynb")
    parts = {
        "badge": f"[![Open in Colab]({BADGE})]({colab_url(url, f'notebooks/{start}')})",
        "clone": f"```bash\ngit clone {url} && cd {url.rsplit('/', 1)[1].removesuffix('.git')}\nmake lab\n```",
        "notebooks": table(root),
    }
    for name, part in parts.items():
        begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
        if text.count(begin) != 1 or text.count(end) != 1:
            raise ValueError(f"README.md must hold {begin} and {end} once")
        text = text.split(begin)[0] + f"{begin}\n{part}\n{end}" + text.split(end)[1]
    return text


def sources(root: Path = ROOT) -> list[Path]:
    return sorted((root / "notebooks" / "solutions").glob("[0-9][0-9]_*.ipynb"))


def build(root: Path = ROOT, save: bool = True) -> list[str]:
    """Write (save=False: only compare) all that is generated. Returns the paths that were not as they should be."""
    stale = []
    for source in sources(root):
        solved_before = nbformat.read(source, 4)
        solved = with_generated_cells(solved_before, source.name, solved=True, root=root)
        path = root / "notebooks" / source.name
        old = nbformat.read(path, 4) if path.exists() else None
        new = blank(solved, source.name, old, root)
        for file, before, after in ((source, solved_before, solved), (path, old, new)):
            if before is None or before != after:
                stale.append(str(file.relative_to(root)))
                if save:
                    write(after, file)
    for path in sorted((root / "notebooks").glob("*.ipynb")):
        if not (path.parent / "solutions" / path.name).exists():
            raise ValueError(f"notebooks/{path.name} has no source notebooks/solutions/{path.name}: write that one")
    text = (root / "README.md").read_text()
    if (new := readme(text, root)) != text:
        stale.append("README.md")
        if save:
            (root / "README.md").write_text(new)
    return stale


def run(path: Path, root: Path = ROOT) -> None:
    """Execute the notebook in its folder and save its cleaned outputs. After an error, even a hidden one, save nothing.

    Raises nbclient's CellExecutionError, or RuntimeError for an error that the notebook swallowed.
    """
    from nbclient import NotebookClient

    os.environ.setdefault("PLOTLY_RENDERER", "plotly_mimetype")  # others write megabytes of JavaScript into the file
    nb = nbformat.read(path, 4)
    NotebookClient(nb, timeout=3600, kernel_name="python3", record_timing=False).execute(cwd=path.parent)
    if errors := hidden_errors(nb):
        raise RuntimeError(f"{path}: " + "\n".join(text for _, text in errors))
    write(clean(nb, root), path)


def main(args: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m kvlab.nbtools", description=__doc__.split("\n")[0])
    parser.add_argument("action", choices=["build", "check", "run", "strip"])
    parser.add_argument("names", nargs="*", help="run, strip: only the files whose path holds one of these words")
    args = parser.parse_args(args)
    try:
        return _act(args)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1


def _act(args) -> int:
    if args.action in ("build", "check"):
        stale = build(save=args.action == "build")
        for path in stale:
            print(("wrote " if args.action == "build" else "not as generated: ") + path)
        if stale and args.action == "check":
            print("run `python -m kvlab.nbtools build`; blanks are changed in notebooks/solutions/")
            return 1
        return 0
    paths = [p for s in sources() for p in (s, s.parent.parent / s.name)]
    paths = [p for p in paths if not args.names or any(word in str(p.relative_to(ROOT)) for word in args.names)]
    if not paths:
        print(f"no notebook's path holds {' or '.join(args.names) or 'a number'}")
        return 1
    for path in paths:
        print(f"{args.action} {path.relative_to(ROOT)}", flush=True)
        run(path) if args.action == "run" else write(clean(nbformat.read(path, 4), ROOT), path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
