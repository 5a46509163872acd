"""A steady layer's forward crosses few files: those that docs/design.md lists."""

import re
import sys
from itertools import pairwise
from pathlib import Path
from types import FrameType

from datasets import Dataset

import distca_hf
from support.commands import REPOSITORY
from support.models import VOCABULARY, tiny_model
from support.ranks import run_ranks


PACKAGE = str(Path(distca_hf.__file__).parent) + "/"
LENGTHS = [300, 80, 60, 40, 20, 12] * 4  # the first one is cut


def _files_called() -> list[str]:
    """Returns the package's file of each call in the last layer's attention, in the second pass of a model."""
    model, plugin, called = tiny_model(), distca_hf.DistCAPlugin(tokens_per_rank=256), list[str]()
    distca_hf.enable(model, plugin)

    def note(frame: FrameType, event: str, value: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            called.append(frame.f_code.co_filename.removeprefix(PACKAGE))

    def begin(*given: object) -> None:
        called.clear()
        sys.setprofile(note)

    attention = model.model.layers[-1].self_attn
    attention.register_forward_pre_hook(begin)
    attention.register_forward_hook(lambda *given: sys.setprofile(None))
    dataset = Dataset.from_dict({"input_ids": [[token % VOCABULARY for token in range(one)] for one in LENGTHS]})
    for batch, _ in zip(plugin.dataloader(dataset), range(2), strict=False):
        model(**batch).loss.backward()
    return called


def test_a_layer_crosses_the_files_of_the_page(tmp_path: Path) -> None:
    page = (REPOSITORY / "docs" / "design.md").read_text()
    section = page.partition("\n### The files of an attention call\n")[2].partition("\n## ")[0]
    for called in run_ranks(2, _files_called, tmp_path):
        files = {*called}
        assert {f"`{file}`" for file in files} <= {*re.findall(r"`[\w/]+\.py`", section)}
        assert len(files) <= 14
        assert sum(file != after for file, after in pairwise(called)) <= 40
