"""Where the HTTP process meets SGLang: routes, the request models of each API, the tokenizer manager."""
