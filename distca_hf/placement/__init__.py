"""From the lengths of a micro-batch to a layout: which rank holds which tokens. Pure, without torch."""
