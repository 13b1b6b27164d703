"""Refusals, counted by reason."""

REASONS = ("pool", "positions", "policy", "request", "pin_budget", "pin_room")
"""In this order: too long for the KV pool; a chunk too long for the model; a policy that the server does not support;
anything else that cannot be combined with chunks; a pin beyond the budget; no room on the device for a pin."""


class Refusal(ValueError):
    """A request that cannot be served.  reason: one of REASONS; any other ValueError counts as "request"."""

    def __init__(self, reason: str, message: str):
        super().__init__(message)
        self.reason = reason


def reason_of(error: ValueError) -> str:
    """The reason of a refusal, one of REASONS."""
    return error.reason if isinstance(error, Refusal) else "request"
