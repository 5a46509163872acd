"""Mixers that keep documents whole: what they are called with, and what the log says of versions."""

import importlib
import importlib.metadata
import logging
from pathlib import Path

import pytest
import torch
from torch import nn

import distca_hf
from distca_hf.integrations.models import mixers
from distca_hf.integrations.models.mixer_calls import KEYWORD, Apart, DocumentRows
from distca_hf.integrations.models.structure import source_of
from support.log_lines import KeptLines
from support.models import tiny_model


class Numbered(nn.Module):
    """A mixer that asks for the numbers of documents, as those of Mamba do. Not every one of them can use them."""

    def forward(self, hidden_states: torch.Tensor, seq_idx: torch.Tensor | None = None) -> torch.Tensor:
        assert seq_idx is None
        return hidden_states.cumsum(1)


def test_documents_that_have_a_row_each_are_not_numbered() -> None:
    apart = Apart(Numbered(), "mixer")
    rows = DocumentRows(torch.tensor([3, 2]).numpy(), 1, 5, torch.device("cpu"))

    mixed = apart(torch.ones(1, 5, 1), seq_idx=torch.tensor([[0, 0, 0, 1, 1]]), **{KEYWORD: rows})

    assert mixed.flatten().tolist() == [1, 2, 3, 1, 2]


TWICE = """
try:
    import a_package_that_nobody_has
except ImportError:
    class Part: first = "without"
else:
    class Part: conv_state = "with"
"""


def test_a_class_that_a_module_defines_twice_has_the_source_of_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or a state that one of them carries would be missed."""
    (tmp_path / "defined_twice.py").write_text(TWICE)
    monkeypatch.syspath_prepend(tmp_path)
    source = source_of(importlib.import_module("defined_twice").Part)

    assert source.count("class Part") == 2
    assert mixers.STATE.search(source)


@pytest.mark.parametrize(("version", "says"), [("5.14.1", True), (mixers.LOWEST_STATES + ".0", False)])
def test_the_log_says_from_which_version_on_states_travel(
    version: str, says: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = importlib.metadata.version
    monkeypatch.setattr(
        importlib.metadata, "version", lambda name: version if name == "transformers" else installed(name)
    )
    monkeypatch.setattr(mixers, "carries", lambda mixer: False)
    kept = KeptLines()
    logging.getLogger("distca_hf").addHandler(kept)
    distca_hf.enable(tiny_model("qwen3_5", num_hidden_layers=2), distca_hf.DistCAPlugin())
    logging.getLogger("distca_hf").removeHandler(kept)

    assert any("no document is cut" in line for line in kept.lines)
    assert any("From Transformers 5.15 on, states of known families travel" in line for line in kept.lines) is says
