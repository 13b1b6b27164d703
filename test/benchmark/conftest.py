"""Makes the modules of benchmark/serving and benchmark/scheduler importable."""

import sys
from pathlib import Path

sys.path += [str(Path(__file__).parents[2] / "benchmark" / name) for name in ("serving", "scheduler")]
