"""Profiles: measured times of a cluster's GPUs and links, in a file that planners and the simulator read.

Exchanges and collectives are measured in `measure_links`; of these files only that one opens process groups.
"""
