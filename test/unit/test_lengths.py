"""Modules are short enough to be read in one sitting."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("python", "sgl-kernel-lazy", "benchmark", "oracle", "fakes", "examples")
MAX_LINES = 400


def tracked() -> list[str]:
    """The tracked sources of the folders above, tests aside."""
    patterns = [f"{folder}/*.{kind}" for folder in FOLDERS for kind in ("py", "js", "css")]
    listed = subprocess.run(["git", "ls-files", "-z", *patterns], cwd=ROOT, capture_output=True, text=True, check=True)
    return listed.stdout.split("\0")[:-1]


SOURCES = tracked()


def test_every_folder_has_sources():
    assert {source.split("/")[0] for source in SOURCES} == set(FOLDERS)
    assert {Path(source).suffix for source in SOURCES} == {".py", ".js", ".css"}


@pytest.mark.parametrize("source", SOURCES)
def test_modules_are_short(source):
    assert len((ROOT / source).read_text(encoding="utf-8").splitlines()) <= MAX_LINES
