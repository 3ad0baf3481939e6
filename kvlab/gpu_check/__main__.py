"""python -m kvlab.gpu_check"""

import sys

from kvlab.gpu_check import main

sys.exit(main())
