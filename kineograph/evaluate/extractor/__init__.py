"""Networks that metrics look through. Each file holds one: its layers, and how saved weights of other origin fit it."""
