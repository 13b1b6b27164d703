"""The chunk-keyed cache: one radix tree whose namespaces anchor chunks and the text that follows them."""
