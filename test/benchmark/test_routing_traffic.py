"""The traffic by which routing policies are compared."""

from collections import Counter
from itertools import islice

import pytest

from benchmark.routing.traffic import DOCUMENTS_A_PROMPT, TRAFFIC, Traffic, tokens_of


@pytest.mark.parametrize("name", TRAFFIC)
def test_prompts_are_mostly_of_one_collection(name):
    traffic = TRAFFIC[name]
    prompts = list(islice(traffic.prompts(0), 2000))
    assert prompts == list(islice(traffic.prompts(0), 2000)) != list(islice(traffic.prompts(1), 2000))
    for collection, documents in prompts:
        assert len(set(documents)) == len(documents) == DOCUMENTS_A_PROMPT
        own = sum(document // traffic.size == collection for document in documents)
        assert own >= DOCUMENTS_A_PROMPT - traffic.others and max(documents) < traffic.collections * traffic.size
    asked = Counter(collection for collection, _ in prompts)
    weights = [rank**-traffic.alpha for rank in range(1, traffic.collections + 1)]
    for rank, weight in enumerate(weights):  # Zipf's law, within four standard deviations
        share = weight / sum(weights)
        assert abs(asked[rank] / 2000 - share) < 4 * (share * (1 - share) / 2000) ** 0.5


def test_other_documents_come_from_all_collections():
    traffic = Traffic(collections=10, size=10, alpha=0.01, others=5)
    documents = {document for _, documents in islice(traffic.prompts(0), 500) for document in documents}
    assert documents == set(range(100))


def test_documents_are_deterministic():
    assert tokens_of(3, 8) == tokens_of(3, 8) != tokens_of(4, 8)
