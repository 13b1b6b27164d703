"""Where the chunk store meets SGLang: its radix trees, the host tier, storage, KV events."""
