"""The first line of a report: versions, device, model and documents."""

import argparse
import os
from typing import Any

import torch
import torch.distributed as dist
import transformers

import distca_hf
from lib.documents import spelled_out


# Variables that change a measurement.
SHOWN_VARIABLES = ("NCCL_P2P_DISABLE", "NCCL_MAX_P2P_NCHANNELS", "DISTCA_EXCHANGE_CHUNKS", "PYTORCH_ALLOC_CONF")


def machine_facts(device: torch.device) -> list[str]:
    """Returns two parts: versions of packages; number and kind of devices, with variables that change a figure."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    set_here = [f", {variable}={os.environ[variable]}" for variable in SHOWN_VARIABLES if variable in os.environ]
    return [
        f"distca_hf {distca_hf.__version__}, torch {torch.__version__}, transformers {transformers.__version__}",
        f"{dist.get_world_size()} x {name}{''.join(set_here)}",
    ]


def facts_of(options: argparse.Namespace, config: Any, tokens: int, device: torch.device) -> list[str]:
    """Returns the parts of that line, for a model and so many tokens of a rank and step."""
    reduced = f"FSDP2, gradients summed in {_name(options.reduce_dtype)}" if options.fsdp else "no FSDP"
    divided = {
        f", {options.dp_replicate_size} replicas": options.dp_replicate_size,
        f", experts over {options.ep_size} ranks": options.ep_size,
        f", layers over {options.tp_size} tensor ranks": options.tp_size,
    }
    return [
        *machine_facts(device),
        f"{config.model_type}, {config.get_text_config().num_hidden_layers} layers",
        _name(options.dtype),
        f"documents {spelled_out(options.documents)}",
        f"{tokens} tokens per rank and step",
        f"checkpointing {options.checkpointing}, {reduced}"
        + "".join(words for words, size in divided.items() if size > 1)
        + ", liger" * options.liger,
    ]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
