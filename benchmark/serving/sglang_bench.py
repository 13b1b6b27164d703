"""What is used of SGLang's own serving benchmark: its arrivals, its record of a request and its metrics."""

import warnings

with warnings.catch_warnings():  # off CUDA the import warns about parts of SGLang that have nothing to do with this
    warnings.simplefilter("ignore", UserWarning)
    from sglang.benchmark.datasets import DatasetRow
    from sglang.benchmark.serving import RequestFuncOutput, calculate_metrics, get_request

__all__ = ["DatasetRow", "RequestFuncOutput", "calculate_metrics", "get_request"]
