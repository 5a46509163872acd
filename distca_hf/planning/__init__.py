"""Who computes which attention task, and what travels for it. Pure: lengths in, integers out, no process groups."""
