"""One small picture of each kind, for the tests beside this file."""

L = [16, 256, 4096, 16384]
LINES = {
    "kind": "lines",
    "title": "Time <b>&",
    "x": {"label": "length", "unit": "tokens", "scale": "log2"},
    "y": {"label": "seconds", "unit": "s", "scale": "log10"},
    "note": "CPU, torch",
    "limits": [{"label": "patience", "value": 60.0}],
    "series": [
        {
            "variant": "none",
            "x": L,
            "y": [0.02, 1.5, 240.0, None],
            "sampled": [False, False, True, False],
            "slope": 1.9,
        },
        {"variant": "full", "x": L, "y": [0.02, 0.3, 5.5, 24.0], "low": [0.01, 0.2, 5, 20], "high": [0.03, 0.4, 6, 30]},
        {"variant": "sliding", "label": 'window\n"64"', "x": L, "y": [0.02, 0.31, 5.0, 19.0], "points": False},
    ],
}
BARS = {
    "kind": "bars",
    "title": "What fills the card",
    "y": {"label": "bytes", "unit": "B"},
    "parts": ["weights", "cache"],
    "limits": [{"label": "card", "value": 15 * 2**30}],
    "bars": [
        {"variant": "full", "values": [12 * 2**30, 4 * 2**30]},
        {"variant": "sliding", "values": [12 * 2**30, 2**29]},
        {"variant": "growing", "values": None},
    ],
}
HEATMAP = {
    "kind": "heatmap",
    "title": "Error",
    "values": [[0.0, 0.5, None], [0.25, 1.0, 0.75]],
    "rows": ["layer 0", "layer 1"],
    "columns": ["a", "b", "c"],
    "unit": "%",
}
SLOTS = {
    "kind": "slots",
    "title": "A ring",
    "groups": ["request A", "request B"],
    "rows": [
        {"label": "slot", "cells": [{"text": "0", "state": "sink"}, {"text": "17", "state": "new", "group": 1}]},
        {"label": "gone", "cells": [{"text": "3", "state": "evicted"}, {"state": "free"}, {"text": "<4>"}]},
    ],
}
PANELS = {"kind": "panels", "title": "All", "panels": [LINES, [BARS, SLOTS]], "sentence": "Three pictures."}
ALL = {"lines": LINES, "bars": BARS, "heatmap": HEATMAP, "slots": SLOTS, "panels": PANELS}
