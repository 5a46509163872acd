"""Command: `distca check`, from a name to the verdict, the memory of a training, and text at 80 columns or JSON."""

import contextlib
import logging
import sys
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, cast

import torch
import transformers
from datasets.utils.logging import disable_progress_bar
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedModel

from distca_hf.analysis import tables
from distca_hf.analysis.check.find import Candidate, find_candidate
from distca_hf.analysis.check.trial import LARGEST_DIFFERENCE, Numerics
from distca_hf.analysis.check.verdict import KernelChoice, Verdict, decoder_size, judge
from distca_hf.analysis.decoder_size import DecoderSize, state_size_of
from distca_hf.analysis.fit import MOST_TOKENS, Job, RankLoad, advice, job_load, largest_tokens
from distca_hf.analysis.memory import USABLE_SHARE, Memory
from distca_hf.analysis.models import without_hub
from distca_hf.analysis.options import CheckOptions
from distca_hf.analysis.tables import counted
from distca_hf.analysis.training_setup import Checkpointing, Sharding, TrainingSetup
from distca_hf.errors import ConfigError
from distca_hf.flops import Gpu, find_gpu
from distca_hf.integrations.models.decoder_layers import grouped, ranges
from distca_hf.integrations.models.head_tiles import tiled_attention
from distca_hf.telemetry import get_logger


WORKS, REFUSED = 0, 1


@dataclass(frozen=True)
class CheckAnswer:
    """The answer of `distca check`. `size`: numbers of weights; None if they could not be counted. `load`: what a rank
    holds; None if that, or the memory of the GPU, is not known."""

    candidate: Candidate
    job: Job
    verdict: Verdict
    size: DecoderSize | None
    load: RankLoad | None

    @cached_property
    def memory(self) -> dict[Sharding, Memory]:
        return {} if self.load is None else self.load.by_sharding(self.job.setup, self.verdict.whole_documents)

    def largest_tokens(self, liger: bool) -> dict[Sharding, int]:
        """Returns the most tokens per rank that fit, for each way to shard weights."""
        if self.load is None:
            return {}
        setups = {way: replace(self.job.setup, sharding=way, liger=liger) for way in self.memory}
        return {way: largest_tokens(self.load, setup, self.job.room) for way, setup in setups.items()}

    @cached_property
    def advice(self) -> str:
        """What does not fit under FSDP2, and what makes it fit; empty if any way fits."""
        if self.load is None or any(self.fits.values()):
            return ""
        return advice(self.load, self.job.setup, self.job.room)

    @property
    def fits(self) -> dict[Sharding, bool]:
        return {way: self.job.room.fits(memory, self.job.setup.num_ranks) for way, memory in self.memory.items()}

    def as_json(self) -> dict[str, Any]:
        job, verdict, setup = self.job, self.verdict, self.job.setup
        return {
            "model": self.candidate.name,
            "class": self.candidate.class_name,
            "model_type": self.candidate.config.model_type,
            "status": verdict.status,
            **{name: getattr(verdict, name) for name in ("reasons", "limits", "notes")},
            "cuts_documents": verdict.cuts_documents,
            "longest_document_tokens": verdict.longest_document_tokens,
            "layers": [
                {"layers": [*numbers], **asdict(kind), "cuts_documents": kind.cuts_documents, "words": kind.in_words()}
                for numbers, kind in grouped(verdict.kinds)
            ],
            "kernels": [choice.as_json() for choice in verdict.kernels],
            "gpu": asdict(job.gpu),
            "gpus": setup.num_ranks,
            "tokens_per_rank": job.tokens_per_rank,
            **{name: getattr(setup, name) for name in ("micro_steps", "checkpointing", "liger")},
            **{name: getattr(setup, name) for name in ("mlp_tokens", "attention_kv_heads")},
            "offload_params": setup.state_on_host,
            "ranks_per_node": job.ranks_per_node,
            "host_gib": job.host_gib,
            "parameters": None if self.size is None else self.size.parameters,
            "room_bytes": None if job.gpu.gib is None else round(job.room.gpu_bytes),
            "memory_bytes": {sharding: memory.as_json() for sharding, memory in self.memory.items()},
            "node_bytes": {way: job.room.node_bytes(memory, setup.num_ranks) for way, memory in self.memory.items()},
            "fits": self.fits,
            "advice": self.advice or None,
            "largest_tokens_per_rank": self.largest_tokens(setup.liger),
            "largest_tokens_per_rank_with_liger": self.largest_tokens(liger=True),
            "numerics": None if verdict.numerics is None else verdict.numerics.as_json(),
        }


