"""What the programs of this folder share: documents, models, ways to attend, rounds, and reports."""
