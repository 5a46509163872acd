"""Documents, models, ways to attend, rounds and reports, which the programs of this folder share."""
