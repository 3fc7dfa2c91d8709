"""The machine, and what a run will take of it."""
