"""One sweep over an explorer, checked at every stop: for the tests beside this file."""

import time
import xml.etree.ElementTree as ET


def swept(explorer, capsys) -> dict[str, set[str]]:
    """Every stop draws well-formed SVG with numbers in words -> what each control showed. Prints the longest tick."""
    shown, longest, stops = {}, 0.0, 0
    start = time.perf_counter()
    for step in explorer.sweep():
        longest, stops = max(longest, time.perf_counter() - start), stops + 1
        shown.setdefault(step.control, set()).add(str(step.labels))
        ET.fromstring(explorer.html.value)
        assert step.labels and all(any(c.isdigit() for c in label) for label in step.labels), step
        start = time.perf_counter()
    assert set(shown) == {*explorer.by_name, "all"}
    with capsys.disabled():
        print(f"\n  {type(explorer).__name__}: {stops} stops, slowest tick {1e3 * longest:.1f} ms", end="")
    return shown
