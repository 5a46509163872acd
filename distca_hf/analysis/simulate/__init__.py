"""Simulation: seconds of training steps on a measured cluster, for each way to share attention between GPUs.

Times come from `analysis.profiles`, schedules of a pipeline from `pipelines.schedules`. The equations are in
`docs/simulation.md`.
"""
