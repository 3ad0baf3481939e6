"""What a saved notebook may hold. clean() drops what only a live kernel can show; problems() says what is left to mend.

A widget saved without its kernel shows "model not found", GitHub runs no JavaScript, and timing metadata makes every
run a diff. What stays: text, tables and PNG pictures, small enough to read on GitHub.
"""

from __future__ import annotations

import base64
import io
import json
import re
from pathlib import Path

import nbformat

WIDGET = "application/vnd.jupyter.widget-view+json"
WIDGETS = "application/vnd.jupyter.widget-state+json"
PLOTLY = "application/vnd.plotly.v1+json"
TWIN = "application/vnd.kvlab.twin.png"  # the picture that plots.interactive.show_plotly sends along
MAX_BYTES = 300 * 1024
MAX_CELL = 1500  # characters of code that a projector shows at a readable size
MACHINE_PATH = re.compile(r"(?<![\w.])/(home|root|Users|tmp|content|opt|private)/[\w.-]+")
PROGRESS = re.compile(r"^.*\d+%\|.*\|.*$\n?", re.M)  # a tqdm bar: speed and time change with every run


def hidden_errors(nb) -> list[tuple[int, str]]:
    """Errors that an executed notebook swallowed, as (cell index, text).

    `with Output():`, interact and interactive_output catch an exception and show it inside the widget, so the cell
    succeeds and a test run stays green. The saved widget state still holds it. An explorer shows its error as text in a
    widgets.HTML that carries a data-error attribute. The index is the cell that shows the widget, 0 if none does.
    """
    state = nb.metadata.get("widgets", {}).get(WIDGETS, {}).get("state", {})
    found = []
    for model, entry in state.items():
        values = entry.get("state", {})
        for output in values.get("outputs") or ():
            if output.get("output_type") == "error":
                trace = "\n".join(output.get("traceback", ())) or f"{output.get('ename')}: {output.get('evalue')}"
                found.append((_cell_that_shows(nb, state, model), f"hidden in an Output widget:\n{trace}"))
        value = values.get("value")
        if isinstance(value, str) and re.search(r"<[^>]*\sdata-error\s*=", value):
            text = re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", value)).strip()
            found.append((_cell_that_shows(nb, state, model), f"shown by an explorer: {text or value}"))
    return found


def _cell_that_shows(nb, state, model) -> int:
    """The index of the cell whose displayed widget is `model` or holds it."""

    def holds(top, seen):
        if top == model:
            return True
        seen.add(top)
        below = set(re.findall(r"IPY_MODEL_([\w-]+)", str(state.get(top, {}).get("state", "")))) - seen
        return any(holds(child, seen) for child in below)

    for i, cell in enumerate(nb.cells):
        for output in cell.get("outputs", ()):
            view = output.get("data", {}).get(WIDGET)
            if view and holds(view["model_id"], set()):
                return i
    return 0


def clean(nb, root: Path | None = None):
    """`nb` with only what reads without a kernel and does not change from run to run; changed in place and returned.

    Drops widget views and state, plotly's JavaScript (its PNG twin stays), timing and editor metadata, progress bars;
    writes paths under `root` relative to it; recodes PNGs with a palette where that is smaller.
    """
    nb.metadata.pop("widgets", None)
    nb.metadata["language_info"] = nbformat.from_dict({"name": "python"})
    number = 0
    for cell in nb.cells:
        cell.metadata = nbformat.from_dict({k: v for k, v in cell.metadata.items() if k in ("tags", "nbmake")})
        if cell.cell_type != "code":
            continue
        if cell.execution_count is not None:
            number += 1
            cell.execution_count = number
        kept = []
        for output in cell.outputs:
            output = _clean_output(output, number, root)
            if output is None:
                continue
            if kept and output.output_type == "stream" and kept[-1].get("name") == output.name:
                kept[-1].text += output.text
            else:
                kept.append(output)
        cell.outputs = kept
    return nb


