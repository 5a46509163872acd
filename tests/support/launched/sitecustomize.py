"""Python imports this at the start of every process that tests launch: garbage is looked for seldom. There is none
among what imports make, and to look for it is a tenth of what they cost."""

import gc


gc.set_threshold(50_000, 10, 10)
