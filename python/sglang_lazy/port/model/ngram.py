"""Drafts that SGLang finds in earlier answers: trees, of which a batch with chunks verifies the deepest path, since
linked rows verify chains."""

from typing import Any

import numpy as np

from sglang_lazy.attention.table import table_of
from sglang_lazy.port.hooks import on
from sglang_lazy.port.model.model_runner import decode_with_drafts


class DraftPaths:
    """Mixed into the class of SGLang's worker."""

    # mypy does not know the class that this is mixed into: hence what it ignores below.
    target_worker: Any
    draft_token_num: int

    def forward_batch_generation(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        stock = super().forward_batch_generation  # type: ignore[misc]
        return decode_with_drafts(lambda _worker, *given, **named: stock(*given, **named), self, batch, *args, **kwargs)

    def _prepare_draft_tokens(self, batch: Any) -> tuple[np.ndarray, np.ndarray]:
        tokens, mask = super()._prepare_draft_tokens(batch)  # type: ignore[misc]
        table = table_of(self.target_worker.model_runner.req_to_token_pool)
        if table is None or table.current is None:
            return tokens, mask
        return deepest_paths(tokens, mask, self.draft_token_num)


def deepest_paths(tokens: np.ndarray, mask: np.ndarray, num_nodes: int) -> tuple[np.ndarray, np.ndarray]:
    """Trees of drafts as chains of as many tokens: of each the deepest path, and any tokens after it.

    tokens: [bs * num_nodes], a node after its parent.  mask: [bs * num_nodes * num_nodes], what each node sees.
    """
    trees = mask.reshape(-1, num_nodes, num_nodes)
    chains = tokens.reshape(-1, num_nodes).copy()
    for chain, tree in zip(chains, trees, strict=True):
        path = chain[tree[tree.sum(1).argmax()].astype(bool)]
        chain[: len(path)] = path
    return chains.reshape(tokens.shape), np.broadcast_to(np.tri(num_nodes, dtype=mask.dtype), trees.shape).flatten()


def with_paths(worker: type, algorithm: Any, *_args: Any, **_kwargs: Any) -> type:
    """After `SpeculativeAlgorithm.create_worker`, which returns a class."""
    return type(f"Link{worker.__name__}", (DraftPaths, worker), {}) if algorithm.is_ngram() else worker


HOOKS = (
    on("sglang.srt.speculative.spec_info.SpeculativeAlgorithm").feature(
        "create_worker", with_paths, "AFTER", "batches with chunks verify chains that were found in earlier answers"
    ),
)
