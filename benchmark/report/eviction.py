"""The table of hit rates of two trees in one pool, beside those of one exact LRU tree."""

from pathlib import Path

from benchmark.report.cells import lines, table

KINDS = {"all": "all tokens", "chunks": "of chunks", "plain": "of other prompts"}


def eviction(sources: list[Path]) -> str:
    """Tokens found cached, in percent: of one exact LRU tree, then of two trees, by traffic and pool."""
    rows = [row for source in sources for row in lines(source) if "mix" in row]
    body = [
        [
            row["mix"],
            f"{row['pool']:,}",
            *(f"{row['one_tree'][kind]:.1f} → {row['two_trees'][kind]:.1f}" for kind in KINDS),
            f"{row['two_trees']['all'] - row['one_tree']['all']:+.2f}",
        ]
        for row in rows
    ]
    return table(["traffic", "slots", *KINDS.values(), "difference of all"], body)
