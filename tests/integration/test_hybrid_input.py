"""Batches that a model with mixers cannot train on: refused by name, at the token or row where something is wrong."""

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import MiniMaxConfig, MiniMaxForCausalLM, PreTrainedModel

import distca_hf
from distca_hf.batches.loader import PlacedLoader
from distca_hf.batches.placed import PlacedPlanner
from distca_hf.comm.transport import Transport
from distca_hf.config import DistCAConfig
from distca_hf.errors import ConfigError, PackingError, PlanError
from distca_hf.integrations.finding import stated_lengths
from distca_hf.integrations.models.mixer_calls import DocumentRows
from distca_hf.integrations.models.mixers import mixers_of, needs_whole_documents
from distca_hf.planning.fragments import Fragments
from distca_hf.runtime.carried_states import After, SentSummaries
from distca_hf.testing import run_ranks
from support.data import random_documents
from support.models import tiny_model
from support.versions import classes_of_today, states_travel


CPU = torch.device("cpu")
TOKENS = 12
HALO_TOKENS = 3  # before a token, in the convolutions of these models
# Documents of 5, 4 and 3 tokens.
IDS = torch.arange(3, 3 + TOKENS)[None]
POSITIONS = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 0, 1, 2]])
OFFSETS = torch.tensor([0, 5, 9, 12], dtype=torch.int32)
SEQ_IDX = torch.tensor([[0] * 5 + [1] * 4 + [2] * 3], dtype=torch.int32)


def hybrid() -> PreTrainedModel:
    model = tiny_model("qwen3_5", num_hidden_layers=2).train()
    distca_hf.enable(model, distca_hf.DistCAPlugin(), longest_document_tokens=200)
    return model


def minimax(sweep: ModuleType) -> PreTrainedModel:
    """A model whose states cannot travel."""
    (config_class,) = sweep.TEXT.config_classes(["minimax"])
    return sweep.tiny_model(config_class).build("distca").train()  # type: ignore[no-any-return]


def test_documents_that_are_cut_are_refused_with_the_way_to_whole_ones(sweep: ModuleType) -> None:
    models = [minimax(sweep) for _ in range(2)]
    for model in models:
        distca_hf.enable(model, distca_hf.DistCAPlugin(), longest_document_tokens=200)
    rows = Dataset.from_dict({"input_ids": random_documents(1, lengths=(150,))})

    def step(transport: Transport) -> str:
        (batch,) = PlacedLoader(rows, PlacedPlanner(DistCAConfig(tokens_per_rank=96), 2), transport, CPU)
        with pytest.raises(PlanError) as refused:
            models[transport.rank](**batch)
        return str(refused.value)

    for rank, error in enumerate(run_ranks(2, step, timeout_seconds=30.0)):
        assert error.startswith(f"rank {rank}, micro-batch 0: 1 of 1 documents are cut")
        assert "(MiniMaxLightningAttention) need whole ones" in error
        assert "plugin.dataloader(model=...)" in error


def test_a_document_longer_than_a_rank_is_named_by_its_row(sweep: ModuleType) -> None:
    model = minimax(sweep)
    rows = Dataset.from_dict({"input_ids": [[3] * length for length in (5, 96, 97)]})

    with pytest.raises(PackingError, match=r"\(row 2\) has 97 tokens.* tokens_per_rank"):
        distca_hf.DistCAPlugin(tokens_per_rank=96).dataloader(rows, device="cpu", model=model)


def test_times_of_kernels_are_refused(sweep: ModuleType) -> None:
    config = DistCAConfig(tokens_per_rank=96, kernel_times="times.json")
    planner = PlacedPlanner(config, 2, whole_documents=needs_whole_documents(minimax(sweep)))

    with pytest.raises(ConfigError, match=r"kernel_times='times\.json' decides where documents are cut"):
        planner.check_kernel_times(96)


