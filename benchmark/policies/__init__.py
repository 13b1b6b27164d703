"""What policies cost in quality: a real model's answers under each, in PyTorch, without a server."""
