"""Lines of the documentation that install something, and what the package asks for."""

import re
import tomllib
from pathlib import Path

import pytest
import torch

from distca_hf.errors import UnsupportedAttentionError
from distca_hf.kernels.interface import AttentionSpec
from distca_hf.kernels.registry import KERNELS, Operands, choose_kernel
from distca_hf.version import LOWEST


SPEC = AttentionSpec(scale=1.0)
ROOT = Path(__file__).parents[2]
INSTALL = ROOT / "docs" / "install.md"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
# Import torch while they are built, which a build in isolation (what pip does with an extra) does not have.
BUILT_AGAINST_TORCH = {"flash-attn", "apex", "transformer-engine", "causal-conv1d", "mamba-ssm"}


def name_of(requirement: str) -> str:
    """The package a requirement such as `torch>=2.11` is about."""
    found = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert found
    return found[0].lower().replace("_", "-")


@pytest.mark.parametrize("extra", EXTRAS)
def test_extra_installs_without_torch_in_the_build(extra: str) -> None:
    assert BUILT_AGAINST_TORCH.isdisjoint(map(name_of, EXTRAS[extra]))


def test_extras_that_pages_name_are_there() -> None:
    named = {
        (page.name, extra)
        for page in PAGES
        for extras in re.findall(r"(?:\.|distca_hf)\[([a-z0-9,]+)\]", page.read_text())
        for extra in extras.split(",")
    }

    assert {("README.md", "flash4"), ("install.md", "flash4")} <= named
    assert {extra for _, extra in named} <= set(EXTRAS)


def test_flash_attention_2_is_installed_after_torch_and_without_isolation() -> None:
    texts = [" ".join(page.read_text().split()) for page in PAGES]  # a printed line may end in a command
    options = [after for text in texts for after in re.split(r"install flash-attn(?![-\w])", text)[1:]]

    assert options
    assert all(after.startswith(" --no-build-isolation") for after in options)


def row_of_page(begin: str) -> str:
    (row,) = (line for line in INSTALL.read_text().splitlines() if line.startswith(f"| {begin}"))
    return row


def operands_on(device_type: str, compute_capability: int | None, head_dim: int = 128) -> Operands:
    return Operands(device_type, compute_capability, torch.bfloat16, 8, 8, head_dim, head_dim)


@pytest.mark.parametrize(
    ("device", "device_type", "generations"),
    [
        ("Hopper", "cuda", (9,)),
        ("Blackwell", "cuda", (10, 11, 12)),
        ("Ampere, Ada", "cuda", (8,)),
        ("older GPUs", "cuda", (7,)),
        ("Apple", "mps", (None,)),
        ("CPU", "cpu", (None,)),
    ],
)
def test_page_names_the_kernels_of_each_device(
    device: str, device_type: str, generations: tuple[int | None, ...]
) -> None:
    """In the order in which they are chosen, those for wide heads last; the reference is not chosen where another one
    runs."""
    _, head, kernels, _ = row_of_page(device).split("|")
    told = [name for name in re.findall(r"`(\w+)`", kernels) if name in KERNELS]
    for generation in generations:
        can = [
            name
            for head_dim in (128, 512)
            for name, entry in KERNELS.items()
            if entry.automatic and not entry.capabilities.refusal(operands_on(device_type, generation, head_dim), SPEC)
        ]
        assert told == [*dict.fromkeys(can)]
        assert generation is None or re.search(rf"\b{generation}\b", head)


@pytest.mark.parametrize(("device_type", "generation"), [("cuda", 7), ("mps", None), ("xpu", None)])
def test_devices_without_a_kernel_are_refused_by_name(device_type: str, generation: int | None) -> None:
    with pytest.raises(UnsupportedAttentionError, match=r"no attention kernel for .*reference is exact but slow"):
        choose_kernel("auto", operands_on(device_type, generation), SPEC)


def test_page_names_the_lowest_versions() -> None:
    assert f"{PROJECT['requires-python'].removeprefix('>=')} or newer" in row_of_page("Python")
    assert all(f"{name} {version}" in row_of_page("packages") for name, version in LOWEST.items())
