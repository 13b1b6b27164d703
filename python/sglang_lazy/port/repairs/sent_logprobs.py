"""Log-probabilities of preempted requests.

A request that is preempted while its first pass runs is reported without a token, and SGLang then counts the first
token's log-probability as sent: the answer lacks it.

Can go once the reported log-probabilities are counted like the reported tokens.
"""

from typing import Any

from sglang_lazy.port.hooks import repair


def send_first(_result: Any, batch: Any) -> None:
    """After `ScheduleBatch.prepare_for_extend`: nothing has been sent of a request without tokens."""
    if batch.return_logprob:
        for req in batch.reqs:
            if not req.output_ids:
                req.send_output_token_logprobs_offset = 0


HOOKS = (
    repair(
        "sglang.srt.managers.schedule_batch.ScheduleBatch.prepare_for_extend",
        send_first,
        "AFTER",
        "answers of preempted requests have all log-probabilities",
        "SGLang counts reported log-probabilities like tokens",
    ),
)
