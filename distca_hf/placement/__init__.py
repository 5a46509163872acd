"""From the lengths of a micro-batch to a layout: the tokens that each rank holds. Pure, without torch."""
