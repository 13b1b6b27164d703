"""Hooks on SGLang's HTTP process: routes, the request models of each API, the tokenizer manager."""
