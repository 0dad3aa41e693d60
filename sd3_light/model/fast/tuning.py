"""Launch parameters of the kernels."""

TUNING: dict[str, dict[str, int]] = {
    "norm": {"R": 4, "num_warps": 4},
    "norm_backward": {"R": 1, "STAGES": 3, "num_warps": 4},
    "gelu_backward": {"R": 4, "BLOCK": 1024, "STAGES": 2, "num_warps": 4},
    "join": {"num_warps": 8},
    "join_backward": {"STAGES": 3, "num_warps": 8},
    "copy": {"R": 4, "num_warps": 8},
    # kernels that also round to fp8
    "norm_fp8": {"R": 2, "num_warps": 4},
    "norm_backward_fp8": {"R": 1, "STAGES": 3, "num_warps": 4},
    "gelu_fp8": {"num_warps": 4},
    "join_backward_fp8": {"STAGES": 3, "num_warps": 8},
    "copy_fp8": {"R": 4, "num_warps": 8},
    "round_rows": {"num_warps": 4},
    "weight": {"N": 128, "K": 64, "num_warps": 4},
}
"""Kernel -> rows per tile (R), pipeline depth of loads (STAGES), warps. `benchmarks/step_parts.py tune` measured these
as the fastest on an H200 at width 1536."""
