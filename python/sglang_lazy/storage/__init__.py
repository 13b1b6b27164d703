"""Storage below the host tier: chunks as objects, whatever backend keeps them."""
