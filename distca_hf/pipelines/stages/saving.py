"""Saving: all ranks of a pipeline together write one ordinary Transformers checkpoint, without gathering the parts; or
their training in a folder, from which they resume.

    model-00001-of-00004.safetensors   part 0, with the names that the whole model has
    ...
    model.safetensors.index.json       which file holds which weight, read from the headers of these files
    config.json, generation_config.json

The first data rank of each stage writes its parts, at first under temporary names. When all are there, one rank
renames them, never to the name of a file that an earlier checkpoint in the folder needs: to avoid that, a name may
become model-00001-of-00004-b.safetensors. A new index makes them the checkpoint, in one step, and earlier weights are
removed last. So the folder always holds the earlier checkpoint or the new one, whatever fails.

A training to resume:

    FOLDER.unfinished       `torch.distributed.checkpoint` (DCP) writes here, its .metadata last
    FOLDER                  a complete checkpoint: renamed once all ranks have written
    FOLDER.earlier          the previous one, while the new one takes its name

The .metadata of a checkpoint is written last and removed first, so a checkpoint that has it is complete.
"""

import json
import re
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from distca_hf.comm.grid import Grid, Scope
from distca_hf.comm.transport import Transport
from distca_hf.errors import CheckpointError, ConfigError, and_more, first_line
from distca_hf.parallel_context import ParallelContext
from distca_hf.pipelines.stages.divided_model import ModelPart
from distca_hf.pipelines.stages.training_state import OPTIMIZER, OTHERS, SETTINGS, WEIGHTS, Entries, TrainingState
from distca_hf.telemetry import get_logger
from distca_hf.whole_file import replaced


log = get_logger(__name__)

# DCP's description of a checkpoint, which it writes last.
METADATA = ".metadata"
INDEX = "model.safetensors.index.json"
# Files of weights of a checkpoint, this one or an earlier one with other files.
WEIGHT_FILES = re.compile(r"(model|pytorch_model)(-\d{5}-of-\d{5}(-b)?)?\.(safetensors|bin)(\.index\.json)?")
# Weights in a single file: Transformers reads them even if there is an index.
SINGLE = "model.safetensors"
# Ends of the names of files and folders that are still being written, and of the folder that is being replaced.
UNFINISHED, EARLIER = ".unfinished", ".earlier"


def save_parts(parts: Sequence[ModelPart], folder: str | Path, plugin: ParallelContext) -> None:
    """Writes a checkpoint that `from_pretrained` reads. A collective call of all stages, with one folder that all
    ranks share.

    Args:
        parts: of this rank.
        folder: created if necessary. Weights of an earlier checkpoint are removed once the new one is complete.
        plugin: the one with which the parts were loaded.

    Raises:
        ConfigError: files of other stages are not visible here.
        PeerLostError: a rank could not write its part.
    """
    folder, grid = Path(folder), plugin.members.grid
    transport = plugin.transport(plugin.device)
    for part in parts:
        # Whole weights on the host of the first data rank; ranks that shard them (FSDP2) gather them one by one.
        weights: dict[str, torch.Tensor] = {}
        for name, weight in part.model.state_dict().items():
            whole = weight.full_tensor() if isinstance(weight, DTensor) else weight
            if grid.data_rank == 0:
                weights[name] = whole.detach().cpu().contiguous()
        if grid.data_rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            with replaced(folder / (_file_of(part.number, part.num_parts) + UNFINISHED)) as unfinished:
                save_file(revert_weight_conversion(part.model, weights), unfinished, metadata={"format": "pt"})
    transport.gather([0], f"until all parts are written to {folder}", Scope.GROUP).wait()
    if grid.number == 0:
        _finish(parts[0], folder)
    transport.gather([0], f"until the parts in {folder} are renamed", Scope.GROUP).wait()


def _file_of(part: int, num_parts: int) -> str:
    """Returns the name of a part's file, counted from 1 as Transformers does."""
    return f"model-{part + 1:05}-of-{num_parts:05}.safetensors"


