"""Planning without a model: mixes of lengths, planners, baselines and bounds, and measured steps."""
