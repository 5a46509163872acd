"""Names private to torch: all that this package uses, each with a public fallback if there is one.

Fallbacks are slower, or refuse more. A torch without one of these names gives the same results.
"""

import inspect
import os
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import forward_ad, profiler
from torch.distributed import Store  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import (
    is_traceable_wrapper_subclass as is_traceable_wrapper_subclass,  # torch documents it, here
)
from torch.utils.hooks import RemovableHandle


# Types of operators' arguments. A subclass of Tensor may redefine an operator.
_TENSORS = frozenset([torch.Tensor, torch.nn.Parameter])
_OTHERS = frozenset([int, float, bool, str, list, type(None)])


def _make_is_plain() -> Callable[[tuple[Any, ...]], bool]:
    """Returns `is_plain`. Without the private names no call is plain, and every call goes through the dispatcher."""
    try:
        from torch._C import (
            DispatchKey,
            DispatchKeySet,
            _dispatch_tls_local_exclude_set,
            _dispatch_tls_local_include_set,
            _len_torch_function_stack,
        )
        from torch._C._dynamo.eval_frame import get_eval_frame_callback
    except ImportError:
        return lambda given: False
    if not (hasattr(profiler, "_is_profiler_enabled") and hasattr(forward_ad, "_current_level")):
        return lambda given: False
    # The keys that the dispatcher always includes in a thread without active modes.
    no_mode = (DispatchKeySet(DispatchKey.BackendSelect) | DispatchKeySet(DispatchKey.ADInplaceOrView)).raw_repr()
    autograd = DispatchKey.AutogradFunctionality

    def is_plain(given: tuple[Any, ...]) -> bool:
        if (
            get_eval_frame_callback() is not None
            or _len_torch_function_stack()
            or profiler._is_profiler_enabled
            or forward_ad._current_level >= 0
            or _dispatch_tls_local_include_set().raw_repr() != no_mode
            or (torch.is_grad_enabled() and _dispatch_tls_local_exclude_set().has(autograd))
        ):
            return False
        for x in given:
            kind = type(x)
            if kind in _TENSORS:
                if x.is_neg():
                    return False
            elif kind not in _OTHERS:
                return False
        return bool(given[0].is_cuda or given[0].is_cpu)

    return is_plain


# Returns whether the dispatcher would call only autograd and an operator's function, given these arguments. That means
# no mode (selective checkpointing, counting), no transformation (vmap, functionalisation, forward derivatives), no
# tracing, no profiler, no compiler that looks for frames, no tensor of another kind or device, and no lazily negated
# tensor. Each check costs the host little.
is_plain = _make_is_plain()


def below_autograd(operator: Any) -> Callable[..., Any] | None:
    """Returns a function of a dispatch keyset and arguments that calls an operator as if autograd were done with it.

    Returns None without the private names: `torch.library.register_autograd` is the fallback.
    """
    try:
        from torch._C import _after_autograd_keyset, _AutoDispatchBelowAutograd
    except ImportError:
        return None

    def call(keyset: Any, *given: Any) -> Any:
        with _AutoDispatchBelowAutograd():
            return operator.redispatch(keyset & _after_autograd_keyset, *given)

    return call


def in_dual_level() -> bool:
    """Returns whether forward-mode derivatives may be needed; True if that cannot be found out."""
    return getattr(forward_ad, "_current_level", 0) >= 0


