"""Tables of hit rates: of two trees in one pool, beside one exact LRU tree; of chunks with states, at equal memory."""

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


def equal_memory(sources: list[Path]) -> str:
    """Tokens found cached, in percent, by model, chunks and memory: of prefixes, and of chunks by the states' share."""
    rows = [row for source in sources for row in lines(source) if "shares" in row]
    shares = [*rows[0]["shares"]]
    body = [
        [
            row["model"],
            f"{row['chunk_len']:,}",
            f"{row['kv_mb']:.0f} + {row['state_mb']:.0f}",
            f"{row['gigabytes']} GB",
            *(f"{rate:.1f}" for rate in (row["prefixes"], *row["shares"].values(), row["free_states"])),
        ]
        for row in rows
    ]
    header = ["model's shape", "chunk", "KV + state, MB", "memory", "prefixes", *shares, "states for nothing"]
    return table(header, body)
