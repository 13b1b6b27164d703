"""The quality of policies: a real model's answers under each, in PyTorch, without a server."""
