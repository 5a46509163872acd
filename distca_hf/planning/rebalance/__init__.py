"""Moving tasks: the planner of layouts that must stay as they are. `planner` is where to begin reading."""

from distca_hf.planning.rebalance.planner import plan_by_moving as plan_by_moving
