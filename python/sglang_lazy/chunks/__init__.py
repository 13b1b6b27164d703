"""The chunk cache: a radix tree whose namespaces hold chunks and the text that follows them."""