def hidden_from_dynamo(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that `torch.compile` does not look into, even if compiled code calls it.

    The public decorator imports the compiler, which takes a second.
    """
    try:
        from torch._compile import _disable_dynamo
    except ImportError:
        return torch.compiler.disable(function)
    return _disable_dynamo(function)


def ddp_awaits_every_gradient() -> bool:
    """Returns whether this runs inside a forward pass of DDP whose backward waits, on all ranks, for a gradient of
    every weight. There is no public name for the DDP module around a pass; without the private one returns False.
    """
    active = getattr(nn.parallel.DistributedDataParallel, "_get_active_ddp_module", None)
    module = None if active is None else active()
    return module is not None and module.require_backward_grad_sync and not module.find_unused_parameters


def unknown_size() -> int | torch.SymInt:
    """Returns a new size of at least 0, for fake implementations of operators whose outputs depend on data.

    The public `new_dynamic_size` makes them only if the graph must be whole (`fullgraph=True`) or the process allows
    it (`torch._dynamo.config.capture_dynamic_output_shape_ops`). Otherwise the graph breaks at the operator. Torch's
    own operators avoid that in the same way (`torch.distributed._ops.device_mesh`).
    """
    context = torch.library.get_ctx()
    try:
        shape_env, allocate_size = context._shape_env, torch._library.fake_impl.allocate_size
    except AttributeError:
        return context.new_dynamic_size()
    # Without a shape environment all sizes are numbers, which torch accepts or refuses by its own rules.
    return context.new_dynamic_size() if shape_env is None else allocate_size(shape_env)


def compiles_cuda_graphs() -> bool:
    """Returns whether `torch.compile` records CUDA graphs; False if that cannot be found out."""
    try:
        from torch._inductor import config  # slow to import, and only a compiler asks
    except ImportError:
        return False
    return bool(config.triton.cudagraphs)


def _make_backward_number() -> Callable[[], int]:
    number: Callable[[], int] | None = getattr(torch._C, "_current_graph_task_id", None)
    return (lambda: 0) if number is None else number


# Returns the unique number of the backward pass that autograd runs in this thread; -1 if it runs none. Always 0 if
# that cannot be found out.
backward_number = _make_backward_number()


def _public_current_stream(device: int) -> int:
    return torch.cuda.current_stream(device).cuda_stream


# Returns the handle of torch's current stream on a device, given by its number.
current_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", _public_current_stream)


def without_torch_functions() -> AbstractContextManager[Any]:
    """Returns a context in which `__torch_function__` of subclasses is not called; there is no public one."""
    return torch._C.DisableTorchFunctionSubclass()


def default_store() -> Store:
    """Returns the store of the default process group; there is no public way. Raises ValueError if there is no default
    group."""
    return dist.distributed_c10d._get_default_store()


def num_groups() -> int:
    """Returns the number after which torch names the next process group that only some ranks open: of groups that this
    process has opened, before torch 2.14 of groups that it is in. 0 if torch does not say."""
    module = dist.distributed_c10d
    world: Any = getattr(module, "_world", None)
    named_by: Any = getattr(module, "_hash_ranks_to_str", num_groups)
    if world is not None and "group_count" in named_by.__code__.co_names:
        return int(world.group_count)
    return len(getattr(world, "pg_names", ()))


def running_objects() -> Iterator[object]:
    """Yields the objects whose methods run now in this thread, the innermost first. Torch has no name, public or
    private, for the wrappers around a model (except DDP), or for the schedule that runs a stage of a pipeline."""
    frame = inspect.currentframe()
    while frame is not None:
        code = frame.f_code
        # Before Python 3.13, a look copies all variables of a function, and the copies live as long as it runs. A loop
        # would keep the outputs of an earlier step.
        yield frame.f_locals.get("self") if "self" in (*code.co_varnames, *code.co_freevars) else None
        frame = frame.f_back


class Schedule(NamedTuple):
    """A schedule of a pipeline."""

    name: str
    scale_grads: bool  # whether it divides gradients by its number of micro-batches
    has_loss: bool  # whether it has a loss, and so a backward pass; True if torch does not say


def schedule_that_runs() -> Schedule | None:
    """Returns torch's schedule that runs a stage now, if there is one."""
    from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

    for caller in running_objects():
        if isinstance(caller, PipelineScheduleSingle | PipelineScheduleMulti):
            return Schedule(type(caller).__name__, caller.scale_grads, getattr(caller, "_loss_fn", True) is not None)
    return None


def groups_of_fsdp1(module: Any) -> list[dist.ProcessGroup] | None:
    """Returns the groups over which FSDP1 averages gradients: the ranks that share its shards, then, with a hybrid
    strategy, the ranks with the same shard. None if torch does not say."""
    if "HYBRID" not in module.sharding_strategy.name:
        return [module.process_group]
    replicas = getattr(module, "_inter_node_pg", None)
    return None if replicas is None else [module.process_group, replicas]


def ignored_by_ddp(model: nn.Module) -> set[str]:
    """Returns names of weights and buffers that DDP was told to ignore: they may differ between ranks."""
    return {
        f"{of_module}.{name}" if of_module else name
        for of_module, module in model.named_modules()
        for name in getattr(module, "_ddp_params_and_buffers_to_ignore", ())
    }


def ranks_of_groups() -> tuple[list[object], dict[dist.ProcessGroup | int, Collection[int]]]:
    """Returns what identifies the process groups that are open, and each with its ranks of the job; none if torch does
    not say. Groups without this process are under a number. Other threads may open and end groups meanwhile: a new one
    is missing until torch knows its ranks."""
    world = getattr(dist.distributed_c10d, "_world", None)
    groups = dict(getattr(world, "pg_group_ranks", ()))
    names = dict(getattr(world, "pg_names", ()))  # a group may lie in the memory of one that has ended
    return [*map(id, groups), *names.values()], groups


def collectives_started(group: Any) -> int:
    """Returns how many collectives of a process group this rank has started; 0 if torch does not say."""
    try:
        return int(group._get_sequence_number_for_group())
    except (AttributeError, RuntimeError):  # a backend that does not count
        return 0


class ShardedWeight(NamedTuple):
    """A weight that FSDP2 shards."""

    averaged: DeviceMesh  # mesh over which its gradient is averaged
    mesh: DeviceMesh  # mesh over which it is divided between passes, including other ways of dividing it


def sharded_by_fsdp2(model: nn.Module) -> dict[nn.Parameter, ShardedWeight] | None:
    """Returns the weights of a model that FSDP2 shards, in their present form: during a pass some are whole. None if
    torch does not say."""
    from torch.distributed.fsdp import FSDPModule  # slow to import, and not every training needs it

    sharded: dict[nn.Parameter, ShardedWeight] = {}
    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        try:
            state = module._get_fsdp_state()
            # Torch 2.11 has one group, or none. Weights are looked up in modules: a model that moved has new ones.
            groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
            for group in filter(None, groups):
                for weight in group.fsdp_params:
                    here = getattr(weight._module_info.module, weight._module_info.param_name)
                    sharded[here] = ShardedWeight(group.mesh_info.mesh, weight.sharded_param.device_mesh)
        except AttributeError:
            return None
    return sharded


# Takes received rows, sent rows, and the numbers of rows from and to each rank.
AllToAllFunction = Callable[[torch.Tensor, torch.Tensor, list[int], list[int]], dist.Work]


class RowGroup(Protocol):
    """A process group, or only a backend (`ProcessGroupGloo`, `ProcessGroupNCCL`), which torch has in no list."""

    def rank(self) -> int: ...

    def size(self) -> int: ...

    def name(self) -> str: ...


def all_to_all_of(group: RowGroup, device: torch.device) -> AllToAllFunction:
    """Returns a function that starts all-to-alls of rows.

    Does what `dist.all_to_all_single` does in the end, in half of its host time: without c10d's operator, which is
    dispatched on autograd, too.
    """
    get_backend = getattr(group, "_get_backend", None)
    if get_backend is None and not hasattr(group, "alltoall_base"):
        return partial(dist.all_to_all_single, group=group, async_op=True)
    backend: Any = group if get_backend is None else get_backend(device)
    start: Any = backend.alltoall_base
    options = dist.AllToAllOptions()
    options.asyncOp = True
    return partial(start, opts=options)


def register_first_hook(module: nn.Module, hook: Callable[..., object]) -> RemovableHandle:
    """Registers a forward hook with keywords that runs before existing ones.

    With `prepend=True`, Dynamo of torch 2.11 fails on the whole model: it numbers hooks in the order in which they
    entered their dictionary.
    """
    handle = module.register_forward_hook(hook, with_kwargs=True)
    hooks = module._forward_hooks
    *others, added = hooks.items()
    hooks.clear()
    hooks.update([added, *others])
    return handle


@contextmanager
def nccl_errors_end_no_process() -> Iterator[None]:
    """Lets groups that are made in a `with` block outlive errors of NCCL.

    Otherwise torch ends the process. It reads this only from the environment, when a group is made.
    """
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    before = os.environ.get(name)
    os.environ[name] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def connect_group(group: RowGroup, device: torch.device) -> None:
    """Connects the ranks of a backend of NCCL now; without the private name, its first exchange connects them."""
    connect = getattr(group, "eager_connect_single_device", None)
    if connect is not None:
        connect(device)


def abort_group(group: RowGroup) -> None:
    """Ends all operations of a backend of NCCL at once, also operations that wait on a GPU.

    The public `destroy_process_group` waits for them. Without the private name nothing ends.
    """
    end = getattr(group, "abort", None)
    if end is not None:
        end()
