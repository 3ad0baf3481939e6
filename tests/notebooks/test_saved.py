"""The notebooks as they lie in the repository."""

from pathlib import Path

import pytest

from kvlab import nbclean, nbtools

ROOT = Path(__file__).parents[2]
SAVED = sorted(p for p in (ROOT / "notebooks").rglob("*.ipynb") if ".ipynb_checkpoints" not in p.parts)


@pytest.mark.parametrize("path", SAVED, ids=lambda p: str(p.relative_to(ROOT / "notebooks")))
def test_a_saved_notebook_reads_well_without_a_kernel(path):
    assert nbclean.problems(path) == []


def test_blanks_badges_setup_cells_and_readme_are_as_generated():
    assert nbtools.build(save=False) == []
