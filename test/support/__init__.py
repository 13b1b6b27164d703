"""What tests share: processes that start in a moment, because they are forks of one that has imported SGLang."""
