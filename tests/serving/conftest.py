"""Lets the tests in this folder import tests/oracles.py by name, as those beside it do."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
