"""The bottom layer: configuration, prompts and their layout, and per-request state."""
