"""TRL's SFTTrainer, attached: its columns mean what its settings say."""

import re
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

import distca_hf
from distca_hf.errors import ConfigError, PackingError
from support.data import random_dataset, random_documents
from support.models import VOCABULARY, tiny_model
from support.training import quiet_arguments


LENGTHS = (20, 60, 100, 150)


def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({str(number): number for number in range(VOCABULARY)}, unk_token="0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token="1", bos_token="2")


def make(dataset: Dataset, folder: Path, model: Any = None, **settings: Any) -> SFTTrainer:
    args = SFTConfig(**quiet_arguments(folder, max_steps=2, use_cpu=True, gradient_checkpointing=False), **settings)
    model = tiny_model() if model is None else model
    return SFTTrainer(model=model, args=args, train_dataset=dataset, processing_class=tokenizer())


def attach(trainer: SFTTrainer) -> distca_hf.PlacedLoader:
    distca_hf.DistCAPlugin(tokens_per_rank=300).attach(trainer)
    return trainer.get_train_dataloader()


def learnt(loader: distca_hf.PlacedLoader) -> tuple[int, int]:
    """Labels and tokens of an epoch."""
    documents = [document for at in range(len(loader)) for document in loader.documents(0, at)]
    return sum(int((d.shift_labels != -100).sum()) for d in documents), sum(len(d.input_ids) for d in documents)


def test_trains_on_all_documents(tmp_path: Path) -> None:
    dataset = random_dataset(20, lengths=LENGTHS)
    trainer = make(dataset, tmp_path, max_length=150)
    loader = attach(trainer)
    trainer.train()

    lengths = [len(row) for row in dataset["input_ids"]]
    assert learnt(loader) == (sum(lengths) - len(lengths), sum(lengths))
    assert loader.num_documents == len(lengths)
    assert all(0 < log["loss"] < 10 for log in trainer.state.log_history if "loss" in log)


def test_token_metric_leaves_padding_out(tmp_path: Path) -> None:
    dataset = random_dataset(20, lengths=LENGTHS)
    trainer = make(dataset, tmp_path, max_length=150)
    distca_hf.DistCAPlugin(tokens_per_rank=4096, pad_to_multiple_of=4096).attach(trainer)
    trainer.train()

    counted = [entry["num_tokens"] for entry in trainer.state.log_history if "num_tokens" in entry]
    assert counted[0] == sum(len(row) for row in dataset["input_ids"])


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (
            {"packing": True, "max_length": 150},
            "packing=True packs its dataset, and tokens_per_rank=300 asks for",
        ),
        ({"padding_free": True, "max_length": None}, "DataCollatorForLanguageModeling packs its batches, and tokens_"),
        ({"max_length": None}, ""),
    ],
    ids=["packed dataset", "packed batches", "padded batches"],
)
def test_batches_are_kept(settings: dict[str, Any], told: str, tmp_path: Path) -> None:
    trainer = make(random_dataset(20, lengths=LENGTHS), tmp_path, **settings)
    if told:
        with pytest.raises(ConfigError, match=re.escape(told)):
            attach(trainer)
    distca_hf.DistCAPlugin().attach(trainer)

    assert not isinstance(trainer.get_train_dataloader(), distca_hf.PlacedLoader)
    trainer.train()
    assert [0 < log["loss"] < 10 for log in trainer.state.log_history if "loss" in log] == [True, True]


@pytest.mark.parametrize(("setting", "share"), [(None, 0.5), (True, 0.5), (False, 1.0)])
def test_completion_mask_is_used_as_the_trainer_would(setting: bool | None, share: float, tmp_path: Path) -> None:
    rows = random_documents(20, lengths=(100,))
    masks = [[0] * 50 + [1] * 50 for _ in rows]
    trainer = make(
        Dataset.from_dict({"input_ids": rows, "completion_mask": masks}), tmp_path, completion_only_loss=setting
    )
    expected = trainer.completion_only_loss
    labels, tokens = learnt(attach(trainer))

    assert labels / tokens == pytest.approx(0.5 if expected else 0.99)
    assert expected in (True, False)
    assert setting is None or expected == setting, share


def test_model_that_the_trainer_loads_attends_with_distca_once_it_is_attached(tmp_path: Path) -> None:
    tiny_model(implementation="sdpa").save_pretrained(tmp_path / "model")
    dataset, folder = random_dataset(4, lengths=LENGTHS), str(tmp_path / "model")
    for arguments in ({}, {"model_init_kwargs": {"attn_implementation": "distca"}}):
        trainer = make(dataset, tmp_path, model=folder, **arguments)
        attach(trainer)
        assert trainer.model.config._attn_implementation == "distca"


def test_trainer_that_makes_batches_of_its_own_kind_keeps_them(tmp_path: Path) -> None:
    from trl.experimental.cpo import CPOConfig, CPOTrainer

    texts = [" ".join(map(str, document)) for document in random_documents(8, lengths=(5, 9))]
    pairs = Dataset.from_list([{"prompt": text, "chosen": text[::2], "rejected": text[:6]} for text in texts])

    def trainer(implementation: str, **given: Any) -> CPOTrainer:
        args = CPOConfig(**quiet_arguments(tmp_path, max_steps=2, use_cpu=True, per_device_train_batch_size=4))
        model = tiny_model(implementation=implementation)
        return CPOTrainer(model, args, train_dataset=pairs, processing_class=tokenizer(), **given)

    plain, ours = trainer("sdpa"), trainer("distca")
    with_callback = trainer("distca", callbacks=[distca_hf.DistCACallback(distca_hf.DistCAPlugin())])
    with pytest.raises(PackingError, match=r"no column 'input_ids', .* leave tokens_per_rank out"):
        attach(ours)
    distca_hf.DistCAPlugin().attach(ours)
    runs = plain, ours, with_callback
    for one in runs:
        one.train()
    losses = [[log["loss"] for log in one.state.log_history if "loss" in log] for one in runs]

    assert len(losses[0]) == 2
    assert losses[1] == losses[2] == pytest.approx(losses[0], rel=1e-5)


def test_cut_documents_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    attach(make(random_dataset(20, lengths=LENGTHS), tmp_path, max_length=30))

    assert "cuts documents to max_length=30" in caplog.text