def run_check(options: CheckOptions) -> int:
    """Runs `distca check`, and returns its exit status. Prints output at the very end: nothing is printed before an
    error."""
    setup = TrainingSetup(
        options.gpus,
        checkpointing=cast(Checkpointing, options.checkpointing),  # the job refuses any other
        liger=options.liger,
        micro_steps=options.micro_steps,
        mlp_tokens=options.mlp_tokens,
        attention_kv_heads=options.attention_kv_heads,
        state_on_host=options.offload_params,
    )
    job = Job(find_gpu(options.gpu), options.tokens_per_rank, setup, options.host_gib, options.ranks_per_node)
    with _quiet():
        candidate = find_candidate(options.model, options.trust_remote_code)
        with contextlib.nullcontext() if options.trust_remote_code else without_hub():
            answer = check(candidate, job)
    if options.as_json:
        tables.print_json(answer.as_json())
    else:
        tables.print_blocks(tables.Terminal(), answer_blocks(answer, options.numerics))
    return REFUSED if answer.verdict.status == "refused" else WORKS


def check(candidate: Candidate, job: Job) -> CheckAnswer:
    """Judges a model for a training, and estimates its memory."""
    verdict, outline = judge_quietly(candidate, job.gpu, job.capacity_tokens)
    size, states = decoder_size(outline, list(verdict.kinds)), state_size_of(outline)
    if states is None and any(kind.mixer for kind in verdict.kinds) and not verdict.whole_documents:
        verdict.notes.append("the size of states that travel between ranks is not known, and left out of the memory")
    if job.setup.mlp_tokens and size is not None and not size.tiles_mlps:
        verdict.reasons.append(
            f"no layer has an MLP that runs on {job.setup.mlp_tokens:,} tokens at a time: leave --mlp-tokens out"
        )
    if job.setup.attention_kv_heads:
        try:
            tiled_attention(outline, job.setup.attention_kv_heads)
        except ConfigError as error:
            verdict.reasons.append(str(error))
    load = None
    if size is not None and job.gpu.gib is not None:  # CPUs have no known memory
        load = job_load(job, size, verdict.whole_documents, states)
    return CheckAnswer(candidate, job, verdict, size, load)


def judge_quietly(
    candidate: Candidate, gpu: Gpu, capacity_tokens: int, tries: bool = True
) -> tuple[Verdict, PreTrainedModel]:
    """Judges a model as `judge` does, without the messages of libraries."""
    with _quiet():
        return judge(candidate, gpu, capacity_tokens, tries)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silences the messages of libraries about a model without weights, and about a step that does not train. Sends
    prints of a model's code to stderr."""
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


HEADS = "Heads: query heads / KV heads, of so many numbers each."
# Names of the parts of memory.
PARTS = {
    "parameters": "weights: a rank's share",
    "optimizer": "AdamW: a rank's share",
    "gradients": "gradients that are summed",
    "gathered": "gathered weights, their gradients",
    "kept": "activations kept until backward",
    "layer": "one layer in backward",
    "head": "logits and loss",
    "received": "keys and values of other ranks",
}
# Spaces above, right, below and left of an indented line.
INDENTED = (0, 0, 0, 2)


def answer_blocks(answer: CheckAnswer, with_numerics: bool = False) -> Iterator[RenderableType]:
    """Yields the verdict with reasons and limits, layers, kernels, memory, and on request numerics."""
    verdict = answer.verdict
    yield _verdict(answer)
    if verdict.kinds:
        table = _listed((ranges(numbers), kind.in_words()) for numbers, kind in grouped(verdict.kinds))
        yield tables.block("layers", table, *([HEADS] if any(kind.heads for kind in verdict.kinds) else []))
    if verdict.kernels:
        yield _kernels(answer)
    if answer.memory and verdict.status != "refused":
        yield _memory(answer)
    if with_numerics:
        yield "No numbers were compared." if verdict.numerics is None else _numerics(verdict.numerics)


def _verdict(answer: CheckAnswer) -> RenderableType:
    verdict, candidate = answer.verdict, answer.candidate
    parameters = "" if answer.size is None else f", {answer.size.parameters / 1e9:.3g}B parameters"
    lines: list[RenderableType] = [
        f"{candidate.class_name} ({candidate.name}{parameters})",
        Text(f"{verdict.status} on {answer.job.gpu.name}", style="bold"),
    ]
    sentences = {"refused": verdict.reasons, "limit": verdict.limits, "note": verdict.notes}
    rows = [(f"{kind}:", sentence) for kind, of_kind in sentences.items() for sentence in of_kind]
    if verdict.status != "refused":
        how = "stay whole on a rank" if verdict.whole_documents else "may be cut between ranks (placed)"
        rows.append(("documents:", how))
    return Group(*lines, _listed(rows))


