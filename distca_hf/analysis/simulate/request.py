"""Request: GPUs, tokens and model of a simulation, and the optimizer steps that are simulated."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

import numpy as np

from distca_hf.analysis.fit import RankLoad, Room
from distca_hf.analysis.groups import UNSHARED, Groups
from distca_hf.analysis.memory import USABLE_SHARE
from distca_hf.analysis.models import SimulatedModel
from distca_hf.analysis.request import MAX_MICRO_STEPS, MAX_RANKS, Assumptions, check_ranges
from distca_hf.analysis.training_setup import GIB, Checkpointing, Sharding, TrainingSetup
from distca_hf.arrays import IntArray, ceil_div
from distca_hf.batches.placed import GivenPlans, PlacedPlanner, StepShape
from distca_hf.config import DistCAConfig
from distca_hf.data.documents import fit_documents
from distca_hf.data.epochs import EpochPacker
from distca_hf.errors import ConfigError, PackingError
from distca_hf.layout import MAX_DOCUMENT_TOKENS, Layout, Topology
from distca_hf.pipelines.pipeline import Pipeline
from distca_hf.prefixes import never_shared
from distca_hf.servers.served_plans import Servers


# Most optimizer steps of a simulation.
MAX_BATCHES = 10_000
# Most rows of a rank in a micro-step.
MAX_BATCH_SIZE = 65_536
# GPUs per attention server, in the way with attention servers.
GPUS_PER_SERVER = 8


@dataclass(frozen=True)
class SimulationRequest(Assumptions):
    """One training to simulate.

    Attributes:
        tokens_per_rank: most tokens that a GPU holds in a micro-step; with tensor parallelism a data rank.
        context_tokens: longer documents are split.
        accumulation: micro-steps of an optimizer step.
        tensor_ranks: GPUs that divide every layer between them.
        batches: optimizer steps to simulate.
        pipeline: stages in which the same GPUs are also simulated, and for which documents are packed.
        batch_size: rows of a data rank in a micro-step, for batches of the user's sampler, whose rows are cut off
            at the context; None if batches are packed.
        sync_each_batch: whether gradients are summed over ranks in each micro-step. By default, as in Trainer,
            only in the last one, and each GPU keeps whole gradients until then.
        staged_micro_batches: micro-batches of an optimizer step in the stages; by default one for every stage in
            each of `accumulation` micro-steps.
    """

    model: SimulatedModel
    gpus: int
    tokens_per_rank: int
    context_tokens: int | None
    accumulation: int = 1
    ranks_per_node: int = 8
    tensor_ranks: int = 1
    batches: int = 20
    pipeline: Pipeline | None = None
    sync_each_batch: bool = False
    batch_size: int | None = None
    staged_micro_batches: int | None = None

    def __post_init__(self) -> None:
        check_ranges(
            ("--gpus", self.gpus, MAX_RANKS),
            ("--tokens-per-rank", self.tokens_per_rank, MAX_DOCUMENT_TOKENS),
            ("--context", 1 if self.context_tokens is None else self.context_tokens, MAX_DOCUMENT_TOKENS),
            ("--micro-steps", self.accumulation, MAX_MICRO_STEPS),
            ("--pipeline", self.num_stages, MAX_RANKS),
            ("--ranks-per-node", self.ranks_per_node, MAX_RANKS),
            ("--tensor", self.tensor_ranks, MAX_RANKS),
            ("--batches", self.batches, MAX_BATCHES),
            ("--batch-size", 1 if self.batch_size is None else self.batch_size, MAX_BATCH_SIZE),
        )
        super().__post_init__()
        if self.gpus % self.tensor_ranks or self.ranks_per_node % self.tensor_ranks:
            raise ConfigError(
                f"--tensor {self.tensor_ranks} must divide --gpus {self.gpus} and --ranks-per-node "
                f"{self.ranks_per_node}"
            )
        if self.model.heads.key_value % self.tensor_ranks:
            raise ConfigError(
                f"--tensor {self.tensor_ranks} must divide the {self.model.heads.key_value} KV heads of "
                f"{self.model.name}"
            )
        if self.pipeline is not None:
            if self.batch_size is not None:
                raise ConfigError("--pipeline needs placed batches: leave --batch-size out")
            self._check_pipeline(self.pipeline)
        context, room = self.context_tokens, self.capacity_tokens
        is_packed = self.batch_size is None
        if is_packed and context is not None and context > room:
            ranks = f"{self.stage_ranks} data ranks{' of a stage' if self.pipeline else ''}"
            raise ConfigError(
                f"--context {context} does not fit: {ranks} x {self.tokens_per_rank} tokens hold {room}; take more "
                "GPUs, more tokens per rank, or a shorter context"
            )
        if is_packed and self.model.whole_documents and context is not None and context > self.tokens_per_rank:
            raise ConfigError(
                f"--context {context}: documents of {self.model.name} stay whole on a rank, because layers carry a "
                f"state that cannot travel, and a rank holds {self.tokens_per_rank} tokens; take more tokens per rank "
                "or a shorter context"
            )
        limit = self.model.longest_document_tokens
        if context is not None and limit is not None and context > limit:
            raise ConfigError(f"--context {context}: {self.model.name} takes documents of up to {limit} tokens")

    def _check_pipeline(self, pipeline: Pipeline) -> None:
        if self.model.no_stages:
            raise ConfigError(f"--pipeline {pipeline.num_stages}: {self.model.no_stages}")
        if self.num_ranks % pipeline.num_stages:
            raise ConfigError(
                f"--pipeline {pipeline.num_stages} must divide {self.num_ranks} data ranks: {self.gpus} GPUs, "
                f"{self.tensor_ranks} of which divide every layer"
            )
        pipeline.check(self.micro_batches, self.model.size.layers)
        ranks, per_node = self.stage_ranks, self.data_ranks_per_node
        if self.num_ranks > per_node and ranks % per_node and per_node % ranks:
            raise ConfigError(
                f"--pipeline {pipeline.num_stages}: stages of {ranks} data ranks begin and end within nodes of "
                f"{per_node}, which is not simulated; take other --gpus, stages or --ranks-per-node"
            )

    @property
    def num_stages(self) -> int:
        return 1 if self.pipeline is None else self.pipeline.num_stages

    @property
    def stage_ranks(self) -> int:
        return self.num_ranks // self.num_stages

    @property
    def micro_batches(self) -> int:
        """Micro-batches into which documents of an optimizer step are packed, each for the ranks of a stage."""
        return self.staged_micro_batches or self.accumulation * self.num_stages

    @property
    def num_ranks(self) -> int:
        """Data ranks; with a pipeline, the ranks of all stages, which would be data ranks without it."""
        return self.gpus // self.tensor_ranks

    @property
    def data_ranks_per_node(self) -> int:
        return min(self.num_ranks, self.ranks_per_node // self.tensor_ranks)

    @property
    def capacity_tokens(self) -> int:
        """Tokens that the data ranks of a stage hold in a micro-batch; all data ranks without a pipeline."""
        return self.stage_ranks * self.tokens_per_rank

    @property
    def longest_tokens(self) -> int:
        """Tokens of the longest document that is not split."""
        most = self.tokens_per_rank if self.model.whole_documents else self.capacity_tokens
        if self.batch_size is not None:
            most = MAX_DOCUMENT_TOKENS
        return min(most, self.context_tokens or most, self.model.longest_document_tokens or most)

    @property
    def least_group(self) -> int:
        return int(ceil_div(self.longest_tokens, self.tokens_per_rank))

    def for_documents(self, document_tokens: IntArray) -> "SimulationRequest":
        """Returns the request whose groups hold the longest document, or the context if that is shorter."""
        longest = int(document_tokens.max())
        context = min(self.context_tokens or longest, longest)
        return replace(self, context_tokens=context) if context <= self.longest_tokens else self

    @property
    def head_groups(self) -> int:
        """Groups that plans divide the heads of a tensor rank into."""
        return self.model.heads.groups_of_rank(self.tensor_ranks)

    @cached_property
    def planner(self) -> PlacedPlanner:
        """The planner of training; other settings come from the environment, as in training."""
        return self._planner(self.num_ranks, self.tokens_per_rank)

    def given_plans(self, places_rows: bool) -> GivenPlans:
        """Returns the planner of given batches. `places_rows`: whether rows are placed inside the model; otherwise
        tasks move."""
        topology, token_bytes = Topology(self.num_ranks, self.data_ranks_per_node), self.model.heads.token_bytes()
        costs = self.model.pass_costs.both
        return GivenPlans(topology, self.head_groups, token_bytes, self.model.masks, places_rows, costs)

    def given_layout(
        self, plans: GivenPlans, home: Layout, groups: Groups | None, loss_is_placed: bool = False
    ) -> Layout:
        """Returns the layout that layers compute, as in training. `home`: whole documents, in the order of the
        batches. `groups`: which of them begin alike. `loss_is_placed`: whether head and loss run on placed rows."""
        if groups is None:
            return plans.layout(home)
        hashes = groups.hashes(home.document_tokens, self.num_ranks, self.least_tokens, loss_is_placed)
        return plans.layout(home, hashes, self.least_tokens)

    @property
    def unshared(self) -> str:
        """Why documents that begin alike do not share their prefix; empty if they do."""
        if self.batch_size is None:
            return UNSHARED
        return never_shared(self.planner.config.shared_prefix_tokens, self.model.whole_documents)

    @property
    def least_tokens(self) -> int:
        return 0 if self.unshared else self.planner.config.shared_prefix_tokens

    @cached_property
    def stage_planner(self) -> PlacedPlanner:
        """The planner of a training in the stages of the pipeline, which shapes optimizer steps for it."""
        return self._planner(self.stage_ranks, self.tokens_per_rank, step_shape=self.pipeline)

    @property
    def num_servers(self) -> int:
        return self.num_ranks // GPUS_PER_SERVER

    def planner_with_servers(self, servers: int) -> PlacedPlanner:
        """Returns the planner of a training in which the last `servers` data ranks serve attention. The others hold
        their tokens, too."""
        trainers = self.num_ranks - servers
        per_node = self.data_ranks_per_node
        nodes = tuple((trainers + number) // per_node for number in range(servers))
        tokens = -(-self.num_ranks * self.tokens_per_rank // trainers)
        return self._planner(trainers, tokens, servers=Servers((1.0,) * servers, nodes=nodes))

    def _planner(
        self, num_ranks: int, tokens_per_rank: int, servers: Servers | None = None, step_shape: StepShape | None = None
    ) -> PlacedPlanner:
        config = DistCAConfig(tokens_per_rank=tokens_per_rank, ranks_per_node=self.data_ranks_per_node)
        return PlacedPlanner(
            config,
            num_ranks,
            self.head_groups,
            extra_ranks=servers,
            token_bytes=self.model.heads.token_bytes(),
            layer_masks=self.model.masks,
            whole_documents=self.model.whole_documents,
            step_shape=step_shape,
            costs=self.model.pass_costs,
        )

    def steps(self, document_tokens: IntArray) -> list[list[IntArray]]:
        """Returns the lengths of each micro-batch of each optimizer step, from as many epochs as are needed."""
        if self.batch_size is not None:
            return [[tokens for tokens, _ in step] for step in self.dealt_steps(document_tokens)]
        self._check_longest(document_tokens)
        lengths = fit_documents(document_tokens, self.longest_tokens, "split")[2]
        whole_steps = 1 if self.pipeline is None else self.micro_batches  # as in a training in stages
        packer = EpochPacker(
            lengths, self.capacity_tokens, self.seed, fits=self.stage_planner.fits, multiple=whole_steps
        )
        if packer.num_micro_batches < self.micro_batches:
            raise PackingError(
                f"{len(lengths)} documents with {int(lengths.sum())} tokens fill {packer.num_micro_batches} of "
                f"{self.micro_batches} micro-steps of {self.capacity_tokens} tokens; take fewer GPUs, fewer tokens "
                "per rank, or less accumulation"
            )
        steps: list[list[IntArray]] = []
        epoch = 0
        while len(steps) < self.batches:
            packed = packer.epoch(epoch)
            for first in range(0, packer.num_micro_batches - self.micro_batches + 1, self.micro_batches):
                numbers = range(first, first + self.micro_batches)
                steps.append([lengths[packed.micro_batch(number)] for number in numbers])
                if len(steps) == self.batches:
                    return steps
            epoch += 1
        return steps

    def dealt_steps(
        self, row_tokens: IntArray, groups: Groups | None = None
    ) -> list[list[tuple[IntArray, Groups | None]]]:
        """Returns lengths and groups of each micro-batch, rank after rank, for batches of the user's sampler.

        As Trainer and Accelerate deal them, an epoch has all rows in random order, and ranks take a batch each in
        turns. Rows with groups are dealt as `groups` says. The last step of an epoch is left out if it is not full.
        """
        self._check_longest(row_tokens)
        of_step = self.num_ranks, self.accumulation, self.batch_size or 0
        step_rows, lengths = prod(of_step), np.minimum(row_tokens, self.longest_tokens)
        if len(row_tokens) < step_rows:
            raise PackingError(
                f"{len(row_tokens)} rows are too few for one step: {self.num_ranks} data ranks x {self.batch_size} "
                f"rows x {self.accumulation} micro-steps take {step_rows}"
            )
        steps: list[list[tuple[IntArray, Groups | None]]] = []
        while len(steps) < self.batches:
            rng = np.random.default_rng([self.seed, len(steps)])
            order = rng.permutation(len(lengths)) if groups is None else groups.dealt(rng, *of_step)
            for step in np.split(order[: len(order) // step_rows * step_rows], len(order) // step_rows):
                rows = np.split(step, self.accumulation)
                steps.append([(lengths[batch], None if groups is None else groups.of(batch)) for batch in rows])
        return steps[: self.batches]

    def _check_longest(self, document_tokens: IntArray) -> None:
        longest = int(document_tokens.max(initial=0))
        if self.context_tokens is None and longest > self.longest_tokens:
            raise PackingError(
                f"a document of {longest} tokens is longer than the {self.longest_tokens} that ranks and model take; "
                f"--context {self.longest_tokens} {'cuts' if self.batch_size else 'splits'} longer ones"
            )

    def without_stages(self, step: Sequence[IntArray]) -> list[IntArray]:
        """Returns the lengths of each micro-step of all data ranks: up to one micro-batch per stage, joined."""
        joined = np.array_split(np.arange(len(step)), self.accumulation)
        return [np.concatenate([step[number] for number in numbers]) for numbers in joined]

    @property
    def room(self) -> Room:
        return Room(USABLE_SHARE * self.gpu_gib * GIB, self.host_gib, self.ranks_per_node)

    def setup(
        self, sharding: Sharding, checkpointing: Checkpointing | None = None, keeps_keys: bool = True, servers: int = 0
    ) -> TrainingSetup:
        """Returns what memory depends on, without a pipeline. `keeps_keys`: whether keys of other ranks are kept until
        backward, within their budget. `servers`: data ranks that hold no weights."""
        return TrainingSetup(
            self.gpus - servers * self.tensor_ranks,
            sharding,
            checkpointing or self.checkpointing,
            self.liger,
            kv_budget_bytes=self.planner.config.kv_budget_gib * GIB if keeps_keys else 0.0,
            tensor_ranks=self.tensor_ranks,
            micro_steps=self.accumulation,
            mlp_tokens=self.mlp_tokens,
            attention_kv_heads=self.attention_kv_heads,
            state_on_host=self.state_on_host,
        )

    def rank_load(self, tokens: int, received_bytes: int, head_tokens: int = 0, state_bytes: int = 0) -> RankLoad:
        """Returns what the rank with most tokens holds; see `estimate_memory`. Bytes of states are of one mixer."""
        size, states = self.model.size.decoder(self.model.heads), self.model.state_size
        of_mixers = 0 if states is None else states.mixers * state_bytes
        return RankLoad(size, tokens, received_bytes, head_tokens, of_mixers)
