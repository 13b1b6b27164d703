"""A server under hostile traffic for minutes; see `__main__.py`."""
