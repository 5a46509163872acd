"""Profiles: measured times of a cluster's GPUs and links, in a file that planners and the simulator read.

Exchanges and collectives are measured in `distca_hf.comm.measure_links`, which alone may open process groups.
"""
