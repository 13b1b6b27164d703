"""Independent references for end-to-end tests: tiny models, oracles for masks and policies, seeded prompts."""
