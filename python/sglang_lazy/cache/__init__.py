"""The radix tree of linked requests, its parts, and what keeps it in step with another tree in the same pool."""
