"""The parts of SGLang's serving benchmark that we use: arrivals, the record of a request, and metrics."""

import warnings

with warnings.catch_warnings():  # off CUDA the import warns about unrelated parts of SGLang
    warnings.simplefilter("ignore", UserWarning)
    from sglang.benchmark.datasets import DatasetRow
    from sglang.benchmark.serving import RequestFuncOutput, calculate_metrics, get_request

__all__ = ["DatasetRow", "RequestFuncOutput", "calculate_metrics", "get_request"]
