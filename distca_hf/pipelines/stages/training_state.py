"""Training state: what a rank of a pipeline saves to resume, as entries of `torch.distributed.checkpoint` (DCP).

    weights.NAME            of the parts on this rank
    optimizer.*.NAME.*      of each of these weights: states, and settings of its group
    random.STAGE AND RANK   states of this rank's random generators
    others.NAME             of a loader, a learning-rate schedule and the like; the same on all ranks

Weights have the names of the whole model. So no two stages have an entry of the same name, and the stages, chunks and
data ranks that read entries may differ from those that wrote them. Data ranks of a stage have parts of its tensors
(FSDP2), or all have the same.
"""

import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful

from distca_hf.comm.grid import Grid
from distca_hf.data.drawn_rows import random_states, set_random_states
from distca_hf.errors import ConfigError
from distca_hf.pipelines.stages.divided_model import ModelPart


# Each stage numbers the groups of its optimizer, so groups of two stages would seem the same. In a flat state, every
# weight has the settings of its group.
OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)
WEIGHTS, OPTIMIZER, RANDOM, OTHERS = "weights.", "optimizer.", "random.", "others."
STATES, SETTINGS = f"{OPTIMIZER}state.", f"{OPTIMIZER}param_groups."
# Not a setting: all names of a group, if an optimizer was given weights with names. They differ between stages.
NAMES_OF_GROUP = ".param_names"

Entries = dict[str, Any]


class TrainingState:
    """The state of a training on this rank. Raises ConfigError if the optimizer has weights of no part."""

    def __init__(
        self,
        parts: Sequence[ModelPart],
        optimizer: torch.optim.Optimizer,
        grid: Grid,
        device: torch.device,  # device that trains; a GPU has its own random numbers
        others: Mapping[str, Stateful],  # objects whose states are saved, too, by name
    ) -> None:
        stages, data_ranks, _ = grid.shape
        # Name of the entry with random states of this rank.
        self.random_entry = f"{RANDOM}stage {grid.stage} of {stages}, data rank {grid.data_rank} of {data_ranks}"
        self._rank, self._whole, self._optimizer = grid.name, _joined(parts), optimizer
        self._device, self._others = device, others
        ours = set(self._whole.parameters())
        trained = [weight for group in optimizer.param_groups for weight in group["params"]]
        foreign = [tuple(weight.shape) for weight in trained if weight not in ours]
        self._optimizers = [optimizer] if trained else []  # a stage may train nothing, and torch refuses empty states
        if foreign:
            raise ConfigError(
                f"{grid.name}: {len(foreign)} of {len(trained)} weights of the optimizer are in no part given here, "
                f"first one of {foreign[0]}; give all parts of this stage, and an optimizer of only their weights"
            )

    def to_save(self) -> Entries:
        """Returns all entries of this rank. Tensors are the training's own, not copies."""
        is_new = not self._optimizer.state
        entries = _without_names(self._entries_with_room())
        if is_new:  # torch has created the states of a first step, which would count as one
            self._optimizer.state.clear()
            entries = {name: entry for name, entry in entries.items() if not name.startswith(STATES)}
        others = {f"{OTHERS}{name}": _packed(other.state_dict()) for name, other in self._others.items()}
        return {**entries, **others, self.random_entry: _packed(random_states(self._device))}

    def load(self, saved: Mapping[str, object], read: Callable[[Entries], None]) -> None:
        """Loads saved entries. Raises ConfigError if weights in one group of the optimizer were saved with different
        settings.

        Args:
            saved: entries of the checkpoint, by name.
            read: called with entries of this rank; replaces them with the saved ones, tensors in place.
        """
        here = self._entries_with_room()
        entries = _without_names(here)
        # Weights without saved states, because they had no gradient until then.
        new, states = [], [name for name in here if name.startswith(STATES)]
        for weight_name, weight in self._whole.named_parameters():
            names = [name for name in states if name.startswith(f"{STATES}{weight_name}.")]
            if names and not any(name in saved for name in names):
                new.append(weight)
                for name in names:
                    del entries[name]
        entries |= dict.fromkeys(f"{OTHERS}{name}" for name in self._others)
        if self.random_entry in saved:
            entries[self.random_entry] = None
        read(entries)
        here |= entries
        self._check_groups(here)
        weights, of_optimizer = _without_prefix(WEIGHTS, here), _without_prefix(OPTIMIZER, here)
        # Groups without weights, such as the embeddings' on stages that have none, are hidden: flat settings have
        # names of weights, and torch looks for the first weight of every group.
        groups = self._optimizer.param_groups
        self._optimizer.param_groups = [group for group in groups if group["params"]]
        try:
            set_state_dict(
                *(self._whole, self._optimizers),
                model_state_dict=weights,
                optim_state_dict=of_optimizer,
                options=OPTIONS,
            )
        finally:
            loaded = iter(self._optimizer.param_groups)
            self._optimizer.param_groups = [next(loaded) if group["params"] else group for group in groups]
        for weight in new:
            del self._optimizer.state[weight]
        for name, other in self._others.items():
            other.load_state_dict(_unpacked(entries[f"{OTHERS}{name}"], self._device))
        if self.random_entry in entries:
            set_random_states(_unpacked(entries[self.random_entry], self._device), self._device)

    def _entries_with_room(self) -> Entries:
        """Returns weights, and the optimizer's states and settings of them. A new optimizer gets states as after a
        step that changes nothing, to read into."""
        weights, of_optimizer = get_state_dict(self._whole, self._optimizers, options=OPTIONS)
        return {
            **{f"{WEIGHTS}{name}": weight for name, weight in weights.items()},
            **{f"{OPTIMIZER}{name}": entry for name, entry in of_optimizer.items()},
        }

    def _check_groups(self, entries: Entries) -> None:
        """Checks that weights of one group were saved with the same settings. Torch takes the first one's."""
        names = {weight: name for name, weight in self._whole.named_parameters()}
        for number, group in enumerate(self._optimizer.param_groups):
            in_group = [names[weight] for weight in group["params"]]
            for setting in (name for name in group if name != "params"):
                saved = [entries[f"{SETTINGS}{name}.{setting}"] for name in in_group]
                others = [at for at, value in enumerate(saved) if value is not saved[0] and value != saved[0]]
                if others:
                    raise ConfigError(
                        f"{self._rank}: group {number} of the optimizer has {in_group[0]}, which was saved with "
                        f"{setting} {saved[0]}, and {in_group[others[0]]}, with {saved[others[0]]}. Begin again with "
                        "an optimizer of the groups that were saved"
                    )


