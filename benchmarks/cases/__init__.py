"""One module per family, each with its `CASES`; all modules here are loaded."""
