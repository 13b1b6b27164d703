"""Hooks on SGLang's scheduler: its steps, queue, metrics and control messages."""
