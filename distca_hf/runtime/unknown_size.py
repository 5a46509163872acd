"""Unknown sizes: sizes of an operator's outputs that depend on data, such as how many rows came from other ranks.

`new_dynamic_size` makes them, too, but only where the graph must be whole (`fullgraph=True`) or the process allows it
(`torch._dynamo.config.capture_dynamic_output_shape_ops`). Anywhere else the graph breaks at the operator. Torch's own
operators go around that as is done here (`torch.distributed._ops.device_mesh`).
"""

import torch


def unknown_size() -> int | torch.SymInt:
    """Returns a new size of at least 0; for fake implementations of operators.

    Both names are private to torch. Without them a graph may break at the operator, and its numbers stay right.
    """
    context = torch.library.get_ctx()
    try:
        shape_env, allocate_size = context._shape_env, torch._library.fake_impl.allocate_size
    except AttributeError:
        return context.new_dynamic_size()
    # Without an environment of shapes all sizes are numbers; torch says what that means for this operator.
    return context.new_dynamic_size() if shape_env is None else allocate_size(shape_env)
