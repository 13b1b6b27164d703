"""Importing this makes the modules of benchmark/serving importable."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "serving"))
