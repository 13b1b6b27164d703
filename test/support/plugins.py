"""Plugins of SGLang's that are not installed."""

from pathlib import Path


def describe(load: str, folder: Path) -> None:
    """Let processes with `folder` on their path find `load`, such as "module:function", as an installed plugin."""
    name = load.partition(":")[0].rpartition(".")[2]  # one of its own: of equal names only the first is found
    metadata = folder / f"{name}-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text(f"[sglang.srt.plugins]\n{name} = {load}\n")
