"""Imported by the fork server of ranks: makes a step, so that what is read and made once in a process is there in all
ranks. That is the sources that models are checked by, and the names of weights that Transformers translates."""

import gc
import sys
import tempfile

import torch
from transformers import AutoModelForCausalLM

import distca_hf
import support.harm
import support.parity
import support.redoing
import support.staged
import support.training  # noqa: F401
from support.data import random_dataset
from support.models import tiny_model
from support.package_metadata import read_once


KINDS = ("llama", "qwen3", "qwen3_moe", "gemma3", "gpt_oss")


def make_step(kind: str) -> None:
    """Trains a tiny model on one batch, in this process alone."""
    plugin = distca_hf.DistCAPlugin(tokens_per_rank=192)
    model = distca_hf.enable(tiny_model(kind, num_hidden_layers=2), plugin).train()
    model(**next(iter(plugin.dataloader(random_dataset())))).loss.backward()
    plugin.close()


read_once()
torch.set_num_threads(1)
with torch.random.fork_rng(), tempfile.TemporaryDirectory() as folder:
    for one in KINDS:
        make_step(one)
    tiny_model().save_pretrained(folder)
    AutoModelForCausalLM.from_pretrained(folder)
sys.excepthook = sys.__excepthook__  # plugins have put up theirs, and torch keeps what it finds
# What was imported is no garbage. A rank may begin with a collection, which would look through it for 0.4 s, and copy
# its pages.
gc.collect()
gc.freeze()
