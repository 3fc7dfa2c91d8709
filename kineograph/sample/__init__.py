"""A run's trained stages to pixels for prompts."""
