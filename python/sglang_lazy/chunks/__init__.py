"""The chunk-keyed cache: one radix tree whose namespaces hold chunks and the text that follows them."""
