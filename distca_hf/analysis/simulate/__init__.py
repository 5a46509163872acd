"""Simulation: seconds of training steps on a cluster that was measured, in every way to share their attention."""
