"""Repairs of SGLang's own faults. Each says why it is needed and when it can go."""