def _clean_output(output, number, root):
    if output.output_type == "stream":
        text = re.sub(r"[^\n]*\r(?!\n)", "", output.text)  # what a carriage return overwrote
        output.text = _relative(PROGRESS.sub("", text), root)
        return output if output.text.strip() else None
    if output.output_type not in ("display_data", "execute_result"):
        return output
    data = output.data
    if WIDGET in data:  # an explorer's output holds its PNG twin too; a bare widget's holds only its name
        data = {k: v for k, v in data.items() if k != WIDGET} if "image/png" in data else {}
    if PLOTLY in data or "Plotly.newPlot" in data.get("text/html", ""):
        twin = data.get("image/png") or data.get(TWIN)
        data = {"image/png": twin, "text/plain": data.get("text/plain", "")} if twin else {}
    data = {k: v for k, v in data.items() if k != "application/javascript"}
    for kind, value in data.items():
        if kind == "image/png":
            data[kind] = _small_png(value)
        elif isinstance(value, str):
            data[kind] = _relative(value, root)
    output.data = nbformat.from_dict(data)
    if output.output_type == "execute_result":
        output.execution_count = number
    return output if data else None


def _relative(text: str, root: Path | None) -> str:
    return text.replace(f"{root}/", "").replace(f"{Path.home()}/", "~/") if root else text


def _small_png(png: str) -> str:
    """The base64 PNG with 256 colours if that is smaller: a plot has few, so it looks the same at a third of it."""
    from PIL import Image

    raw = base64.b64decode(png)
    image = Image.open(io.BytesIO(raw))
    if image.mode == "P":
        return png
    if image.mode == "RGBA":  # readers' pages may be dark: a plot's text is made for white paper
        paper = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(paper, image)
    buffer = io.BytesIO()
    image.convert("RGB").quantize(256, dither=Image.Dither.NONE).save(buffer, "png", optimize=True)
    small = buffer.getvalue()
    return base64.b64encode(small).decode() if len(small) < len(raw) else png


def problems(path: Path) -> list[str]:
    """What is wrong with a saved notebook, one sentence each; [] if it may be committed."""
    found = []
    if (size := path.stat().st_size) > MAX_BYTES:
        found.append(f"{size:,} bytes are more than {MAX_BYTES:,}: fewer or smaller pictures")
    ids = [
        cell.get("id") for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]
    ]  # read() mends them unasked
    if len({*ids, None}) <= len(ids):
        found.append("every cell needs an id of its own (nbformat 4.5)")
    nb = nbformat.read(path, 4)
    try:
        nbformat.validate(nb)
    except nbformat.ValidationError as error:
        found.append(f"not a valid notebook: {error}")
    if nb.metadata.get("kernelspec", {}).get("name") != "python3":
        found.append("the kernelspec must be python3, the kernel that every reader has")
    if "widgets" in nb.metadata:
        found.append("metadata.widgets is saved; GitHub refuses some notebooks for it")
    text, pictures = "", 0
    for i, cell in enumerate(nb.cells):
        if cell.cell_type != "code":
            continue
        here = f"cell {i} ({cell.id})"
        if len(cell.source) > MAX_CELL:
            found.append(f"{here} has {len(cell.source)} characters; {MAX_CELL} fit a projector")
        if cell.source.strip() and cell.execution_count is None:
            found.append(f"{here} has not been run")
        for output in cell.outputs:
            data = output.get("data", {})
            if output.output_type == "error":
                found.append(f"{here} holds an error: {output.ename}: {output.evalue}")
            if WIDGET in data or PLOTLY in data or "<script" in str(data.get("text/html", "")):
                found.append(f"{here} holds a widget or a script, which shows nothing without a kernel")
            pictures += "image/png" in data
            text += output.get("text", "") + "".join(str(v) for k, v in data.items() if k.startswith("text/"))
    if not pictures:
        found.append("no picture is saved in it")
    if not re.search(r"\S · torch \d\S+ · Python \d", text):
        found.append("no output states the device and the versions, as kvlab.measure.about() does")
    if match := MACHINE_PATH.search(text):
        found.append(f"an output names a folder of one machine: {match[0]}")
    return found


def write(nb, path: Path) -> None:
    """Save with one space of indent, readable characters and a final newline, so that diffs are small."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(nbformat.writes(nb, version=4, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
