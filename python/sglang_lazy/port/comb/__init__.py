"""Comb in SGLang: the model, its memory for chunks, and attention of its cross layers."""
