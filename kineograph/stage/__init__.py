"""From a stage's config to its Task: read it, build it, load it trained, start it from other weights."""
