"""Folders that are made once, also where several processes want them."""

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path


def made_once(path: Path, write: Callable[[Path], None]) -> str:
    """The folder `path`, which `write` fills if it is not there. Nobody sees it half full; of several that are made at
    the same time the first one stays."""
    if path.exists():
        return str(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
    try:
        write(work)
        os.rename(work, path)
    except OSError:
        if not path.exists():
            raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return str(path)
