"""Repairs of SGLang's own faults, on its own classes."""

import asyncio
import inspect
import io
import logging
from types import SimpleNamespace

import pytest
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.sampling.watermarking import core

from fakes.loop import QUESTION, A, Loop
from fakes.requests import new_request
from sglang_lazy.port.repairs import http, processes
from sglang_lazy.port.repairs.scheduler import find_places
from sglang_lazy.port.scheduler import steps


def test_clients_cannot_forge_log_lines(monkeypatch):
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter("[%(asctime)s] %(message)s"))
    monkeypatch.setattr(logging.root, "handlers", [handler])
    for _ in range(2):
        processes.indent_lines(None, None)
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
    scheduler.enable_priority_scheduling, scheduler.rust_server = False, None
    scheduler.ipc_channels = SimpleNamespace(
        send_to_tokenizer=SimpleNamespace(send_output=lambda *args: sent.append(args))
    )
    limit = inspect.unwrap(Scheduler._abort_on_queued_limit)
    return lambda req: (steps.abort_on_queued_limit(limit, scheduler, req), scheduler.waiting_queue), sent


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


def begun(manager, *rids):
    """A request with these ids that has been sent to the scheduler."""
    is_batch = len(rids) > 1
    obj = GenerateReqInput(text=["a"] * len(rids) if is_batch else "a", rid=list(rids) if is_batch else rids[0])
    obj.normalize_batch_and_arguments()
    http.begin(inspect.unwrap(TokenizerManager._init_req_state)(manager, obj), manager, obj)
    return obj


@pytest.mark.usefixtures("sglang_context")
@pytest.mark.parametrize("rids", [("r",), ("r", "s", "t")])
def test_what_still_runs_of_a_stream_is_aborted(monkeypatch, rids):
    """All its prompts, and no later request with the same ids."""
    monkeypatch.setattr(http, "SECONDS", 0)
    manager = TokenizerManager.__new__(TokenizerManager)
    manager.rid_to_state = {}
    manager.enable_trace = manager.enable_metrics = False
    manager.disaggregation_mode, manager.server_args = DisaggregationMode.NULL, SimpleNamespace(tokenizer_worker_num=1)
    sent = []
    manager._dispatch_to_scheduler = lambda message: sent.append(message.rid)

    def end(obj):
        sent.clear()
        asyncio.run(http.create_abort_task(None, manager, obj)())
        return sorted(sent)

    answered, left = begun(manager, *rids), begun(manager, "other")
    for rid in rids:
        del manager.rid_to_state[rid]
    assert end(answered) == []
    again = begun(manager, *rids)
    assert end(answered) == [] and end(again) == sorted(rids) and end(left) == ["other"]


def test_a_server_shows_no_keys(monkeypatch):
    """Not in its flags, nor in the command or in the states of its schedulers; what else it shows stays."""
    original = core.redact_watermark_secrets
    monkeypatch.setattr(
        core, "redact_watermark_secrets", lambda *args, **options: http.hide(original, *args, **options)
    )
    flags = {"api_key": "key", "admin_api_key": "admin", "port": 30000, "ssl_keyfile_password": None}
    command = "launch_server --api-key key --admin-api-key=admin --model-path admin-key --key keyed"
    info = {**flags, "launch_command": command, "internal_states": [dict(flags), {"load": 1}]}
    shown = core.redact_watermark_secrets(info)
    hidden = {**flags, "api_key": "<redacted>", "admin_api_key": "<redacted>"}
    left = "launch_server --api-key <redacted> --admin-api-key=<redacted> --model-path admin-key --key keyed"
    assert shown == {**hidden, "launch_command": left, "internal_states": [hidden, {"load": 1}]}
    assert info["api_key"] == "key" == info["internal_states"][0]["api_key"]


def test_several_workers_keep_their_adapters():
    def change(*_args):
        raise AssertionError("not refused")

    manager = SimpleNamespace(server_args=SimpleNamespace(tokenizer_worker_num=2))
    answer = asyncio.run(http.refuse_with_workers(change, manager, None))
    assert not answer.success and "--lora-paths" in answer.error_message


@pytest.mark.parametrize(
    "module, of_server, fits",
    [
        ("mlp.gate_up_proj", {}, True),  # as SGLang calls the two once it has read them
        ("mixer.up_proj", {}, False),
        ("mixer.up_proj", {"target_modules": {"qkv_proj", "gate_up_proj"}}, False),
        ("self_attn.qkv_proj", {"target_modules": {"qkv_proj"}}, True),
    ],
)
def test_an_adapter_without_a_place_is_refused(module, of_server, fits):
    """SGLang looks for `gate_up_proj` once an adapter says that it adapts `up_proj`."""
    layer = SimpleNamespace(weights={f"base_model.model.layers.0.{module}.lora_A.weight": None})
    manager = SimpleNamespace(
        configs={"id": SimpleNamespace(target_modules=["up_proj"])},
        loras={"id": SimpleNamespace(layers=[layer])},
        **of_server,
    )
    if fits:
        find_places(None, manager, SimpleNamespace(lora_id="id"))
    else:
        with pytest.raises(ValueError, match=f"{module}.* does not serve adapters of this module in this model"):
            find_places(None, manager, SimpleNamespace(lora_id="id"))
    assert ("id" in manager.loras, "id" in manager.configs) == (fits, fits)
