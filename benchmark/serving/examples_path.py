"""Importing this makes the modules of examples/ importable: server, client, sample and tiny model are theirs."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "examples"))
