"""From a layout to a plan, and to the routing of each rank. Pure: lengths in, integers out, no process groups."""
