"""Serving under load, over HTTP, against other servers."""
