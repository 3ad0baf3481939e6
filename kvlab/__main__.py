"""python -m kvlab: the same as the command kvlab."""

import sys

from kvlab.cli import main

sys.exit(main())