def _joined(parts: Sequence[ModelPart]) -> nn.Module:
    """Returns a module with the weights of all parts, by the names of the whole model; it computes nothing."""
    whole = nn.Module()
    for part in parts:
        for name, weight in part.model.state_dict(keep_vars=True).items():
            *path, last = name.split(".")
            module = whole
            for step in path:
                if step not in dict(module.named_children()):
                    module.add_module(step, nn.Module())
                module = module.get_submodule(step)
            if isinstance(weight, nn.Parameter):
                module.register_parameter(last, weight)
            else:
                module.register_buffer(last, weight)
    return whole


def _without_names(entries: Entries) -> Entries:
    return {name: entry for name, entry in entries.items() if not name.endswith(NAMES_OF_GROUP)}


def _without_prefix(prefix: str, entries: Entries) -> Entries:
    """Returns entries whose names begin with a prefix, without it."""
    return {name.removeprefix(prefix): entry for name, entry in entries.items() if name.startswith(prefix)}


def _packed(state: object) -> bytes:
    """Returns anything as one entry. DCP would divide a dict, and need its keys in the object that it reads into."""
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def _unpacked(entry: bytes, device: torch.device) -> Any:
    """Returns what was packed. Tensors of the writing rank's GPU are moved to this rank's."""

    def place(storage: Any, location: str) -> Any:
        return storage if location == "cpu" else storage.to(device=device)

    return torch.load(io.BytesIO(entry), map_location=place, weights_only=False)  # with pickle, as DCP itself does