def _finish(first_part: ModelPart, folder: Path) -> None:
    """Replaces an earlier checkpoint with all parts, and writes all other files."""
    files = [_file_of(part, first_part.num_parts) for part in range(first_part.num_parts)]
    missing = [name for name in files if not (folder / (name + UNFINISHED)).is_file()]
    if missing:
        raise ConfigError(
            f"{folder}: {len(missing)} of {len(files)} parts were written by other ranks and cannot be seen here, "
            f"first {missing[0]}; give a folder that all ranks share"
        )
    ending = "-b.safetensors" if set(files) & _files_of_index(folder / INDEX) else ".safetensors"
    weight_map, total_bytes = dict[str, str](), 0
    for name in files:
        final = folder / name.replace(".safetensors", ending)
        (folder / (name + UNFINISHED)).rename(final)
        with final.open("rb") as file:  # the entries by weight are JSON, after 8 bytes with its length
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        header.pop("__metadata__", None)
        weight_map |= dict.fromkeys(header, final.name)
        total_bytes += sum(end - begin for begin, end in (weight["data_offsets"] for weight in header.values()))
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    with replaced(folder / INDEX) as unfinished:
        unfinished.write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
        _write_configuration(first_part.model, folder)
    (folder / SINGLE).unlink(missing_ok=True)
    for path in folder.iterdir():
        if WEIGHT_FILES.fullmatch(path.name) and path.name not in {INDEX, *weight_map.values()}:
            path.unlink()


