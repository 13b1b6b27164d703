"""Chunk hit rates of several servers behind a router, by how it is told where prompts go."""
