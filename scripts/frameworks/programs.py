"""Programs of frameworks: how each is installed, and what two processes run, with `{material}` and `{output}`."""

from typing import NamedTuple


class Framework(NamedTuple):
    """A framework and its programs."""

    packages: tuple[str, ...]  # for pip; the first is the framework
    # module and arguments of each. A dictionary is written to a YAML file, whose name is the argument.
    programs: dict[str, tuple[str, list[str] | dict[str, object]]]
    section: dict[str, object] | None = None  # what balances it in its YAML file; without one DISTCA_ATTACH=1 does
    lowest_python: tuple[int, int] = (3, 11)  # the lowest version that it can be installed with


# What all have: three steps of all documents.
SETTINGS: dict[str, object] = {
    "max_steps": 3,
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "logging_steps": 1,
    "learning_rate": 1e-3,
    "lr_scheduler_type": "constant",
    "save_strategy": "steps",
    "save_steps": 3,
    "output_dir": "{output}",
}
PACKS = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 1}


def options(settings: dict[str, object]) -> list[str]:
    """Returns settings as options of a command."""
    return [word for name, value in settings.items() for word in (f"--{name}", str(value))]


def trl(data: str, **more: object) -> list[str]:
    """Returns options of a script of TRL."""
    model = {"model_name_or_path": "{material}/model", "dataset_name": f"{{material}}/{data}"}
    quiet = {"report_to": "none", "use_cpu": True, "bf16": False, "gradient_checkpointing": False}
    return options(SETTINGS | model | quiet | {"attn_implementation": "sdpa"} | more)


SWIFT = {
    "model": "{material}/model",
    "model_type": "llama",
    "template": "chatml",
    "tuner_type": "full",
    "dataset": "{material}/messages.jsonl",
    "split_dataset_ratio": 0,
    "max_length": 1024,
    "torch_dtype": "float32",
    "attn_impl": "sdpa",
    "gradient_checkpointing": False,
    "report_to": "none",
}
LLAMA_FACTORY = {
    "model_name_or_path": "{material}/model",
    "stage": "sft",
    "do_train": True,
    "finetuning_type": "full",
    "dataset_dir": "{material}",
    "dataset": "documents",
    "template": "default",
    "cutoff_len": 1024,
    "report_to": "none",
    "use_cpu": True,
    "flash_attn": "sdpa",
    "disable_gradient_checkpointing": True,
}
# Its names of the settings above.
AXOLOTL_NAMES = {"per_device_train_batch_size": "micro_batch_size", "lr_scheduler_type": "lr_scheduler"}
AXOLOTL = {AXOLOTL_NAMES.get(name, name): value for name, value in SETTINGS.items()} | {
    "base_model": "{material}/model",
    "datasets": [{"path": "{material}/instructions.jsonl", "type": "alpaca"}],
    "dataset_prepared_path": "{material}/prepared",
    "seed": 42,
    "sequence_len": 1024,
    "optimizer": "adamw_torch",
    "attn_implementation": "sdpa",
    "bf16": False,
    "gradient_checkpointing": False,
    "val_set_size": 0,
}
FRAMEWORKS = {
    "trl": Framework(
        ("trl==1.16.0", "torch==2.13.0", "transformers==5.24.0"),
        {
            "SFT": ("trl.scripts.sft", trl("texts")),
            "SFT, packing": ("trl.scripts.sft", trl("texts", packing=True, max_length=800)),
            "DPO": ("trl.scripts.dpo", trl("pairs")),
            "GRPO": (
                "trl.scripts.grpo",
                trl("prompts", reward_funcs="material.reward", num_generations=4, max_completion_length=32),
            ),
        },
    ),
    "ms-swift": Framework(
        ("ms-swift==4.6.0", "torch==2.13.0"),
        {
            "SFT": ("swift.cli.sft", options(SETTINGS | SWIFT)),
            "SFT, packing": (
                "swift.cli.sft",
                options(SETTINGS | SWIFT | {"packing": True, "external_plugins": "{scripts}/on_cpus.py"}),
            ),
        },
    ),
    "llama-factory": Framework(
        # The newest torch for which all three are published together.
        ("llamafactory==0.9.5", "torch==2.11.0", "torchvision==0.26.0", "torchaudio==2.11.0"),
        {
            "SFT": ("llamafactory.launcher", SETTINGS | LLAMA_FACTORY),
            "SFT, neat packing": (
                "llamafactory.launcher",
                SETTINGS | LLAMA_FACTORY | PACKS | {"packing": True, "neat_packing": True},
            ),
        },
    ),
    "axolotl": Framework(
        ("axolotl==0.21.0", "torch==2.13.0"),
        {
            "SFT": ("axolotl.cli.train", AXOLOTL),
            "SFT, sample packing": (
                "axolotl.cli.train",
                AXOLOTL
                | {"micro_batch_size": 1, "gradient_accumulation_steps": 1}
                | {"sample_packing": True, "pad_to_sequence_len": True},
            ),
        },
        section={"distca": {}},
        lowest_python=(3, 12),
    ),
}
