"""The mask that docs/extending.md adds: chunked attention."""

import re
from dataclasses import dataclass
from typing import Any

from distca_hf.cost import Mask
from support.commands import REPOSITORY


def _of_page() -> Any:
    page = (REPOSITORY / "docs" / "extending.md").read_text()
    (block,) = (one for one in re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S) if "class Chunks" in one)
    names: dict[str, object] = {"__name__": __name__, "dataclass": dataclass, "Mask": Mask}
    exec(block, names)
    return names["Chunks"]


Chunks = _of_page()
