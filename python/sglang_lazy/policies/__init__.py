"""How a prompt uses its chunks: one module for each policy."""
