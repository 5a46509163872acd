"""Rebalancing: plans for layouts that must stay as they are, in which tasks move. Begin reading with `planner`."""

from distca_hf.planning.rebalance.planner import plan_by_moving as plan_by_moving
