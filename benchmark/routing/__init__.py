"""Chunk hit rates of several servers behind a router, by routing method."""
