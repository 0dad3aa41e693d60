"""GPUs are matched by the device names that torch reports."""

import pytest

from sd3_light.cost.device_peaks import kinds_with_memory, peak_flops

TERA = 10**12


@pytest.mark.parametrize(
    ("name", "tera"),
    [
        ("NVIDIA H200", 989.4),
        ("NVIDIA H200 NVL", 835.5),
        ("NVIDIA GH200 480GB", 989.4),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H20", 148),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("A100-SXM4-40GB", 312),
        ("NVIDIA L40S", 362),
        ("NVIDIA L40", 181),
        ("NVIDIA L4", 121),
        ("NVIDIA A10", 125),
        ("NVIDIA A10G", 70),
        ("NVIDIA RTX 6000 Ada Generation", 364.2),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA GB200", 2500),
        ("AMD Instinct MI300X", 1307.4),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA GeForce RTX 3090 Ti", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
        ("Quadro RTX 6000", None),
        ("NVIDIA H2000", None),
        ("Tesla V100-SXM2-16GB", None),
        ("", None),
    ],
)
def test_bf16_peak_by_name(name: str, tera: float | None) -> None:
    assert peak_flops(name, "bfloat16") == (None if tera is None else pytest.approx(tera * TERA))


def test_peaks_of_float32() -> None:
    assert peak_flops("NVIDIA A100-SXM4-80GB", "float32") == 19.5 * TERA
    assert peak_flops("Tesla V100-SXM2-16GB", "float32") == 15.7 * TERA
    assert peak_flops("Tesla V100-PCIE-32GB", "float32") == 14 * TERA


@pytest.mark.parametrize(
    ("gib", "slowest", "fastest"),
    [
        (12, "3060", "5070"),
        (15.7, "4080", "5080"),
        (24, "a10g", "4090"),
        (80, "a100", "h100"),
        (141, "h200 nvl", "h200"),
    ],
)
def test_kinds_by_memory(gib: float, slowest: str, fastest: str) -> None:
    kinds = kinds_with_memory(int(gib * 2**30))
    assert (kinds[0].words, kinds[0].bfloat16, kinds[-1].bfloat16) == (
        slowest,
        min(kind.bfloat16 or 0.0 for kind in kinds),
        peak_flops(fastest, "bfloat16") / TERA,  # type: ignore[operator]
    )
