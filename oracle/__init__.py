"""Independent truth for end-to-end tests: tiny models, a Hugging Face block-mask oracle and seeded prompts."""
