"""Lets the tests in this folder import tests/serving/*.py and tests/oracles.py by name."""

import sys
from pathlib import Path

tests = Path(__file__).parent.parent
sys.path[:0] = [str(tests), str(tests / "serving")]
