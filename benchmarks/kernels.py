"""Which tiles make our kernels fast on this GPU? Those of the package were chosen on an H200 at width 1536.

    python benchmarks/kernels.py TILES.json [--batch 128]

Times every kernel on the image rows of a full-size batch with several tiles, prints milliseconds and bytes per second,
and writes the fastest to TILES.json for `step.py --tuning`. Whether the kernels are right on a GPU is checked by every
run that uses them, and by `tests/gpu/test_fast.py`.
"""

import itertools
from pathlib import Path
from typing import Any

import torch
from common.basics import parser_of, write_json
from torch import Tensor

from sd3_light.families.sd3.fast.fp8 import E4M3, Fp8Rows, Fp8Weight
from sd3_light.families.sd3.fast.row_layout import RowLayout, make_layout

WIDTH, HEADS = 1536, 24
NUM_IMAGE, NUM_TEXT = 256, 333
CANDIDATES: dict[str, dict[str, list[int]]] = {
    "norm": {"R": [1, 2, 4], "num_warps": [4, 8]},
    "norm_backward": {"R": [1, 2], "STAGES": [1, 3], "num_warps": [4, 8, 16]},
    "gelu_backward": {"R": [1, 4], "BLOCK": [512, 1024], "STAGES": [1, 2], "num_warps": [4, 8]},
    "join": {"num_warps": [2, 4, 8]},
    "join_backward": {"STAGES": [1, 3], "num_warps": [4, 8, 16]},
    "copy": {"R": [1, 4], "num_warps": [4, 8]},
    "norm_fp8": {"R": [1, 2, 4], "num_warps": [4, 8]},
    "norm_backward_fp8": {"R": [1, 2], "STAGES": [1, 3], "num_warps": [4, 8, 16]},
    "gelu_fp8": {"num_warps": [4, 8, 16]},
    "join_backward_fp8": {"STAGES": [1, 3], "num_warps": [4, 8, 16]},
    "copy_fp8": {"R": [1, 4], "num_warps": [4, 8]},
    "round_rows": {"num_warps": [4, 8, 16]},
    "weight": {"N": [64, 128], "K": [32, 64, 128], "num_warps": [4, 8]},
}
MOVES = {
    "norm": 4, "norm_backward": 6, "gelu_backward": 12, "join": 6 * (1 + NUM_TEXT / NUM_IMAGE), "join_backward": 8,
    "copy": 2, "norm_fp8": 4.5, "norm_backward_fp8": 6.5, "gelu_fp8": 10, "join_backward_fp8": 9.5, "copy_fp8": 2.5,
    "round_rows": 1.5, "weight": 0,
}  # fmt: skip
"""Tensors of bf16, as large as the rows, that a kernel reads and writes."""


def call_of(kernel: str, layout: RowLayout) -> tuple[str, tuple[Any, ...]]:
    """Return the operation that uses a kernel, and its arguments."""
    rows = layout.image
    device = rows.sample_index.device
    form = "both" if kernel.endswith("fp8") else "plain"

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device).bfloat16()

    def x(times: int = 1) -> Tensor:
        return normal(rows.count, times * WIDTH)

    shift, scale, gate = normal(rows.samples, 5 * WIDTH).chunk(5, dim=1)[:3]
    pending = (x(), torch.randn(WIDTH, device=device), gate)
    norms = (torch.rand(WIDTH // HEADS, device=device) + 0.5, torch.rand(WIDTH // HEADS, device=device))
    joined = tuple(normal(layout.capacity, HEADS, WIDTH // HEADS) for _ in range(3))
    match kernel.removesuffix("_fp8"):
        case "norm":
            return "residual_norm", (x(), pending, scale, shift, rows, form)
        case "norm_backward":
            return "residual_norm_backward", (x(), x(), x(), pending, scale, rows, None, form)
        case "gelu":
            return "gelu", (x(4), form)
        case "gelu_backward":
            return "gelu_backward", (x(4), x(4), False, form)
        case "join":
            streams = (x(3), normal(layout.text.count, 3 * WIDTH))
            return "join", (streams, (norms, norms), HEADS, layout)
        case "join_backward":
            return "join_backward", (joined, x(3), norms, HEADS, rows, form)
        case "copy":
            return "gather_rows", (joined[0].flatten(1), rows, form)
        case "round_rows":
            return "round_rows", (x(),)
        case _:
            weights = [torch.randn(WIDTH, WIDTH, device=device) for _ in range(3)]
            return "round_weight", (weights, empty_weight(3 * WIDTH, WIDTH, device))


def empty_weight(outputs: int, inputs: int, device: torch.device) -> Fp8Weight:
    """Return empty storage for a rounded weight."""

    def empty_rows(count: int, width: int) -> Fp8Rows:
        return Fp8Rows(torch.zeros(count, width, device=device).to(E4M3), torch.zeros(count, 1, device=device))

    return Fp8Weight(empty_rows(outputs, inputs), empty_rows(inputs, outputs))


def tune(batch: int) -> dict[str, Any]:
    """Return the fastest tile of each kernel, and print all times."""
    import triton

    from sd3_light.families.sd3.fast import kernels

    layout = make_layout(batch, NUM_IMAGE, NUM_TEXT, None, torch.device("cuda"))
    best: dict[str, Any] = {}
    for kernel, choices in CANDIDATES.items():
        operation, arguments = call_of(kernel, layout)
        function = getattr(kernels, operation)
        times = []
        for values in itertools.product(*choices.values()):
            tile = dict(zip(choices, values, strict=True))
            kernels.TUNING[kernel] = tile
            try:
                timed = triton.testing.do_bench(
                    lambda run=function, words=arguments: run(*words), warmup=15, rep=60, return_mode="median"
                )
            except Exception as error:  # a tile that is too large for the device is a result
                print(f"{kernel} {tile}: {type(error).__name__} {str(error)[:200]}", flush=True)
                continue
            times.append((float(timed), tile))
        if times:
            times.sort(key=lambda entry: entry[0])
            milliseconds, best[kernel] = times[0]
            kernels.TUNING[kernel] = best[kernel]
            rate = MOVES[kernel] * layout.image.count * WIDTH * 2 / milliseconds / 1e9
            others = ", ".join(f"{ms:.3f} {'/'.join(map(str, tile.values()))}" for ms, tile in times)
            print(f"{kernel:18} {milliseconds:.3f} ms, {rate:.2f} TB/s: {best[kernel]}; all: {others}", flush=True)
    return best


def main() -> None:
    """Run the benchmark."""
    parser = parser_of(__doc__)
    parser.add_argument("tiles", type=Path, help="JSON file of the fastest tiles")
    parser.add_argument("--batch", type=int, default=128)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("it needs a GPU")
    write_json(args.tiles, tune(args.batch))


if __name__ == "__main__":
    main()
