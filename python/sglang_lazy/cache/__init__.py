"""The cache: a radix tree whose nodes hold KV on the device, in host memory, or both."""
