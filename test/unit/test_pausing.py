"""A scheduler that is paused with requests in its queue, and emptied."""

from types import SimpleNamespace

import pytest
from sglang.srt.managers.io_struct import (
    ExpertDistributionReq,
    FlushCacheReqInput,
    PauseGenerationReqInput,
    TokenizedGenerateReqInput,
    UpdateWeightsFromTensorReqInput,
)
from sglang.srt.managers.schedule_batch import FINISH_ABORT

from fakes.loop import QUESTION, A, B, C, Loop
from sglang_lazy.port.repairs import scheduler as repairs

pytestmark = pytest.mark.usefixtures("sglang_context")


class Pausing(Loop):
    """Requests may be retracted, the cache flushed, the weights updated."""

    def pause(self) -> None:
        self.pause_generation(PauseGenerationReqInput(mode="retract"))

    def update(self, **fields):
        """The answer to a weight update; None if it is postponed."""

        def load(_updater, message):
            self.updated = not message.flush_cache or self.flush_cache()
            return "updated"

        updater = SimpleNamespace(scheduler=self)
        self._request_dispatcher = lambda message: repairs.when_idle(load, updater, message)
        return self._request_dispatcher(SimpleNamespace(**{"flush_cache": True, **fields}))


@pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlap"])
@pytest.mark.parametrize("link", ["block", "query:ratio=0.4", "blend:ratio=0.4", "copy", "base"])
@pytest.mark.parametrize("num_steps", range(6))
def test_a_cache_is_flushed_under_retracted_requests(overlap, link, num_steps):
    """Whatever they were at; they compute everything anew, and nobody reads what was flushed: the pools check it."""
    loop = Pausing(pool_size=200, overlap=overlap, link=link, chunked_prefill_size=6)
    loop.warm(A, C)
    reqs = [loop.submit([A, chunk, QUESTION], f"{i}", max_new_tokens=4) for i, chunk in enumerate((B, C, B))]
    for _ in range(num_steps):
        loop.step()
    loop.pause()
    assert loop.update() == "updated" and loop.updated
    assert set(loop.waiting_queue) == {req for req in reqs if not req.finished()}
    loop.pools.check(loop.admission.holders)
    assert loop.admission.holders == [] and loop.tree_cache.tree.num_locks == 0
    loop._engine_paused = False
    loop.run()
    assert all(len(req.output_ids) == 4 for req in reqs)


def test_paused_rows_keep_the_cache():
    loop = Pausing()
    loop.submit([A, QUESTION], "r")
    loop.step()
    loop._engine_paused = True
    with pytest.raises(repairs.OperationError, match="run or wait"):
        loop.update()
    assert loop.update(flush_cache=False) == "updated"


def test_an_update_waits_for_requests_that_are_ending():
    """A client that has its answer, or has left, knows of no further step."""
    loop = Pausing(overlap=True)
    req = loop.submit([A, QUESTION], "r", max_new_tokens=50)
    for _ in range(4):
        loop.step()
    with pytest.raises(repairs.OperationError, match="run or wait"):
        loop.update()
    req.to_finish = FINISH_ABORT()
    loop.updated = False
    assert loop.update() is None
    loop.ipc_channels = SimpleNamespace(send_to_tokenizer=SimpleNamespace(send_output=lambda *_: None))
    loop.run()
    loop.step()
    assert loop.updated


def test_waiting_requests_forbid_an_update_unless_the_scheduler_is_paused():
    loop = Pausing()
    loop.submit([A, QUESTION], "r")
    with pytest.raises(repairs.OperationError, match="run or wait"):
        loop.update()


@pytest.mark.parametrize("check", [repairs.check_held, repairs.check_released])
def test_memory_is_released_and_resumed_in_turn(check):
    held = check is repairs.check_held
    updater = SimpleNamespace(offload_tags={"weights"})
    check(updater, SimpleNamespace(tags=["kv_cache" if held else "weights"]))
    for tags in (["weights" if held else "kv_cache"], None):
        with pytest.raises(repairs.OperationError, match="was"):
            check(updater, SimpleNamespace(tags=tags))


def test_errors_of_operators_are_answers():
    """But not of what may be done in part: a flush, a weight update."""
    scheduler = SimpleNamespace(_request_dispatcher=SimpleNamespace(_mapping={}))

    def fail(_message):
        raise KeyError("nothing")

    handlers = scheduler._request_dispatcher._mapping
    ending = (FlushCacheReqInput, TokenizedGenerateReqInput, UpdateWeightsFromTensorReqInput)
    handlers |= dict.fromkeys((ExpertDistributionReq, *ending), fail)
    repairs.guard(None, scheduler)
    answer = handlers[ExpertDistributionReq](None)
    assert (answer.answer, answer.reason) == ("ExpertDistributionReqOutput", "KeyError: 'nothing'")
    for other in ending:
        with pytest.raises(KeyError):
            handlers[other](None)


def test_a_refused_weight_update_is_answered():
    def refuse(_message):
        raise repairs.OperationError("busy")

    scheduler = SimpleNamespace(_request_dispatcher=SimpleNamespace(_mapping={UpdateWeightsFromTensorReqInput: refuse}))
    repairs.guard(None, scheduler)
    answer = scheduler._request_dispatcher._mapping[UpdateWeightsFromTensorReqInput](None)
    assert (answer.answer, answer.reason) == ("UpdateWeightsFromTensorReqOutput", "busy")
