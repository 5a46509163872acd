"""Attention and states of other projects by their own code: axolotl-ringmaster and MagiAttention.

    ulysses   q k v ── tokens to heads ── kernel of all modes ── heads to tokens ── out
    ring      k v ── all-gather ── kernel of all modes ── out
    magi      its planner deals chunks of tokens out; its transfers, in stages ── its own kernel ── out

    states    functions that mixers call ── flash-linear-attention's with a context over all ranks for delta rules;
              loops over documents and gathered states for Mamba2

They send by their own calls: their bytes are not counted.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from distca_hf.arrays import IntArray
from distca_hf.config import KernelName
from distca_hf.integrations.models.mixer_calls import Apart
from distca_hf.integrations.models.mixers import mixers_of
from distca_hf.integrations.models.structure import transformers_model
from lib.baselines.ring_code import interface_of, offsets_of
from lib.documents import batch_of
from lib.model import Shape
from lib.wires import Wires


def _ringmaster_runtime(lengths: Sequence[int], device: torch.device, **groups: dist.ProcessGroup | None) -> Any:
    """Returns the state in which axolotl-ringmaster attends, its `CPRuntime`, whose fields name the groups. Documents
    of these lengths follow each other over the ranks, which have equally many tokens."""
    from ringmaster.config import RingmasterConfig
    from ringmaster.runtime import CPRuntime

    offsets = offsets_of(lengths, device).long()  # which the package keeps as they are
    return CPRuntime(RingmasterConfig(size=dist.get_world_size()), varlen=(offsets, max(lengths)), **groups)


@contextmanager
def ringmaster_states(model: torch.nn.Module, lengths: Sequence[int], device: torch.device) -> Iterator[None]:
    """Lets axolotl-ringmaster (tried: 0.2.7) pass states of an enabled model between all ranks, and convolutions see
    the tokens before them. Documents of these lengths follow each other over the ranks, which have equally many
    tokens. Exits if the package knows none of the model's mixers."""
    from ringmaster.mamba import mamba2_mixers, wire_mamba2
    from ringmaster.recurrent import gated_delta_mixers, kda_mixers, wire_gated_delta, wire_kda
    from ringmaster.runtime import set_runtime

    inner = transformers_model(model)
    apart = {mixer: vars(mixer).pop("forward") for mixer in mixers_of(inner).values()}
    group = dist.group.WORLD
    restore: Callable[[], None] | None = None
    for find, wire in ((gated_delta_mixers, wire_gated_delta), (kda_mixers, wire_kda), (mamba2_mixers, wire_mamba2)):
        if restore is None and (found := find(inner)):
            restore = wire(found, group)
    if restore is None:
        raise SystemExit(f"ringmaster knows no mixer of {type(inner).__name__}: leave this mode out")
    set_runtime(_ringmaster_runtime(lengths, device, cp_group=group))
    for mixer, own in apart.items():
        assert isinstance(own, Apart)
        own.before, mixer.forward = vars(mixer).get("forward"), own
    try:
        yield
    finally:
        for mixer, own in apart.items():
            vars(mixer).pop("forward")
            if own.before is not None:
                mixer.forward, own.before = own.before, None
        restore()
        for mixer, own in apart.items():
            mixer.forward = own
        set_runtime(None)


class RingmasterWork:
    """Dense attention of axolotl-ringmaster (tried: 0.2.7), "ulysses" or "ring", as its defaults have it; ranks have
    consecutive tokens of the documents.

    Its call of FlashAttention 2 gets the kernel of all modes. On CPUs its ring calls torch's attention instead.
    """

    def __init__(
        self,
        way: str,
        layer: torch.nn.Module,
        wires: Wires,
        kernel: KernelName,
        lengths: Sequence[int],
        device: torch.device,
    ) -> None:
        from ringmaster.config import RotateMethod
        from ringmaster.strategies import ring, ulysses

        flash = "flash_attention_2"
        ulysses._flash_varlen_fn = lambda _: interface_of(kernel).flash_attn_varlen_func
        if way == "ulysses":
            self._attend = ulysses.make_ulysses_attention(flash)
        else:
            self._attend = ring.make_ring_attention("hf_kernels", flash, RotateMethod.ALLGATHER)
        self._layer = layer
        self._runtime = _ringmaster_runtime(lengths, device, cp_group=wires.group, **{f"{way}_group": wires.group})

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        from ringmaster.runtime import set_runtime

        set_runtime(self._runtime)
        heads_first = (x.transpose(0, 1)[None] for x in (q, k, v))
        out: torch.Tensor = self._attend(self._layer, *heads_first, None, scaling=scale)[0][0]
        return out


class MagiWork:
    """MagiAttention (written for commit 2c64135), whose planner also decides which tokens a rank has.

    A setting is tokens of a chunk, 0 for as many as the package chooses, and stages of transfers, as "512:1".
    `planning_seconds` are of the host, for each time that the batch was planned.
    """

    def __init__(self, setting: str, shape: Shape, wires: Wires, lengths: Sequence[int], device: torch.device) -> None:
        from magi_attention import api, env

        wanted, stages = map(int, setting.split(":"))
        least_chunks = env.general.min_chunks_per_rank()
        self.chunk_tokens = chunk_tokens(sum(lengths), wires.world_size, wanted, least_chunks)
        config = api.DistAttnConfig(api.DispatchConfig(chunk_size=self.chunk_tokens), api.OverlapConfig(degree=stages))
        offsets = offsets_of(lengths, torch.device("cpu"))
        kind = shape.only_kind
        sizes = (kind.heads, kind.kv_heads, kind.head_dim)
        self._plan = partial(
            api.magi_attn_varlen_key, *(offsets, offsets, *sizes, 0, wires.group), causal=True, dist_attn_config=config
        )
        self._api, self._group, self._device = api, wires.group, device
        self._key = self._plan()
        self.planning_seconds: list[float] = []

    def batch(self, tokens: Sequence[IntArray]) -> dict[str, torch.Tensor]:
        """Returns `input_ids` and `position_ids`, int64 `[1, rows]`, of the tokens that this rank was dealt."""
        whole = batch_of([(document, 0, len(ids)) for document, ids in enumerate(tokens)], tokens, self._device)
        return {name: self._api.dispatch(values[0], self._key)[None] for name, values in whole.items()}

    @contextmanager
    def planned(self) -> Iterator[None]:
        """Plans as for a new batch, and notes the time: the package keeps plans of batches that it knows."""
        self._api.clear_cache(self._group)
        began = time.perf_counter()
        self._key = self._plan()
        self.planning_seconds.append(time.perf_counter() - began)
        yield

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        out: torch.Tensor = self._api.calc_attn(q, k, v, self._key, softmax_scale=scale)[0]
        return out


def chunk_tokens(tokens: int, ranks: int, wanted: int, least_chunks: int) -> int:
    """Returns the tokens of MagiAttention's chunks with which ranks have equally many, and nothing is padded: at most
    `wanted`, or if that is 0 as many as the package lets a chunk have, which has `least_chunks` for a rank."""
    most = -(-tokens // (least_chunks * ranks))
    return next(chunk for chunk in range(min(wanted or most, most), 0, -1) if tokens // ranks % chunk == 0)
