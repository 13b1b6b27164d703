"""Repairs of SGLang's own faults, on its own classes."""

import asyncio
import copy
import inspect
import io
import logging
from types import SimpleNamespace

import pytest
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.scheduler_components.output_streamer import _GenerationStreamAccumulator
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from fakes.loop import QUESTION, A, Loop
from fakes.requests import new_request
from sglang_lazy.port.repairs import abort_tasks, logs, sent_logprobs
from sglang_lazy.port.scheduler import memory


def reported(req):
    """The log-probabilities that SGLang reports of a request now."""
    off = ("return_hidden_states", "return_routed_experts", "return_indexer_topk", "return_sampling_mask")
    accumulator = _GenerationStreamAccumulator(
        **dict.fromkeys((*off, "rust_server_mode"), False),
        return_logprob=True,
        spec_algorithm=SpeculativeAlgorithm.NONE,
        disaggregation_mode=DisaggregationMode.NULL,
        default_stream_interval=1,
        default_force_stream_interval=50,
        get_cached_tokens_details=lambda _req: None,
    )
    accumulator.accept(req=req)
    return accumulator.output_token_logprobs_val


@pytest.mark.usefixtures("sglang_context")
def test_a_request_preempted_before_its_first_token_keeps_its_log_probability():
    req = new_request([QUESTION], rid="r")
    req.return_logprob, req.stream, req.tokenizer = True, True, None
    req.init_incremental_detokenize = lambda: ([], 0)
    for name in ("token_logprobs", "top_logprobs", "token_ids_logprobs"):
        setattr(req.logprob, f"output_{name}_val", [])
        setattr(req.logprob, f"output_{name}_idx", [])
    assert reported(req) == [[]]  # it was preempted, and is reported with the batch whose result does not count
    sent_logprobs.send_first(None, SimpleNamespace(return_logprob=True, reqs=[req]))
    req.output_ids.append(5)
    req.logprob.output_token_logprobs_val.append(-0.5)
    assert reported(req) == [[-0.5]]


def test_clients_cannot_forge_log_lines(monkeypatch):
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter("[%(asctime)s] %(message)s"))
    monkeypatch.setattr(logging.root, "handlers", [handler])
    for _ in range(2):
        logs.indent_lines(None, None)
    line_breaks = ("\n", "\r\n", "\r", "\x0b", "\x0c", "\x1c", "\x85", "\u2028")
    for line_break in line_breaks:
        logging.root.error(f"no adapter 'x{line_break}[2026-01-01 00:00:00] forged\x1b[2K'")
    lines = stream.getvalue().splitlines()
    assert sum(line.startswith("[") for line in lines) == len(line_breaks)
    assert "\x1b" not in stream.getvalue() and "\\x1b" in stream.getvalue()


def limited(max_queued, queue):
    """A function that tells whether SGLang's limit of its queue refuses a request, and the answers that it sends."""
    scheduler, sent = Scheduler.__new__(Scheduler), []
    scheduler.max_queued_requests, scheduler.waiting_queue = max_queued, queue
    scheduler.enable_priority_scheduling = False
    scheduler.ipc_channels = SimpleNamespace(
        send_to_tokenizer=SimpleNamespace(send_output=lambda *args: sent.append(args))
    )
    limit = inspect.unwrap(Scheduler._abort_on_queued_limit)
    return lambda req: (memory.abort_on_queued_limit(limit, scheduler, req), scheduler.waiting_queue), sent


@pytest.mark.usefixtures("sglang_context")
def test_a_full_queue_takes_retracted_requests_back():
    refuses, sent = limited(0, [])
    req = new_request([QUESTION], rid="r")
    for is_retracted in (False, True):
        req.retracted_stain = is_retracted
        assert refuses(req)[0] is not is_retracted
    assert len(sent) == 1


@pytest.mark.usefixtures("sglang_context")
def test_chunks_computed_ahead_take_no_place_in_the_queue():
    loop = Loop(400)
    queue = [loop.submit([A, QUESTION], f"ahead-{i}", ahead=True) for i in range(3)]
    queue.insert(1, loop.submit([QUESTION], "user"))
    for max_queued, refused in ((2, False), (1, True)):
        refuses, _ = limited(max_queued, queue)
        assert refuses(new_request([QUESTION], rid="r")) == (refused, queue)


def begun(manager, rid, n):
    """A request with `n` samples that has been sent to the scheduler."""
    obj = GenerateReqInput(text="a", rid=rid, sampling_params={"n": n})
    obj.normalize_batch_and_arguments()
    abort_tasks.begin(inspect.unwrap(TokenizerManager._init_req_state)(manager, obj), manager, obj)
    if n > 1:
        for _ in range(n):
            sample = copy.copy(obj[0])
            sample.regenerate_rid(prefix=rid)
            manager._init_child_req_state(rid, sample)
        manager._remove_req_state(rid)
    return obj


@pytest.mark.parametrize("n", [1, 3])
def test_what_still_runs_of_a_stream_is_aborted(monkeypatch, n):
    """All its samples, and no later request with the same id."""
    monkeypatch.setattr(abort_tasks, "SECONDS", 0)
    manager = TokenizerManager.__new__(TokenizerManager)
    manager.rid_to_state, manager.child_rid_to_logical_rid, manager.logical_rid_to_child_rids = {}, {}, {}
    manager.enable_trace = manager.enable_metrics = False
    manager.disaggregation_mode, manager.server_args = DisaggregationMode.NULL, SimpleNamespace(tokenizer_worker_num=1)
    sent = []
    manager._dispatch_to_scheduler = lambda message: sent.append(message.rid)

    def end(obj):
        sent.clear()
        asyncio.run(abort_tasks.create_abort_task(None, manager, obj)())
        return sorted(sent)

    left = begun(manager, "r", n)
    others = begun(manager, "other", n)
    running = sorted(rid for rid in manager.rid_to_state if rid.startswith("r"))
    assert end(left) == running and len(running) == n
    for rid in running:
        manager._remove_req_state(rid)
    again = begun(manager, "r", n)
    assert end(left) == [] and len(end(again)) == n == len(end(others))
