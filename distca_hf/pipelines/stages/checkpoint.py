"""Checkpoint: writes the parts of a pipeline as one ordinary Transformers checkpoint, without gathering them.

    model-00001-of-00004.safetensors   part 0, with the names that the whole model has
    ...
    model.safetensors.index.json       which file holds which weight, read from the headers of these files
    config.json, generation_config.json

The first data rank of each stage writes its parts, at first under temporary names. When all are there, one rank
renames them, never to the name of a file that an earlier checkpoint in the folder needs: to avoid that, a name may
become model-00001-of-00004-b.safetensors. A new index makes them the checkpoint, in one step, and earlier weights are
removed last. So the folder always holds the earlier checkpoint or the new one, whatever fails.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from distca_hf.comm.grid import Scope
from distca_hf.errors import ConfigError
from distca_hf.parallel_context import ParallelContext
from distca_hf.pipelines.stages.divided_model import ModelPart
from distca_hf.whole_file import replaced


INDEX = "model.safetensors.index.json"
# Files of weights of a checkpoint, this one or an earlier one with other files.
WEIGHTS = re.compile(r"(model|pytorch_model)(-\d{5}-of-\d{5}(-b)?)?\.(safetensors|bin)(\.index\.json)?")
UNFINISHED = ".unfinished"
# Weights in a single file: Transformers reads them even if there is an index.
SINGLE = "model.safetensors"


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
        weights = _whole_weights(part.model, keep=grid.data_rank == 0)
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


def _whole_weights(model: PreTrainedModel, *, keep: bool) -> dict[str, torch.Tensor]:
    """Returns the weights of a part on the host; nothing unless `keep`. Data ranks that shard them (FSDP2) gather them
    one by one."""
    weights: dict[str, torch.Tensor] = {}
    for name, weight in model.state_dict().items():
        whole = weight.full_tensor() if isinstance(weight, DTensor) else weight
        if keep:
            weights[name] = whole.detach().cpu().contiguous()
    return weights


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
        header = _header(final)
        weight_map |= dict.fromkeys(header, final.name)
        total_bytes += sum(end - begin for begin, end in (weight["data_offsets"] for weight in header.values()))
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    with replaced(folder / INDEX) as unfinished:
        unfinished.write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
        _write_configuration(first_part.model, folder)
    (folder / SINGLE).unlink(missing_ok=True)
    for path in folder.iterdir():
        if WEIGHTS.fullmatch(path.name) and path.name not in {INDEX, *weight_map.values()}:
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


def _header(path: Path) -> dict[str, Any]:
    """Returns the entries of a safetensors file by weight: 8 bytes give their length, and JSON follows."""
    with path.open("rb") as file:
        header: dict[str, Any] = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    header.pop("__metadata__", None)
    return header
