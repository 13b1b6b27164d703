"""The forward pass in SGLang: attention backends, the model runner, compatibility checks, Comb."""
