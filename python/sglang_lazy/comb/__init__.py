"""Comb: chunks that a model reads through an encoder and cross layers, outside of the text (docs/comb.md)."""
