"""Requests in SGLang's HTTP process: tokenization by segment, chat parts, results and shadow mode."""
