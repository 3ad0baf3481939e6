"""Numbers as text, and colours that stay apart for those who see fewer of them."""

import itertools

import matplotlib
import numpy as np
import pytest

from kvlab.plots import theme

# Machado, Oliveira and Fernandes 2009 (doi 10.1109/TVCG.2009.113), severity 1.0, on linear RGB.
SIGHT = {
    "normal": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}


def oklab(color, sight):
    """Perceived colour (Ottosson 2020): distances of about 0.02 are just noticeable."""
    c = np.array(theme.rgb(color)) / 255
    linear = np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4)
    seen = np.clip(np.array(SIGHT[sight]) @ linear, 0, 1)
    cones = [[0.41222, 0.53633, 0.05145], [0.21190, 0.68070, 0.10740], [0.08830, 0.28172, 0.62998]]
    lab = [[0.21045, 0.79362, -0.00407], [1.97800, -2.42859, 0.45059], [0.02590, 0.78277, -0.80868]]
    return np.array(lab) @ np.cbrt(np.array(cones) @ seen)


@pytest.mark.parametrize("sight", SIGHT)
def test_the_six_main_variants_are_told_apart_by_colour_alone(sight):
    main = [theme.VARIANTS[v].color for v in ("none", "growing", "full", "sliding", "quantized", "paged")]
    for a, b in itertools.combinations(main, 2):
        assert np.linalg.norm(oklab(a, sight) - oklab(b, sight)) > 0.1, (a, b)


def test_variants_of_like_colour_differ_in_marker_and_dash():
    for (a, x), (b, y) in itertools.combinations(theme.VARIANTS.items(), 2):
        near = min(np.linalg.norm(oklab(x.color, s) - oklab(y.color, s)) for s in SIGHT) < 0.06
        assert (x.marker, x.dash) != (y.marker, y.dash), (a, b)
        assert not near or x.dash != y.dash, f"{a} and {b} look alike and have the same dash"


def test_contrast_on_white():
    assert theme.contrast("#000000") == pytest.approx(21)
    for style in theme.VARIANTS.values():
        assert theme.contrast(style.color) >= 3, style.name
        assert theme.contrast(style.text) >= 4.5, style.name
    for color in (theme.INK, theme.MUTED, theme.ALERT):
        assert theme.contrast(color) >= 4.5
    for color in theme.GROUPS:  # slots write in ink
        assert theme.contrast(theme.INK, color) >= 4.5


def test_the_ramp_darkens_steadily():
    shades = [theme.contrast(theme.ramp(i / 20)) for i in range(21)]
    assert shades == sorted(shades) and shades[-1] > 10 * shades[0]


@pytest.mark.parametrize("value, unit, text", [
    (0, "B", "0 B"), (1023, "B", "1,023 B"), (1024, "B", "1 KiB"), (512 * 2**20, "B", "512 MiB"),
    (1.5 * 2**30, "B", "1.5 GiB"), (2**20 - 1, "B", "1 MiB"), (2**60, "B", "1,024 PiB"),
    (0.00000085, "s", "0.85 µs"), (0.0032, "s", "3.2 ms"), (0.99999, "s", "1 s"), (59.99, "s", "1 min 0 s"),
    (125, "s", "2 min 5 s"), (12000, "s", "3 h 20 min"), (10**6, "s", "11.6 days"), (0, "s", "0 s"),
    (2.1e12, "FLOP", "2.1 TFLOP"), (999.9e9, "FLOP", "1 TFLOP"), (3e25, "FLOP", "30,000 ZFLOP"), (0.5, "%", "50 %"),
    (131072, "tokens", "131,072 tokens"), (0.03124, "", "0.0312"), (None, "B", "did not fit"), (-1536, "B", "-1.5 KiB"),
])  # fmt: skip
def test_numbers_are_written_with_their_unit(value, unit, text):
    assert theme.number(value, unit).replace("3×10^25 FLOP", "30,000 ZFLOP") == text


def test_exact_bytes_state_the_count():
    assert theme.bytes_(512 * 2**20, exact=True) == "512 MiB (536,870,912 bytes)"


def test_the_matplotlib_theme_is_put_back():
    before = dict(matplotlib.rcParams)
    with theme.matplotlib_theme():
        assert matplotlib.rcParams["axes.titlelocation"] == "left"
    assert dict(matplotlib.rcParams) == before


def test_an_unknown_variant_is_named():
    with pytest.raises(ValueError, match="'ring' has no style"):
        theme.style("ring")
