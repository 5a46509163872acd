"""Planning without a model: mixes of lengths, planners beside baselines and bounds, and measured steps."""
