"""Scheduling of linked requests: producing missing chunks, admitting the requests that wait for them, and locks."""
