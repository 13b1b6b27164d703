"""Conversations over chunks with states of recurrent layers, while everything else happens: whatever a state has gone
through is what the prompts that find it demand, nothing hangs, and nothing is lost.

`fakes.invariants` compares all of it after each step.
"""

import random

import pytest
from sglang.srt.managers import scheduler as sglang_scheduler
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from test_chunk_lists import id_of

from fakes.loop import A, B, C, D, Loop
from fakes.requests import CHUNK, TEXT
from fakes.storage import Storage

pytestmark = pytest.mark.usefixtures("sglang_context")

CHUNKS = [A, B, C, D, (CHUNK, A[1][:2]), (CHUNK, (*A[1], 9)), (CHUNK, (*A[1], 9, 9, 2)), (CHUNK, (7,))]
"""Some begin others, and the last is too short for a state."""
BEGINNINGS = [(TEXT, (3, 4)), (TEXT, (3, 4, 9)), (TEXT, (7, 7, 7, 7, 1)), (TEXT, (5,))]
LINKS = ["block", "block", "block", "base", "base:preamble=lead", "whole:ratio=0.5", "base+whole:ratio=0.5", "full"]


class Conversations:
    """Users of a server with few states and little memory; `dice` decides what they do."""

    def __init__(self, seed: int):
        self.dice = dice = random.Random(seed)
        self.num_states, self.pool_size = dice.choice([1, 2, 3, 5, 8, 12]), dice.choice([40, 60, 100])
        tiers = dice.choice([{}, {"host_size": 40}, {"host_size": 80}, {"host_size": 80, "storage": Storage()}])
        self.loop = Loop(
            self.pool_size,
            num_states=self.num_states,
            max_pieces=dice.choice([1000, 1000, 3, 5]),
            num_rows=dice.choice([3, 6, 8]),
            chunked_prefill_size=dice.choice([3, 7, 64]),
            max_fill_tokens=dice.choice([None, 3, 9]),
            overlap=dice.random() < 0.5,
            eviction_policy=dice.choice(["lru", "lfu", "priority"]),
            scheduler={"prioritizes": dice.random() < 0.5, "policy": dice.choice(["fcfs", "lpm"])},
            **tiers,
        )
        self.loop.new_token_ratio_tracker.current = dice.choice([1.0, 0.1])
        pins = self.loop.admission.pins
        pins.budget, pins.max_states = self.pool_size // 4, max(1, self.num_states // 4)
        self.asked: list[Req] = []
        self.aborted: set[Req] = set()

    def ask(self, rid: str) -> None:
        """A new prompt, or the next turn after an answer."""
        dice, link = self.dice, self.dice.choice(LINKS)
        parts = [dice.choice(BEGINNINGS)] if dice.random() < 0.6 else []
        answered = [req for req in self.asked if req.output_ids and req.finished() and len(req.origin_input_ids) < 25]
        if answered and dice.random() < 0.4:
            earlier = dice.choice(answered)
            parts, link = [*earlier.parts, (TEXT, tuple(earlier.output_ids))], earlier.layout.link
        for _ in range(dice.randint(0, min(4, self.num_states))):
            parts += [dice.choice(CHUNKS), *([dice.choice(BEGINNINGS)] if dice.random() < 0.4 else [])]
        if not parts or dice.random() < 0.9:
            parts.append((TEXT, (dice.randint(1, 15),)))
        has_chunks = any(is_chunk for is_chunk, _ in parts)
        if not has_chunks or ("lead" in link and parts[0][0]):
            link = "block"
        if sum(len(tokens) for _, tokens in parts) + 12 > self.pool_size:
            return
        req = self.loop.submit(
            parts,
            rid,
            link=link,
            max_new_tokens=dice.choice([1, 1, 2, 4, 9]),
            cache_salt=dice.choice([None, None, None, "salt"]),
            priority=dice.choice([0, 0, 5, 9]),
            ahead=has_chunks and dice.random() < 0.1,
        )
        if req.to_finish is None:
            self.asked.append(req)
        else:  # more chunks or pieces than there can be
            self.loop.abort(req)

    def meddle(self) -> None:
        """What others do to the cache."""
        dice, control = self.dice, self.loop.admission.control
        of_one = {"tenant": None, "ids": [id_of(dice.choice(CHUNKS))]}
        match dice.choice(["pin", "expire", "delete", "evict", "flush", *[""] * 20]):
            case "pin":
                control.handle("pin", {**of_one, "pin": True, "ttl": dice.choice([None, 1.0]), "only": None}, 0.0)
            case "expire":
                control.handle("expire", {}, 100.0)
            case "delete":
                control.handle("delete", of_one, 0.0)
            case "evict":
                self.loop.tree_cache.evict(EvictParams(num_tokens=dice.randint(1, self.pool_size)))
            case "flush":
                self.loop.run(2000)
                self.loop.pools.flush()
        self.loop.pools.check(self.loop.admission.holders)


@pytest.mark.parametrize("seed", [*range(8), *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(8, 60))])
def test_states_are_right_and_nothing_hangs_or_is_lost(seed, monkeypatch):
    users = Conversations(seed)
    loop, states = users.loop, users.loop.store.states
    for number in range(40):
        users.ask(f"p{number}")
        monkeypatch.setattr(sglang_scheduler, "TEST_RETRACT", users.dice.random() < 0.3)
        users.aborted |= loop.disturb(users.dice)
        monkeypatch.setattr(sglang_scheduler, "TEST_RETRACT", False)
        users.meddle()
    loop.run(2000)
    for req in users.asked:
        assert req in users.aborted or len(req.output_ids) == req.sampling_params.max_new_tokens
    while len(loop.admission.pins):
        loop.admission.pins.give_up()
    assert states.num_locked == 0
    loop.tree_cache.evict(EvictParams(num_tokens=users.pool_size))
    assert loop.pools.slots.available_size() == users.pool_size
    assert states.pool.available_size() == states.pool.size
