"""Trees of drafts as chains."""

import itertools
import random
from types import SimpleNamespace

import numpy as np
import pytest

from sglang_lazy.attention.decode_rows import deepest_paths
from sglang_lazy.port.model import drafts

pytestmark = pytest.mark.usefixtures("sglang_context")


def tree(parents):
    """What each node sees, as SGLang has it: the nodes above it and itself."""
    mask = np.eye(len(parents), dtype=bool)
    for node, parent in enumerate(parents):
        if parent is not None:
            mask[node] |= mask[parent]
    return mask


@pytest.mark.parametrize(
    ("parents", "path"),
    [
        ([None, 0, 1, 2], [0, 1, 2, 3]),
        ([None, 0, 0, 1, 2, 4], [0, 2, 4, 5]),
        ([None, 0, 0, 0], [0, 1]),
        ([None, 0, 1, 0, 0, 0], [0, 1, 2]),  # as SGLang pads what it found
    ],
)
def test_the_deepest_path(parents, path):
    mask, tokens = tree(parents), np.arange(100, 100 + len(parents))
    chains, seen = deepest_paths(tokens, mask.flatten(), len(parents))
    assert chains[: len(path)].tolist() == [100 + node for node in path]
    assert seen.reshape(mask.shape).tolist() == np.tri(len(parents), dtype=bool).tolist()
    assert tokens.tolist() == list(range(100, 100 + len(parents))), "SGLang's own are not changed"


def test_batches_of_trees():
    """Each as it would be alone."""
    dice, num_nodes = random.Random(0), 7
    parents = [[None, *(dice.randrange(node) for node in range(1, num_nodes))] for _ in range(5)]
    masks = [tree(each).flatten() for each in parents]
    tokens = np.arange(5 * num_nodes) * 3
    chains, seen = deepest_paths(tokens, np.concatenate(masks), num_nodes)
    alone = [deepest_paths(tokens[7 * i : 7 * i + 7], mask, num_nodes) for i, mask in enumerate(masks)]
    assert chains.tolist() == list(itertools.chain.from_iterable(each[0].tolist() for each in alone))
    assert seen.tolist() == list(itertools.chain.from_iterable(each[1].tolist() for each in alone))


class Worker:
    """SGLang's."""

    draft_token_num = 4

    def __init__(self, table):
        pool = SimpleNamespace(segment_table=table)
        self.target_worker = SimpleNamespace(model_runner=SimpleNamespace(req_to_token_pool=pool))

    def _prepare_draft_tokens(self, _batch):
        return np.arange(4), tree([None, 0, 0, 2]).flatten()


def test_batches_without_chunks_keep_their_trees():
    algorithm = SimpleNamespace(is_ngram=lambda: True)
    worker = drafts.with_paths(Worker, algorithm)
    for current, path in ((None, [0, 1, 2, 3]), (object(), [0, 2, 3])):
        tokens, _ = worker(SimpleNamespace(current=current))._prepare_draft_tokens(None)
        assert tokens[: len(path)].tolist() == path
    assert drafts.with_paths(Worker, SimpleNamespace(is_ngram=lambda: False)) is Worker
