"""The quality of policies: a real model's answers under each one, in PyTorch, without a server."""
