"""Makes the modules of benchmark/serving importable."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "benchmark" / "serving"))
