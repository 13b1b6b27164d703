"""The data-parallel rank that each request goes to, as the HTTP process picks it."""

import asyncio
from types import SimpleNamespace

import pytest

from sglang_lazy.core.segments import LAYOUT_PARAM
from sglang_lazy.policies import get_policy
from sglang_lazy.port.serving.requests import choose_rank
from sglang_lazy.serving.plans import Plan
from sglang_lazy.serving.results import learned

A, B = [1, 2, 3, 4], [5, 6]


class Server:
    """The HTTP process of a server, with ranks that do nothing."""

    def __init__(self, dp_size=2):
        self.manager = SimpleNamespace(server_args=SimpleNamespace(dp_size=dp_size), rid_to_state={})

    def send(self, *chunks, lead=(9,), link="block", rank=None, **fields):
        """Dispatch a request; returns it, with its rank."""
        ids, places = list(lead), []
        for chunk in chunks:
            places.append((len(ids), len(ids) + len(chunk)))
            ids += chunk
        plan = Plan.of(tuple(places), get_policy(link))
        obj = SimpleNamespace(
            **{
                "sampling_params": {"custom_params": {LAYOUT_PARAM: plan.pack()}},
                "routed_dp_rank": rank,
                "extra_key": None,
                "cache_salt": None,
                "lora_id": None,
                "input_ids": ids,
                **fields,
            }
        )
        choose_rank(self.manager, obj, plan, ids)
        self.manager.rid_to_state[id(obj)] = SimpleNamespace(obj=obj)
        return obj

    def answer(self, obj, *hits):
        """Let the rank answer `obj`; returns what its user sees."""
        del self.manager.rid_to_state[id(obj)]

        async def outputs():
            yield {"meta_info": {}}
            yield {"meta_info": {"chunks": [{"hit": hit} for hit in hits]}}

        async def read():
            return [out async for out in learned(outputs(), obj.sampling_params)]

        return asyncio.run(read())

    def serve(self, *chunks, hits=None, **kwargs):
        obj = self.send(*chunks, **kwargs)
        outputs = self.answer(obj, *(hits or [True] * len(chunks)))
        assert [list(out["meta_info"]) for out in outputs] == [[], ["chunks"]]
        return obj.routed_dp_rank


def test_one_rank_needs_no_choice():
    server = Server(dp_size=1)
    assert server.serve(A) is None


def test_a_prompt_follows_most_of_its_chunk_tokens():
    server = Server()
    assert {server.serve(A), server.serve(B)} == {0, 1}
    home = server.serve(A)
    assert server.serve(B) != home and server.serve(B, A) == home


@pytest.mark.parametrize(
    "other",
    [
        {"extra_key": "key"},
        {"cache_salt": "tenant"},
        {"lora_id": "adapter"},
        {"link": "base"},
        {"link": "base:preamble=lead", "lead": (8,)},
    ],
    ids=lambda other: " ".join(other),
)
def test_variants_of_a_chunk_are_different_chunks(other):
    """A chunk that no rank has goes to the rank that was sent fewer chunks."""
    server = Server()
    link = other.get("link", "block") if "lead" in other else "block"
    home = server.serve(A, link=link)
    assert server.serve(A, **other) != home
    assert server.serve(A, link=link) == home and server.serve(A, **other) != home


def test_a_named_rank_is_remembered():
    server = Server()
    home = server.serve(A)
    assert server.serve(B, rank=home) == home == server.serve(B)


def test_requests_that_name_a_rank_count_as_its_load():
    server = Server()
    home = server.serve(A)
    running = [server.send(A) for _ in range(20)]
    loads = [sum(obj.routed_dp_rank == rank for obj in running) for rank in (home, 1 - home)]
    assert min(loads) > 5
    for obj in running:
        server.answer(obj, True)
    assert server.serve(A) == home
    server.manager.rid_to_state["embeds"] = SimpleNamespace(obj=SimpleNamespace())  # EmbeddingReqInput has no rank
    assert server.serve(A) == home


def test_misses_are_learned():
    """If a chunk is gone, so are those used longer ago."""
    server = Server()
    home = server.serve(A)
    assert server.serve(B, rank=home) == server.serve(A, B) == home
    server.serve(B, rank=home, hits=[True])
    server.serve(B, rank=home, hits=[False])
    assert server.serve(A) == 1 - home and server.serve(B) == home
