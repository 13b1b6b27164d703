"""Attention over linked rows: SGLang's own backends, each with a path of ours for batches that have chunks."""
