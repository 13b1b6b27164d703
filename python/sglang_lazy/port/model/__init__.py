"""Where the forward pass meets SGLang: attention backends, the model runner, what fits, Comb."""