def _files_of_index(path: Path) -> set[str]:
    """Returns the files of weights that an index names; none if it cannot be read, as then no checkpoint can."""
    try:
        return set(json.loads(path.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return set()


def _write_configuration(model: PreTrainedModel, folder: Path) -> None:
    """Writes all files of a checkpoint that are not weights, each in one step."""
    model.config.architectures, model.config.dtype = [type(model).__name__], str(model.dtype).removeprefix("torch.")
    with TemporaryDirectory() as made:
        model.config.save_pretrained(made)
        if model.can_generate():
            model.generation_config.save_pretrained(made)
        for file in Path(made).iterdir():
            with replaced(folder / file.name) as unfinished:
                unfinished.write_bytes(file.read_bytes())


def save_training(
    parts: Sequence[ModelPart],
    optimizer: torch.optim.Optimizer,
    folder: str | Path,
    plugin: ParallelContext,
    **others: Stateful,
) -> None:
    """Saves weights, the optimizer's state and random states for `load_training`. A collective call of all stages
    between optimizer steps, with one folder that all ranks share.

    Args:
        parts: of this rank.
        optimizer: of all their weights.
        folder: only for one checkpoint. An existing one is replaced when the new one is complete. A symbolic link
            stays, and its target is replaced.
        plugin: the one with which the parts were loaded.
        others: anything else with `state_dict` and `load_state_dict`, under names of your choice: the loader, the
            learning-rate schedule. Must be equal on all ranks, because one of them writes each.

    Raises:
        ConfigError: the folder holds other files; ranks do not share it; or the optimizer has weights of no part.
        CheckpointError: a rank could not write or rename; the earlier content of the folder is still there.
    """
    folder, grid = Path(folder).resolve(), plugin.members.grid
    state = TrainingState(parts, optimizer, grid, plugin.device, others)
    transport = plugin.transport(plugin.device)
    unfinished, earlier = Path(f"{folder}{UNFINISHED}"), Path(f"{folder}{EARLIER}")
    for path in (folder, unfinished, earlier):
        _check_replaceable(path)
    entries = state.to_save()
    transport.gather([0], f"before a training is saved in {folder}", Scope.GROUP).wait()
    if grid.number == 0:
        if (unfinished / METADATA).is_file() and not unfinished.is_symlink() and not folder.exists():
            unfinished.rename(folder)  # a process ended before it could
        _remove(unfinished)
    transport.gather([0], f"before {unfinished} is written", Scope.GROUP).wait()
    try:
        save(entries, checkpoint_id=unfinished)
    except CheckpointException as error:
        raise CheckpointError(
            f"{grid.name}: the training was not saved in {folder}, which is as it was before: {_failures(error, grid)}"
        ) from error
    seen = transport.gather([int((unfinished / METADATA).is_file())], f"looking for {unfinished}", Scope.GROUP).wait()
    blind = [grid.label(rank) for rank, (sees,) in zip(grid.members(Scope.GROUP), seen, strict=True) if not sees]
    if blind:
        raise ConfigError(
            f"{len(blind)} of {len(seen)} ranks cannot see {unfinished / METADATA}, which the first rank wrote, first "
            f"rank {blind[0]}; give a folder that all ranks share"
        )
    _replace(folder, unfinished, earlier, transport)


def load_training(
    parts: Sequence[ModelPart],
    optimizer: torch.optim.Optimizer,
    folder: str | Path,
    plugin: ParallelContext,
    **others: Stateful,
) -> None:
    """Resumes a training that `save_training` saved. A collective call of all stages, before the first step.

    With the same stages, data ranks and chunks, training is then bit-equal to an uninterrupted one. Weights and the
    optimizer's state can be read on others, with FSDP2 as with DDP; random states cannot.

    Args:
        parts: of this rank.
        optimizer: a new one, of all their weights. Its settings become the checkpoint's.
        folder: as saved.
        plugin: the one with which the parts were loaded.
        others: the saved ones, under the same names. One that is left out begins anew, with a warning. Create a
            learning-rate schedule before this call: it adds settings to the optimizer.

    Raises:
        ConfigError: there is no complete checkpoint, or it is of another model, optimizer or position in the data.
            When a position is refused, weights have already been loaded.
        CheckpointError: a rank could not read.
    """
    folder, grid = Path(folder).resolve(), plugin.members.grid
    state = TrainingState(parts, optimizer, grid, plugin.device, others)
    metadata, transport = _read_metadata(folder), plugin.transport(plugin.device)

    def read(entries: Entries) -> None:
        _check_entries(entries, metadata, folder, transport)
        try:
            load(entries, checkpoint_id=folder)
        except CheckpointException as error:
            raise CheckpointError(
                f"{grid.name}: the training in {folder} cannot be read, and this one must not go on with parts of it: "
                f"{_failures(error, grid)}. If a file is incomplete, resume from another checkpoint"
            ) from error

    saved = metadata.state_dict_metadata
    state.load(saved, read)
    left_out = {name.removeprefix(OTHERS) for name in saved if name.startswith(OTHERS)} - others.keys()
    for name in sorted(left_out):
        log.warning("%s holds the state of %r, which load_training was not given: it begins anew", folder, name)
    if state.random_entry not in saved:
        log.warning("%s was saved by other stages or data ranks: random numbers begin anew", folder)


def _remove(folder: Path) -> None:
    """Removes a checkpoint, if there is one, or a link of its name. Removes the description first: if interrupted, the
    rest does not count as complete."""
    with suppress(OSError):
        (folder if folder.is_symlink() else folder / METADATA).unlink()
    shutil.rmtree(folder, ignore_errors=True)


def _replace(folder: Path, unfinished: Path, earlier: Path, transport: Transport) -> None:
    """Renames a complete checkpoint on the first rank, while the others wait."""
    grid, problem = transport.grid, None
    if grid.number == 0:
        try:
            was_there = folder.exists()  # else an earlier one may be all there is
            if was_there:
                _remove(earlier)
                folder.rename(earlier)
            try:
                unfinished.rename(folder)
            except OSError:
                if was_there:
                    earlier.rename(folder)
                raise
            _remove(earlier)
        except OSError as error:
            problem = error
    failed = transport.gather([int(problem is not None)], f"until {unfinished} is renamed", Scope.GROUP).wait()
    if any(of_rank for (of_rank,) in failed):
        cause = f"{type(problem).__name__}: {first_line(problem)}" if problem else "the first rank says why"
        raise CheckpointError(
            f"{grid.name}: the training is complete in {unfinished}, and cannot be renamed to {folder}: {cause}. "
            "Rename it before the next one is saved, or give a folder that can be renamed (no mount point, in your "
            "own folder)"
        ) from problem


def _check_replaceable(folder: Path) -> None:
    """Checks that a folder holds nothing but a checkpoint of DCP, because it will be removed with its content."""
    if folder.is_dir():
        names = sorted(path.name for path in folder.iterdir())
        foreign = [name for name in names if not name.endswith(".distcp") and not name.startswith(METADATA)]
        if foreign:
            raise ConfigError(
                f"{folder} holds {foreign[0]}{and_more(len(foreign) - 1)}, and save_training replaces its whole "
                "folder; give an empty one"
            )
    elif folder.exists():
        raise ConfigError(f"{folder} is a file, and save_training writes a folder; give another name")


def _read_metadata(folder: Path) -> Metadata:
    """Returns DCP's description of a checkpoint."""
    if not (folder / METADATA).is_file():
        unfinished, earlier = Path(f"{folder}{UNFINISHED}"), Path(f"{folder}{EARLIER}")
        advice = "name the folder of one, or begin anew"
        if (unfinished / METADATA).is_file():
            advice = f"{unfinished} is complete, and was to take its name: rename it"
        elif (earlier / METADATA).is_file():
            advice = f"{earlier} is complete, and was to be replaced: rename it"
        elif unfinished.is_dir():
            advice = f"{unfinished} was not written to its end (a full disk, a killed process): {advice}"
        raise ConfigError(f"{folder} holds no training to resume, as it has no {METADATA}; {advice}")
    try:
        return FileSystemReader(folder).read_metadata()
    except Exception as error:
        raise ConfigError(
            f"{folder / METADATA} cannot be read ({first_line(error)}); resume from another checkpoint"
        ) from error


def _check_entries(entries: Entries, metadata: Metadata, folder: Path, transport: Transport) -> None:
    """Checks that a checkpoint holds everything that this rank needs, and nothing that no rank needs."""
    saved, grid = metadata.state_dict_metadata, transport.grid
    wrong = []
    for name, entry in entries.items():
        there = here = "no tensor"
        found = saved.get(name)
        if isinstance(found, TensorStorageMetadata):
            there = f"{tuple(found.size)} in {found.properties.dtype}"
        if isinstance(entry, torch.Tensor):
            here = f"{tuple(entry.shape)} in {entry.dtype}"
        if found is None:
            wrong.append(f"{name} is missing")
        elif there != here:
            wrong.append(f"{name} is {there}, and here {here}")
    # Settings that the saved optimizer had for weights of this rank.
    weights = {name.removeprefix(WEIGHTS) for name in entries if name.startswith(WEIGHTS)}
    for name in saved:
        weight, _, _ = name.removeprefix(SETTINGS).rpartition(".")
        if name.startswith(SETTINGS) and weight in weights and name not in entries:
            wrong.append(f"{name} has no place here")
    if wrong:
        raise ConfigError(
            f"{grid.name}: {folder} holds another training: {wrong[0]}{and_more(len(wrong) - 1)}. Resume with its "
            "model, dtype and optimizer, and leave out what was not saved. A learning-rate schedule adds settings to "
            "the optimizer (initial_lr): if there was one, create it before load_training"
        )
    kinds = {"weights": WEIGHTS, "states and settings of an optimizer": OPTIMIZER}
    mine = [sum(name.startswith(prefix) for name in entries) * (grid.data_rank == 0) for prefix in kinds.values()]
    all_ranks = transport.gather(mine, f"counting entries of {folder}", Scope.GROUP).wait()
    for at, (kind, prefix) in enumerate(kinds.items()):
        count, count_saved = sum(counts[at] for counts in all_ranks), sum(name.startswith(prefix) for name in saved)
        if count != count_saved:
            raise ConfigError(
                f"{grid.name}: {folder} holds another training: it has {count_saved:,} {kind}, and all stages "
                f"together have {count:,}. Resume with its model and optimizer, before the first step"
            )


def _failures(error: CheckpointException, grid: Grid) -> str:
    """Describes the failure of the first rank that failed."""
    rank, (first, _) = min(error.failures.items(), key=lambda failure: failure[0])
    return f"rank {grid.label(rank)}: {type(first).__name__}: {first_line(first)}{and_more(len(error.failures) - 1)}"
