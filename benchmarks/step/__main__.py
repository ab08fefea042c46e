"""``python -m benchmarks.step ROW``."""

import sys

from benchmarks.step.compare import main

sys.exit(main())
