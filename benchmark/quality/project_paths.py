"""Importing this makes the modules of examples/, benchmark/serving/ and the tests' oracle importable."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path += [str(ROOT / "examples"), str(ROOT / "benchmark" / "serving"), str(ROOT / "test")]
