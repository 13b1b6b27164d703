"""The one door to SGLang 0.5.23: all hooks, all uses of private names, and the compatibility checks."""
