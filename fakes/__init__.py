"""SGLang's scheduler without a model: its own classes, our hooks, and a record of the KV in each slot."""
