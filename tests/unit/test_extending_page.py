"""docs/extending.md: its examples run as printed, one after the other."""

import re

from distca_hf.kernels.registry import KERNELS
from support.commands import REPOSITORY


PAGE = REPOSITORY / "docs" / "extending.md"


def test_examples_run() -> None:
    before = dict(KERNELS)
    text = PAGE.read_text()
    names: dict[str, object] = {}
    for block in re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        first_line = text[: block.start(1)].count("\n")
        exec(compile("\n" * first_line + block[1], str(PAGE), "exec"), names)

    classes = {"WindowAndFirstKeys", "LoopKernel", "RecordingTransport"}
    assert {"plan_in_turn", "IN_TURN", *classes} <= set(names)
    assert before == KERNELS, "examples leave nothing behind"
