"""Where the scheduler meets SGLang: its steps, its queue, its metrics, messages to it."""
