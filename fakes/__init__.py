"""SGLang's scheduler without a model: its own classes, our hooks, and a record of what the KV in every slot is."""
