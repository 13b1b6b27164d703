"""Ground floor: configuration, prompts and their layout, and the state that requests carry."""
