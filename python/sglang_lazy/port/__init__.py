"""The one door to SGLang 0.5.17: every hook, every private name, and what fits."""
