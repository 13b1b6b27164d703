"""The benchmark of the page: known prompts, and surveys over every chunk."""

import requests

from benchmark.scheduler.page import Served, page_of
from fakes.context import published
from sglang_lazy.chunks.reports import AT_ONCE


def test_a_survey_over_many_chunks():
    with published():
        served = Served(2 * AT_ONCE, 20)
        times = served.pieces("survey", everybody=False)
        assert len(times) == 2 and min(times) > 0
        with page_of(served) as url:
            assert "<!doctype html>" in requests.get(url, timeout=60).text
            found = requests.get(f"{url}/survey", timeout=60).json()
    cached = served.host.tree_cache.store.catalog
    chunks = found["chunks"]["resident"]["chunks"] + found["chunks"]["host"]["chunks"]
    assert (
        chunks == len(list(cached)) >= 2 * AT_ONCE and found["chunks"]["pinned"]["chunks"] == len(found["pinned"]) == 7
    )
    assert sum(row[1] for row in found["history"]) == 20 and len(found["prompts"]) == 12
    hits, references = (sum(row[i] for row in found["history"]) for i in (3, 2))
    assert hits == sum(chunk.hits for chunk in cached) and 0 < hits < references