def _listed(rows: Iterable[tuple[str, str]]) -> Table:
    """Returns a table of names and of texts that may wrap."""
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def _kernels(answer: CheckAnswer) -> RenderableType:
    """Returns the kernels that can compute layers, and why others cannot. Groups layers with the same kernels."""
    together: dict[tuple[tuple[str, ...], str], list[KernelChoice]] = {}
    for choice in answer.verdict.kernels:
        together.setdefault((choice.able, choice.why_not), []).append(choice)
    lines: list[RenderableType] = [Text(f"kernels on {answer.job.gpu.name}, the fastest first", style="bold")]
    for (able, why_not), choices in together.items():
        for choice in choices:
            heads, need = choice.need.heads, choice.need
            width = f"{heads.dim}" + (f" (values {heads.value_dim})" if heads.dim != heads.value_dim else "")
            window = f"window {need.window_tokens:,}" if need.window_tokens else "full"
            softcap = f", softcap {need.softcap:g}" if need.softcap else ""
            lines.append(f"{counted(len(choice.layers), 'layer')}: {window}, heads of {width}{softcap}")
        lines.append(Padding(", ".join(able) or "none", INDENTED))
        if why_not:
            lines.append(Padding(f"not {why_not}", INDENTED))
    lines.append("The first one that is installed and runs is taken: `distca env` shows a machine's.")
    return Group(*lines)


def _memory(answer: CheckAnswer) -> RenderableType:
    """Returns the table of GiB per GPU by part, GiB on the host, the tokens per rank that fit, and what would make the
    job fit."""
    job, setup, of_ways = answer.job, answer.job.setup, answer.memory.values()
    parts = {part: label for part, label in PARTS.items() if any(getattr(memory, part) for memory in of_ways)}
    table = tables.memory_table(answer.memory, parts, job.room, setup.num_ranks)
    table.add_row("largest tokens per rank", *map(_tokens, answer.largest_tokens(setup.liger).values()))
    if not setup.liger:
        table.add_row("the same with --liger", *map(_tokens, answer.largest_tokens(liger=True).values()))
    document = "" if answer.verdict.whole_documents else ", one document of all of them"
    tiles = tables.in_tiles(setup.mlp_tokens, setup.attention_kv_heads)
    note = (
        f"Estimated for {counted(setup.num_ranks, 'GPU')} x {job.tokens_per_rank:,} tokens{document}; "
        f"all weights trained in fp32 with AdamW, computed in bf16; {tables.CHECKPOINTING[setup.checkpointing]} "
        f"(--checkpointing); {tiles}{'with' if setup.liger else 'without'} Liger's kernels and loss; "
        f"{USABLE_SHARE:.0%} of {job.gpu.gib:g} GiB may be used."
    ).replace("%", " %")
    note += tables.of_host(answer.memory, setup.state_on_host)
    parameters = 0 if answer.size is None else answer.size.parameters
    note += tables.accumulation(parameters, setup.num_ranks, setup.micro_steps)
    unfit = [f"Does not fit: {answer.advice}."] if answer.advice else []
    return tables.block("GiB per GPU, estimated", table, note, *unfit)


def _tokens(tokens: int) -> str:
    more = " or more" if tokens == MOST_TOKENS else ""
    return f"{tokens:,}{more}" if tokens else "none fits"


def _numerics(numerics: Numerics) -> RenderableType:
    table = tables.plain_table("")
    logits = "-" if numerics.logits is None else f"{numerics.logits:.1e}"
    table.add_row("logits", logits)
    table.add_row("loss", f"{numerics.loss:.1e}")
    table.add_row("gradients", f"{numerics.gradients:.1e}")
    agree = "agree" if numerics.agree else "DIFFER"
    mode = "" if numerics.in_training_mode else " In evaluation mode, because it draws random numbers in training."
    note = (
        f"{agree}: a tiny version of this model, {numerics.documents} documents of {numerics.tokens} tokens on "
        f"{numerics.num_ranks} ranks, compared with sdpa on each single document, in fp32. Up to "
        f"{LARGEST_DIFFERENCE:.0e} is rounding.{mode}"
    )
    return tables.block("relative differences", table, note)
