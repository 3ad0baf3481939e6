import pytest

from kvlab import gallery


@pytest.mark.parametrize("name", gallery.PICTURES)
def test_a_picture_is_drawn_and_the_same_each_time(name, tmp_path):
    written = gallery.draw(name, tmp_path)
    first = [path.read_bytes() for path in written]
    assert first[0].startswith(b"\x89PNG") and len(first[0]) < 150_000
    assert [path.read_bytes() for path in gallery.draw(name, tmp_path)] == first


def test_attention_lines_have_the_slopes_that_the_lab_is_about():
    slopes = [round(series["slope"], 1) for series in gallery.PICTURES["attention"]()["series"]]
    assert slopes == [3.0, 2.0, 1.0]


def test_an_unknown_picture_is_named(tmp_path, capsys):
    assert gallery.main(["cots"]) == 1
    assert "no picture 'cots'; there are cost, memory" in capsys.readouterr().err
