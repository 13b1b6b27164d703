"""Whether one tenant can tell what another one holds."""
