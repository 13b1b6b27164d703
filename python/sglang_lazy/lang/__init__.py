"""Client side: chunks in programs of SGLang's frontend language."""
