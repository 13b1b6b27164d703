"""Independent references for end-to-end tests: tiny models, oracles of masks and policies, seeded prompts."""
