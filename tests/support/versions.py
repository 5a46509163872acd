"""Tests of what only newer packages have: they are skipped with older ones, and say why."""

import accelerate
import pytest
import transformers
from packaging.version import Version

from distca_hf.integrations.models.mixers import LOWEST_STATES


TRANSFORMERS, ACCELERATE = Version(transformers.__version__), Version(accelerate.__version__)


def needs_transformers(lowest: str, reason: str) -> pytest.MarkDecorator:
    """Returns a mark that skips a test with an older Transformers."""
    return pytest.mark.skipif(TRANSFORMERS < Version(lowest), reason=f"needs Transformers {lowest}: {reason}")


def skip_before(lowest: str, reason: str) -> None:
    """Skips the rest of a test with an older Transformers."""
    if TRANSFORMERS < Version(lowest):
        pytest.skip(f"needs Transformers {lowest}: {reason}")


states_travel = needs_transformers(LOWEST_STATES, "mixers of older ones keep documents whole")
divides_models = needs_transformers("5.17", "older ones have another DistributedConfig, or no mesh of a known name")
takes_label_counts = needs_transformers("5.17", "losses of older multimodal classes take no num_items_in_batch")
# Of some classes, of which more work with every version.
classes_of_today = needs_transformers("5.17", "older ones have other classes, some of which are refused")
images_may_move = needs_transformers("5.18", "forward of older ones takes no features of images")
# Older ones count the first token of every row, which nothing predicts: their losses are smaller.
trainer_counts_predicted_tokens = needs_transformers("5.10", "Trainer counts labels that nothing predicts")
builds_nemotron = needs_transformers("5.13", "Nemotron of older ones has a list of attention classes")
attends_by_name = needs_transformers("5.14", "CTRL of older ones looks no attention up by name")
tells_decoder = needs_transformers("5.14", "Qwen2.5-Omni of older ones does not tell its text decoder")
offloads_inputs = needs_transformers("5.19", "checkpointing of older ones keeps inputs of layers on the GPU")
block_masks = needs_transformers("5.9", "masks of older ones have no blocks")
fsdp_trains_on_cpus = needs_transformers("5.12", "FSDP of older ones looks for a GPU")
ignores_cpu_count = pytest.mark.skipif(
    ACCELERATE < Version("1.13"), reason="needs Accelerate 1.13: older ones train together without being told of CPUs"
)
