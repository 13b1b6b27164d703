"""SGLang's scheduler without a model: SGLang's own classes with our hooks, and a record of the KV in each slot."""
