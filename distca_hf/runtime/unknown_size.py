"""Unknown sizes: sizes of an operator's outputs that depend on data, such as how many rows came from other ranks.

`new_dynamic_size` makes them, too, but only where the graph must be whole (`fullgraph=True`) or the process allows it
(`torch._dynamo.config.capture_dynamic_output_shape_ops`). Anywhere else the graph breaks at the operator. Torch's own
operators go around that as is done here (`torch.distributed._ops.device_mesh`).
"""

import torch

from distca_hf.errors import UnsupportedAttentionError


def check_no_cuda_graphs(device: torch.device) -> None:
    """Refuses to be compiled into CUDA graphs, in which torch cannot hold outputs of unknown sizes.

    Raises:
        UnsupportedAttentionError: torch.compile records CUDA graphs.
    """
    from torch._inductor import config  # slow to import, and nothing but a compiler asks

    if device.type != "cpu" and config.triton.cudagraphs:
        raise UnsupportedAttentionError(
            'a batch with a plan arrived in layers compiled for CUDA graphs (mode="reduce-overhead"): how many rows '
            "come from other ranks differs from batch to batch, and torch cannot record that. Compile layers in the "
            'default mode, layer.compile(), or in "max-autotune-no-cudagraphs"'
        )


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
