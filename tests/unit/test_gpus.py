"""GPUs by name: one table for generation, memory and peak rate."""

import pytest

from distca_hf.errors import ConfigError
from distca_hf.flops import GPUS, find_gpu, gpu_of_device, peak_flops


def test_every_gpu_has_a_generation_that_the_kernels_know() -> None:
    assert {gpu.compute_capability for gpu in GPUS.values()} <= {None, 7, 8, 9, 10, 11, 12}
    assert find_gpu("H200") is GPUS["h200"]
    with pytest.raises(ConfigError, match="Did you mean 'h100'"):
        find_gpu("h101")


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 NVL", "h100-nvl"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H200 NVL", "h200-nvl"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtx-pro-6000"),
    ],
)
def test_devices_are_known_by_the_name_that_torch_has_for_them(device: str, name: str) -> None:
    assert gpu_of_device(device) is GPUS[name]


@pytest.mark.parametrize(
    "device", ["another", "NVIDIA A100-SXM4-80GB MIG 1g.10gb", "NVIDIA H200 MIG 3g.71gb", "NVIDIA A10G"]
)
def test_a_device_that_is_no_whole_known_gpu_has_neither_memory_nor_rate(device: str) -> None:
    assert gpu_of_device(device) is None
    assert peak_flops(device) is None


@pytest.mark.parametrize(
    ("name", "tera"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H200", 989),
        ("NVIDIA H200 NVL", 835),
        ("NVIDIA B200", 2250),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA L40S", 362),
        ("NVIDIA A10G", None),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", None),
        ("Tesla T4", None),
    ],
)
def test_peak_is_known_by_name_or_not_at_all(name: str, tera: float | None) -> None:
    assert peak_flops(name) == (None if tera is None else tera * 1e12)
