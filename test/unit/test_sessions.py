"""Turns of SGLang's sessions that later ones replace, with our hooks on SGLang's own classes."""

import types
from array import array

import pytest
from sglang.srt.managers.io_struct import SessionParams
from sglang.srt.session.session_controller import Session

from sglang_lazy.port.hooks import apply
from sglang_lazy.port.repairs import scheduler as repairs

pytestmark = pytest.mark.usefixtures("sglang_context")


@pytest.fixture(autouse=True, scope="module")
def _hooks():
    apply(hook for hook in repairs.HOOKS if hook.function in (repairs.drop_turns, repairs.clear))


def turn(session, name, **params):
    """Add a turn to the session, as the scheduler does."""
    fields = "lora_id custom_logit_processor stream return_logprob top_logprobs_num token_ids_logprob"
    fields += " return_sampling_mask require_reasoning return_hidden_states return_routed_experts priority routing_key"
    fields += " extra_key cache_salt http_worker_ipc time_stats mm_inputs routed_experts_start_len"
    fields += (
        " sampling_logprobs_mode bootstrap_host bootstrap_port bootstrap_room routed_dp_rank disagg_prefill_dp_rank"
    )
    recv_req = types.SimpleNamespace(**dict.fromkeys(fields.split()))
    recv_req.rid, recv_req.input_ids, recv_req.return_hidden_states = name, array("q", [1, 2]), False
    recv_req.sampling_params = types.SimpleNamespace(custom_params=None, max_new_tokens=1, stop_regex_strs=[])
    recv_req.session_params = SessionParams(id="s", **params)
    return session.create_req(recv_req, None, 9)


def test_a_turn_replaces_all_others():
    session = Session(1000, "s")
    earlier = [turn(session, "a"), turn(session, "b")]
    new = turn(session, "c", replace=True)
    assert [*session.req_nodes] == ["c"] and new.to_finish is None
    assert all(req.to_finish is not None for req in earlier)


def test_a_turn_replaces_thousands_that_follow_one():
    session = Session(1000, "s")
    first = turn(session, "0")
    for number in range(3000):
        session.req_nodes[str(number)].req.finished_reason = object()
        turn(session, str(number + 1), rid=str(number), offset=1)
    turn(session, "new", rid="0", replace=True)
    assert [*session.req_nodes] == ["0", "new"] and first.finished()


def test_an_id_is_used_again():
    session = Session(1000, "s")
    for rid, after in (("a", None), ("b", "a"), ("a", "b")):
        if after is not None:
            session.req_nodes[after].req.finished_reason = object()
        turn(session, rid, rid=after)
    turn(session, "c", replace=True)
    assert [*session.req_nodes] == ["c"]
