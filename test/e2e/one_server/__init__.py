"""Tests that share one server; a package, so that pytest stops it after the last of them."""
