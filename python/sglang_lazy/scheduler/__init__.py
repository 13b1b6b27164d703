"""Scheduling of linked requests: fills for missing chunks, parents that wait for them, and their locks."""
