"""A training step of a whole model: modes, head, optimizer, and the table."""
