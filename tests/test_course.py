"""The map of the notebooks: those that exist are linked, all are named."""

from pathlib import Path

from kvlab.course import COURSE, course_map

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"


def test_only_notebooks_that_lie_there_are_linked(tmp_path):
    assert "](" not in course_map(tmp_path)
    (tmp_path / "01_why_cache.ipynb").touch()
    table = course_map(tmp_path)
    assert table.count("](") == 1 and "[Why a cache](01_why_cache.ipynb)" in table
    assert all(title in table and picture in table for title, picture in COURSE.values())


def test_every_notebook_of_the_repository_is_on_the_map():
    assert {p.stem for p in NOTEBOOKS.glob("*.ipynb")} <= set(COURSE)
