"""Whole weights: weights that FSDP2 has not divided again when a Trainer makes its optimizer.

Behind a forward pass without backward, as an evaluation is, FSDP2 leaves the weights of its outermost modules whole.
An optimizer that is made then holds these, and no step changes the parts that the model goes on with. Trainer divides
them again from Transformers 5.24 on. An attached one does so with any version, and any other is stopped in time.
"""

from typing import Any

import transformers
from torch import nn

from distca_hf.errors import ConfigError


# Lowest Transformers whose Trainer divides weights again before it makes its optimizer.
LOWEST_DIVIDES_AGAIN = "5.24"


def divide_again(model: nn.Module) -> bool:
    """Divides all weights of a model that FSDP2 has left whole.

    Returns:
        Whether FSDP2 divides any.
    """
    from torch.distributed.fsdp import FSDPModule  # slow to import, and not every training needs it

    divided = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for module in divided:
        module.reshard()
    return bool(divided)


def check_optimizer(model: nn.Module, optimizer: Any) -> None:
    """Checks when a training begins that an optimizer holds the weights that FSDP2 gives gradients to.

    Args:
        optimizer: of Trainer, wrapped by Accelerate or not.

    Raises:
        ConfigError: it holds others; says how many, and what to do.
    """
    if not divide_again(model):
        return
    held = [weight for group in optimizer.param_groups for weight in group["params"]]
    here = set(model.parameters())
    strangers = [weight for weight in held if weight not in here]
    if strangers:
        raise ConfigError(
            f"{len(strangers)} of {len(held)} weights of the optimizer, the first of shape "
            f"{tuple(strangers[0].shape)}, are none that FSDP2 trains: the model ran before training (an evaluation, "
            f"for example), and Transformers {transformers.__version__} made its optimizer of weights that were whole "
            f"then. Call plugin.attach(trainer), update Transformers to {LOWEST_DIVIDES_AGAIN}, or run the model once "
            "training has begun (eval_on_start=True)"
        )
