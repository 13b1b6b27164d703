"""Serving under load over HTTP, compared with other servers."""