@states_travel
@pytest.mark.parametrize("was_whole", [True, False])
def test_a_position_saved_with_whole_documents_is_refused_if_they_are_cut_and_the_other_way_round(
    was_whole: bool,
) -> None:
    """Other documents are in the micro-batches before it: some would be left out in silence."""
    rows = Dataset.from_dict({"input_ids": random_documents(40, lengths=(5, 30, 90))})

    def loader(is_whole: bool) -> PlacedLoader:
        model = tiny_model("qwen3_5", num_hidden_layers=2)
        if is_whole:  # a kernel on the module, through which no state can travel
            mixer = next(iter(mixers_of(model).values()))
            mixer.forward = lambda hidden_states, **_: hidden_states
        assert needs_whole_documents(model) is is_whole
        return distca_hf.DistCAPlugin(tokens_per_rank=96).dataloader(rows, device="cpu", model=model)

    saved = loader(was_whole)
    next(batches := iter(saved))
    state = saved.state_dict()
    batches.close()

    loader(was_whole).load_state_dict(state)
    with pytest.raises(ConfigError, match=f"is of whole_documents={was_whole}, this loader has {not was_whole};"):
        loader(not was_whole).load_state_dict(state)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({}, "nothing says where documents begin"),
        (
            {"position_ids": POSITIONS, "cu_seq_lens_q": torch.tensor([0, 6, 9, 12])},
            "token 5: position_ids say position 0, but cu_seq_lens_q says 5",
        ),
        (
            {"cu_seq_lens_q": OFFSETS, "seq_idx": torch.where(IDS == IDS[0, 5], 0, SEQ_IDX)},
            "token 5: a document begins there by cu_seq_lens_q or position_ids, and goes on by seq_idx",
        ),
        (
            {"position_ids": POSITIONS, "seq_idx": torch.where(SEQ_IDX == 2, 1, SEQ_IDX)},
            "token 9: a document begins",
        ),
        (
            {"position_ids": POSITIONS, "seq_idx": torch.where(IDS == IDS[0, 3], 7, SEQ_IDX)},
            "token 3: a document goes on there by cu_seq_lens_q or position_ids, and begins by seq_idx",
        ),
        ({"cu_seq_lens_q": OFFSETS, "seq_idx": SEQ_IDX[:, 1:]}, "seq_idx numbers 11 tokens, the batch has 12"),
        ({"position_ids": POSITIONS, "use_cache": True}, "would leave the state of one of them in a cache"),
    ],
)
def test_packs_whose_documents_are_not_known_are_refused(given: dict[str, Any], told: str) -> None:
    with pytest.raises(PackingError, match=told):
        hybrid()(input_ids=IDS, **given)


@pytest.mark.parametrize(
    "given", [{"position_ids": POSITIONS}, {"cu_seq_lens_q": OFFSETS}, {"position_ids": POSITIONS, "seq_idx": SEQ_IDX}]
)
def test_either_of_positions_and_offsets_is_enough(given: dict[str, Any]) -> None:
    lengths = stated_lengths({"input_ids": IDS, **given})

    assert lengths is not None
    assert lengths.tolist() == [5, 4, 3]


