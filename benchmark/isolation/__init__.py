"""Whether a tenant can find out what another one has cached."""
