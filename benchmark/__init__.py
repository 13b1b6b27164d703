"""Benchmarks: of the server, the scheduler's host time, and the quality of answers. Run with `python -m`."""
