"""A server whose metrics of chunks are published as often as there is something to publish, whatever that costs."""


def load() -> None:
    """The SGLang plugin; runs in each process that SGLang starts."""
    from sglang_lazy.chunks import metrics

    metrics.TIME_SHARE = 1