def test_a_mixer_that_does_not_know_where_documents_begin_is_noticed(
    sweep: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a kernel that ignores `seq_idx`: the state goes on from one document to the next."""

    def in_one_row(self: DocumentRows, mixer: Callable[..., object], args: Any, keywords: Any) -> object:
        return mixer(*args, **keywords)

    monkeypatch.setattr(DocumentRows, "mix", in_one_row)
    (config_class,) = sweep.TEXT.config_classes(["minimax"])

    assert sweep.examine(config_class).verdict == sweep.WRONG


@states_travel
@pytest.mark.parametrize("model_type", ["qwen3_next", "nemotron_h"])
@pytest.mark.parametrize("lost", ["states", "halo"])
def test_a_state_that_does_not_travel_is_noticed(
    model_type: str, lost: str, sweep: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Documents that are cut go on from zeros: after a rule, or before a convolution."""
    make_fragments, states = Fragments.of, SentSummaries.states

    def without_halo(*args: Any) -> Fragments:
        fragments = make_fragments(*args)
        windows = fragments.halo.windows.reshape(-1, 2, HALO_TOKENS).copy()
        windows[:, 0] = windows.max()
        return replace(fragments, halo=replace(fragments.halo, windows=windows.reshape(-1)))

    def zeros(sent: SentSummaries, after: After) -> tuple[torch.Tensor, torch.Tensor]:
        found, arrived = states(sent, after)
        return 0 * found, arrived

    if lost == "halo":
        monkeypatch.setattr(Fragments, "of", without_halo)
    else:
        monkeypatch.setattr(SentSummaries, "states", zeros)
    (config_class,) = sweep.TEXT.config_classes([model_type])

    assert sweep.examine(config_class).verdict == sweep.WRONG


@states_travel
@pytest.mark.parametrize("lengths", [(96, 96), (96, 90), (150,)])
def test_a_placed_batch_fills_a_cache_only_if_every_row_is_a_document(lengths: tuple[int, ...]) -> None:
    """The cache goes on as one that the document filled by itself."""
    models = [hybrid() for _ in range(2)]
    rows = Dataset.from_dict({"input_ids": [random_documents(1, lengths=(tokens,))[0] for tokens in lengths]})

    def step(transport: Transport) -> str:
        model = models[transport.rank]
        planner = PlacedPlanner(DistCAConfig(tokens_per_rank=96), 2, halo_tokens=HALO_TOKENS)
        (batch,) = PlacedLoader(rows, planner, transport, CPU)
        ids = batch["input_ids"].clone()
        try:
            filled = model(**batch, use_cache=True)
        except PackingError as error:
            return str(error)
        with torch.no_grad():
            expected = model(ids, use_cache=True)
            ongoing = [model(ids[:, :1], past_key_values=made.past_key_values).logits for made in (filled, expected)]
        torch.testing.assert_close(*ongoing, rtol=1e-4, atol=1e-5)
        assert filled.past_key_values.get_seq_length() == ids.shape[1] + 1
        return ""

    refused = run_ranks(2, step, timeout_seconds=30.0)
    if lengths == (96, 96):
        assert refused == ["", ""]
    else:
        assert any("rows hold several documents, or parts of them" in message for message in refused)


def test_a_pass_of_this_rank_alone_keeps_documents_apart_as_well() -> None:
    model = hybrid().eval()
    with torch.no_grad():
        packed = model(IDS, position_ids=POSITIONS, use_cache=False).logits
        parts = [model(part, use_cache=False).logits for part in IDS.split([5, 4, 3], dim=1)]

    torch.testing.assert_close(packed, torch.cat(parts, 1), rtol=1e-4, atol=1e-5)


@classes_of_today
@pytest.mark.parametrize("trains", [True, False])
def test_a_mixer_that_reads_positions_counts_them_in_documents_of_which_only_offsets_are_known(
    trains: bool, sweep: ModuleType
) -> None:
    """RecurrentGemma clears its state at position 0, and Transformers counts positions over the whole row."""
    (config_class,) = sweep.TEXT.config_classes(["recurrent_gemma"])
    model = sweep.tiny_model(config_class).build("distca").train(trains)
    distca_hf.enable(model, distca_hf.DistCAPlugin(), longest_document_tokens=200)
    offsets = {"cu_seq_lens_q": OFFSETS, "cu_seq_lens_k": OFFSETS, "max_length_q": 5, "max_length_k": 5}

    with torch.set_grad_enabled(trains):
        packed = model(IDS, **offsets, use_cache=False).logits
        alone = [model(ids, position_ids=torch.arange(ids.shape[1])[None]) for ids in IDS.split([5, 4, 3], dim=1)]

    torch.testing.assert_close(packed, torch.cat([one.logits for one in alone], 1), rtol=1e-4, atol=1e-5)


def test_a_model_whose_first_layer_carries_a_state_generates_with_its_cache_what_it_does_without() -> None:
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 2, "num_experts_per_tok": 1}
    layers = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"], "block_size": 8}
    torch.manual_seed(0)
    model = MiniMaxForCausalLM(MiniMaxConfig(vocab_size=64, hidden_size=32, intermediate_size=48, **sizes, **layers))
    distca_hf.enable(model.eval(), distca_hf.DistCAPlugin())
    mask = torch.stack([torch.ones(TOKENS), torch.arange(TOKENS) >= 4]).long()  # the second row is padded on the left
    how: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}

    def logits(use_cache: bool) -> torch.Tensor:
        ids = IDS.expand(2, -1)
        how_shown = how | {"output_logits": True, "return_dict_in_generate": True, "use_cache": use_cache}
        return torch.stack(model.generate(ids, attention_mask=mask, **how_shown).logits)  # type: ignore[operator]

    assert (logits(True) - logits(False)).abs().max() < 1e-5
