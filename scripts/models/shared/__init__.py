"""What the programs of this folder share: tiny models, and sections of a page."""
