"""Command: `distca check`, from a name to text or JSON and an exit status."""

import contextlib
import json
import logging
import sys
import warnings
from collections.abc import Iterator
from typing import get_args

import torch
import transformers
from datasets.utils.logging import disable_progress_bar
from transformers import PreTrainedModel

from distca_hf.analysis.check.answer import CheckAnswer, Job, memory_of
from distca_hf.analysis.check.find import Candidate, find_candidate
from distca_hf.analysis.check.print_answer import print_answer
from distca_hf.analysis.check.sizes import decoder_size
from distca_hf.analysis.check.verdict import Verdict, judge
from distca_hf.analysis.memory import Checkpointing
from distca_hf.analysis.model_files import without_hub
from distca_hf.analysis.terminal import Terminal
from distca_hf.errors import ConfigError
from distca_hf.gpus import Gpu, find_gpu
from distca_hf.telemetry import get_logger


WORKS, REFUSED = 0, 1


def run_check(
    model: str,
    *,
    tokens_per_rank: int,
    gpus: int,
    gpu: str,
    checkpointing: str,
    liger: bool,
    micro_steps: int,
    numerics: bool,
    trust_remote_code: bool,
    as_json: bool,
) -> int:
    """Runs `distca check`; returns its exit status. Output is printed at the very end, so that an error leaves nothing
    behind.

    Raises:
        ConfigError: an option or the model is wrong.
    """
    if checkpointing not in get_args(Checkpointing):
        raise ConfigError(f"--checkpointing {checkpointing} must be one of {', '.join(get_args(Checkpointing))}")
    job = Job(find_gpu(gpu), gpus, tokens_per_rank, checkpointing, liger, micro_steps)
    with _quiet():
        candidate = find_candidate(model, trust_remote_code)
        with contextlib.nullcontext() if trust_remote_code else without_hub():
            answer = check(candidate, job)
    if as_json:
        sys.stdout.write(json.dumps(answer.as_json(), allow_nan=False) + "\n")
    else:
        print_answer(answer, Terminal(), numerics)
    return WORKS if answer.works else REFUSED


def check(candidate: Candidate, job: Job) -> CheckAnswer:
    """Judges a model for a training, and estimates its memory.

    Args:
        candidate: the model.
        job: the training.

    Raises:
        ConfigError: the model cannot be built.
    """
    verdict, outline = judge_quietly(candidate, job.gpu, job.capacity_tokens)
    size = decoder_size(outline, list(verdict.kinds))
    fits, with_liger = ({}, {}) if size is None else memory_of(job, size, verdict.whole_documents)
    return CheckAnswer(candidate, job, verdict, size, fits, with_liger)


def judge_quietly(
    candidate: Candidate, gpu: Gpu, capacity_tokens: int, tries: bool = True
) -> tuple[Verdict, PreTrainedModel]:
    """Judges a model as `judge` does, without the words of libraries."""
    with _quiet():
        return judge(candidate, gpu, capacity_tokens, tries)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Leaves out the words of libraries about a model without weights, and of a step that is no training. A model's
    code may print: that goes to stderr."""
    log, level = get_logger("distca_hf"), logging.getLogger("distca_hf").level
    verbosity, threads = transformers.logging.get_verbosity(), torch.get_num_threads()
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    disable_progress_bar()
    log.setLevel(logging.CRITICAL)
    torch.set_num_threads(1)  # of tiny models
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(sys.stderr):
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers.logging.set_verbosity(verbosity)
        log.setLevel(level)
        torch.set_num_threads(threads)
