"""Imported by the fork server of ranks: makes a step, so that what is read and made once in a process is there in all
ranks. That is the sources that models are checked by, and the names of weights that Transformers translates."""

import gc
import sys
import tempfile
from collections.abc import Callable
from functools import partial

import torch
from packaging.version import Version
from torch import nn
from transformers import AutoModelForCausalLM

import distca_hf
import support.harm
import support.parity
import support.redoing
import support.staged
import support.training  # noqa: F401
from distca_hf.integrations.models.mixers import LOWEST_STATES
from support.data import random_dataset
from support.models import tiny_model
from support.multimodal import multimodal_model
from support.package_metadata import read_once
from support.versions import TRANSFORMERS
from support.wide_models import wide_model


KINDS = ("llama", "qwen3", "qwen3_moe", "gemma3", "gpt_oss")
# Models that are enabled and not trained: their sources are read once for all ranks.
CHECKED: list[Callable[[], nn.Module]] = [
    *(partial(tiny_model, kind, num_hidden_layers=2) for kind in ("llama4", "minimax")),
    partial(multimodal_model, "qwen2_5_vl"),
]
if TRANSFORMERS >= Version(LOWEST_STATES):
    CHECKED += [partial(multimodal_model, "qwen3_vl"), partial(wide_model, "qwen3_5", "distca")]


def make_step(kind: str) -> None:
    """Trains a tiny model on one batch, in this process alone."""
    plugin = distca_hf.DistCAPlugin(tokens_per_rank=192)
    model = distca_hf.enable(tiny_model(kind, num_hidden_layers=2), plugin).train()
    model(**next(iter(plugin.dataloader(random_dataset())))).loss.backward()
    plugin.close()


def check(make: Callable[[], nn.Module]) -> None:
    """Enables a model, which checks it."""
    plugin = distca_hf.DistCAPlugin()
    distca_hf.enable(make(), plugin)
    plugin.close()


read_once()
torch.set_num_threads(1)
with torch.random.fork_rng(), tempfile.TemporaryDirectory() as folder:
    for one in KINDS:
        make_step(one)
    for make in CHECKED:
        check(make)
    tiny_model().save_pretrained(folder)
    AutoModelForCausalLM.from_pretrained(folder)
sys.excepthook = sys.__excepthook__  # plugins have put up theirs, and torch keeps what it finds
# What was imported is no garbage. A rank may begin with a collection, which would look through it for 0.4 s, and copy
# its pages.
gc.collect()
gc.freeze()
