"""Two more ways to compare with, which only benchmarks simulate: work that is spread evenly, a lower bound and not a
way to train; and context parallelism that gathers keys of all ranks before attention."""

from collections.abc import Sequence

import numpy as np

from distca_hf.analysis.simulate.costs import Costs, Passes
from distca_hf.analysis.simulate.load import Attention, Load, nothing_sent, waited_for
from distca_hf.analysis.simulate.ways import READ_AND_WRITTEN, group_exchange
from distca_hf.analysis.simulate.wires import Cluster
from distca_hf.arrays import IntArray, ceil_div


def even(costs: Costs, document_tokens: IntArray, num_ranks: int) -> Load:
    """Returns the load of the same work, spread evenly without any transfer. Documents of each length are dealt evenly
    to ranks; the remaining ones are divided in zigzag, as if every rank had all keys."""
    lengths, counts = np.unique(document_tokens, return_counts=True)
    cut = np.repeat(lengths, counts % num_ranks)
    kinds: list[Attention] = []
    for mask, layers in costs.model.masks:
        whole = costs.attention(lengths, np.zeros(len(lengths)), mask).times((counts - counts % num_ranks) / num_ranks)
        seconds = Passes(np.array([whole.forward.sum()]), np.array([whole.backward.sum()]))
        for chunk in range(2 * num_ranks):
            part = cut / (2 * num_ranks)
            of_chunk = costs.attention(part, chunk * part, mask).times(1 / num_ranks)
            seconds += Passes(np.array([of_chunk.forward.sum()]), np.array([of_chunk.backward.sum()]))
        kinds.append(nothing_sent(seconds.times(np.ones(num_ranks)), layers))
    tokens = np.full(num_ranks, int(ceil_div(document_tokens.sum(), num_ranks)))
    return Load(tokens, kinds)


def gathered(costs: Costs, cluster: Cluster, held: Sequence[IntArray], group: int) -> Load:
    """Returns the load of zigzag context parallelism that gathers keys and values before attention, and reduces their
    gradients after it. `held` are the lengths of the documents of each group."""
    tokens = np.repeat(ceil_div(np.array([int(x.sum()) for x in held]), group), group)
    _, key_value, _ = costs.token_bytes
    rows = np.repeat([float(x.sum()) for x in held], group)
    received = key_value * rows * (group - 1) / group
    seconds = group_exchange(cluster, received, group)
    copied = costs.copy_seconds(READ_AND_WRITTEN * key_value * rows) * (group > 1)
    attention = []
    for mask, layers in costs.model.masks:
        of_groups = []
        for lengths in held:
            part = lengths / (2 * group)
            chunks = [costs.attention(part, chunk * part, mask) for chunk in range(2 * group)]
            of_groups.append(
                [sum(float(getattr(x, of).sum()) for x in chunks) / group for of in ("forward", "backward")]
            )
        seconds_of = Passes(*(np.repeat([x[of] for x in of_groups], group) for of in (0, 1)))
        attention.append(waited_for(seconds_of, layers, seconds + copied, seconds))
    return Load(tokens, attention, float(np.max(received, initial=0.0)))
