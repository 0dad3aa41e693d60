"""Compare every kernel with its torch reference on small inputs, once per kind of GPU and shape of model.

The kernels were tuned on one kind of GPU. On others a kernel may not compile, may need more shared memory than there
is, or may compute something else; such a run uses the stock blocks. The verdict is remembered in the user's cache
folder, under everything that it depends on; without a readable one the kernels are checked again.
"""

import json
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache, partial
from hashlib import blake2b
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from sd3_light.config.faults import UserError
from sd3_light.families.sd3.fast import reference
from sd3_light.families.sd3.fast.fp8 import E4M3, Fp8Rows, Fp8Weight, RowForm, multiply
from sd3_light.families.sd3.fast.operations import operations
from sd3_light.families.sd3.fast.row_layout import RowLayout, Rows, make_layout
from sd3_light.families.sd3.fast.sample_attention import attend, attend_masked
from sd3_light.files import atomic_unsynced_file
from sd3_light.inputs import read_json_file
from sd3_light.runlog import info
from sd3_light.system import cache_folder

LIMITS = {"float32": 1e-3, "float16": 2e-2, "bfloat16": 2e-2}
"""Largest accepted difference of an element, relative to the sum of its magnitude and its row's mean square root."""
FP8_LIMIT = 0.13
"""The same for fp8 rows: a number halfway between two e4m3 numbers may round to either."""
ATTENTION_LIMIT = 0.1
"""The same for attention, whose reference has float32 probabilities."""
_SAMPLES = 4
_IMAGE = 48
_TEXT = 80
_LENGTHS = (5, 80, 33, 1)


@dataclass(frozen=True)
class KernelShape:
    """What a model requires of the kernels; their tiles, and so their shared memory, depend on it."""

    heads: int
    head_dim: int
    dtype: str
    fp8: bool = False
    """Check the kernels that round to fp8, and their product, instead of the others."""

    @property
    def width(self) -> int:
        """The model's width."""
        return self.heads * self.head_dim


def kernel_problem(shape: KernelShape, device: torch.device) -> str | None:
    """Return why the kernels cannot run this shape on this GPU, or None; checks them unless a verdict is remembered."""
    facts = _facts(shape, device)
    path = verdict_path(facts)
    verdict = _remembered(path)
    if verdict.get("facts") == facts and isinstance(verdict.get("problem", 0), str | None):
        return verdict["problem"]  # type: ignore[no-any-return]
    info(f"checking the kernels on this GPU ({facts['gpu']}) for the first time")
    problem = check_kernels(shape, device, operations(device))
    _remember(path, facts, problem)
    if problem is not None:
        _require_working(device, problem)
    return problem


def check_kernels(shape: KernelShape, device: torch.device, kernels: ModuleType) -> str | None:
    """Run every kernel and its reference on the same inputs; describe the first one that fails or differs."""
    from triton.errors import TritonError

    for name, run, limit in cases(shape, device):
        try:
            actual = run(kernels)
            expected = run(reference)
            distance = _distance(actual, expected)
        except torch.OutOfMemoryError:  # of a GPU that others fill: says nothing about the kernel
            raise
        except (TritonError, RuntimeError, OSError, subprocess.SubprocessError) as error:
            return _failure(name, error)
        if not distance <= limit:  # also if it is not a number
            return f"the kernel {name} differs from its reference by {distance:.2g}, more than {limit:g}"
    return None


# --- verdicts ------------------------------------------------------------------------------------


def verdict_path(facts: dict[str, Any]) -> Path:
    """Return the file that remembers the verdict under these facts."""
    name = blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=12).hexdigest()
    return cache_folder() / "kernels" / f"{name}.json"


def _facts(shape: KernelShape, device: torch.device) -> dict[str, Any]:
    """Return everything that a verdict depends on."""
    import triton

    return {
        "gpu": torch.cuda.get_device_name(device),
        "capability": list(torch.cuda.get_device_capability(device)),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "sources": _sources_hash(),
        **asdict(shape),
    }


@cache
def _sources_hash() -> str:
    files = sorted(Path(__file__).parent.glob("*.py"))
    return blake2b(b"".join(file.read_bytes() for file in files), digest_size=12).hexdigest()


def _remembered(path: Path) -> dict[str, Any]:
    """Return the verdict in a file; empty if it is absent, unreadable or damaged."""
    try:
        verdict = read_json_file(path)
    except (OSError, ValueError):
        return {}
    return verdict if isinstance(verdict, dict) else {}


def _remember(path: Path, facts: dict[str, Any], problem: str | None) -> None:
    with suppress(OSError):  # without a writable cache folder every start checks again
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_unsynced_file(path) as temporary:
            temporary.write_text(json.dumps({"facts": facts, "problem": problem}, indent=1), encoding="utf-8")


# --- problems ------------------------------------------------------------------------------------


def _failure(name: str, error: Exception) -> str:
    resource = getattr(error, "name", None)
    if type(error).__name__ == "OutOfResources":
        needs = f"it needs {getattr(error, 'required', '?')}, the GPU has {getattr(error, 'limit', '?')}"
        return f"the kernel {name} does not fit in the {resource or 'resources'} of this GPU: {needs}"
    lines = [line.strip() for line in str(error).splitlines() if line.strip(" ^")]
    return f"the kernel {name} does not compile or run on this GPU: {type(error).__name__} {(lines or [''])[-1]:.200}"


def _require_working(device: torch.device, problem: str) -> None:
    """Raise a UserError if a kernel crashed the GPU's context, which no later operation of this process can use."""
    try:
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        raise UserError(f"{problem}; start again, and the stock blocks are used") from error


def _distance(actual: Any, expected: Any) -> float:
    """Return the largest difference of an element, relative to its magnitude plus its row's root mean square."""
    if expected is None:
        return 0.0 if actual is None else float("inf")
    if isinstance(expected, Fp8Rows):
        parts = ((actual.dequantized(), expected.dequantized()), (actual.plain, expected.plain))
        return max(_distance(*part) for part in parts)
    if isinstance(expected, Tensor):
        rows = len(expected) if expected.dim() > 1 else 1
        a, e = (values.detach().double().reshape(rows, -1) for values in (actual, expected))
        size = e.square().mean(1, keepdim=True).sqrt() + e.abs()
        return float(((a - e).abs() / size.clamp(min=1e-30)).nan_to_num(nan=torch.inf).max())
    return max(_distance(*part) for part in zip(actual, expected, strict=True))


# --- cases ---------------------------------------------------------------------------------------

Case = tuple[str, Callable[[Any], Any], float]
"""(name of the kernel, function of the operations that returns its results, largest accepted difference)."""


def cases(shape: KernelShape, device: torch.device) -> Iterator[Case]:
    """Yield a case for every kernel, with padded and with real text."""
    for lengths in (None, _LENGTHS):
        layout = make_layout(_SAMPLES, _IMAGE, _TEXT, lengths, device)
        inputs = _Inputs(shape, device)
        if not shape.fp8:
            yield from _joint_cases(inputs, layout, LIMITS[shape.dtype])
        for rows in (layout.image, layout.text):
            yield from _row_cases(inputs, layout, rows)
    if shape.fp8:
        yield from _weight_cases(inputs)


class _Inputs:
    """Draws inputs of the shape; each draw differs."""

    def __init__(self, shape: KernelShape, device: torch.device) -> None:
        self.shape = shape
        self.device = device
        self.dtype = getattr(torch, shape.dtype)
        self._generator = torch.Generator().manual_seed(0)

    def __call__(self, *sizes: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(*sizes, generator=self._generator).to(self.device, dtype or self.dtype)


def _joint_cases(inputs: _Inputs, layout: RowLayout, limit: float) -> Iterator[Case]:
    """Yield the cases of both streams together."""
    shape = inputs.shape
    count = layout.image.count + layout.text.count
    streams = tuple(inputs(rows.count, 3 * shape.width) for rows in (layout.image, layout.text))
    norms = tuple((inputs(shape.head_dim), inputs(shape.head_dim)) for _ in streams)
    for pairs in (norms, (None, None)):
        yield "join", partial(_first_rows, count, "join", (streams, pairs, shape.heads, layout)), limit
    image, text = (inputs(rows.count, shape.width) for rows in (layout.image, layout.text))
    yield "scatter_rows", partial(_first_rows, count, "scatter_rows", (image, text, layout)), limit
    leaves = [inputs(layout.capacity, shape.heads, shape.head_dim) for _ in range(3)]
    yield "attention", partial(_attention, leaves, layout, count), ATTENTION_LIMIT


def _call(name: str, arguments: tuple[Any, ...], ops: Any) -> Any:
    return getattr(ops, name)(*arguments)


def _first_rows(count: int, name: str, arguments: tuple[Any, ...], ops: Any) -> list[Tensor]:
    """Return the first rows of an operation's results; those after the last sample are undefined."""
    results = _call(name, arguments, ops)
    return [rows[:count] for rows in ([results] if isinstance(results, Tensor) else results)]


def _attention(leaves: list[Tensor], layout: RowLayout, count: int, ops: Any) -> list[Tensor]:
    """Return the attention's output and the gradients of its inputs; the reference computes in float32."""
    is_reference = ops is reference
    query, key, value = ((leaf.float() if is_reference else leaf).detach().requires_grad_() for leaf in leaves)
    output = (attend_masked if is_reference else attend)(query, key, value, layout)[:count]
    grads = torch.autograd.grad(output, (query, key, value), leaves[0][:count].to(output.dtype))
    return [output, *(grad[:count] for grad in grads)]


def _row_cases(inputs: _Inputs, layout: RowLayout, rows: Rows) -> Iterator[Case]:
    """Yield the cases of one stream: in the compute dtype, or those that round to fp8."""
    shape = inputs.shape
    count = rows.count
    width = inputs.shape.width
    limit = FP8_LIMIT if shape.fp8 else LIMITS[shape.dtype]
    kept: RowForm = "both" if shape.fp8 else "plain"
    used: RowForm = "fp8" if shape.fp8 else "plain"
    shift, scale, gate = inputs(layout.samples, 5 * width).chunk(5, dim=1)[:3]
    x, y, dh = (inputs(count, width) for _ in range(3))
    pending = (y, inputs(width, dtype=torch.float32), gate)
    u = inputs(count, 4 * width)
    dg = inputs(count, 4 * width)
    qkv = inputs(count, 3 * width)
    norms = (inputs(shape.head_dim), inputs(shape.head_dim))
    grads = tuple(inputs(layout.capacity, shape.heads, shape.head_dim) for _ in range(3))
    arguments: list[tuple[str, tuple[Any, ...]]] = [
        ("residual_norm", (x, pending, scale, shift, rows, kept)),
        ("residual_norm", (x, None, scale, shift, rows, used)),
        ("residual_norm_backward", (dh, y, x, pending, scale, rows, shift, kept)),
        ("residual_norm_backward", (dh, None, x, None, scale, rows)),
        ("gelu_backward", (dg, u, True, kept)),
        ("gelu_backward", (dg, u, False, kept)),
        ("join_backward", (grads, qkv, norms, shape.heads, rows, kept)),
        ("join_backward", (grads, qkv, None, shape.heads, rows, kept)),
        ("gather_rows", (grads[0], rows, kept)),
        ("gather_rows", (grads[0], rows, used)),
    ]
    if shape.fp8:
        arguments += [("gelu", (u, "both")), ("gelu", (u, "fp8")), ("round_rows", (u,))]
    for name, values in arguments:
        yield name, partial(_call, name, values), limit


def _weight_cases(inputs: _Inputs) -> Iterator[Case]:
    """Yield the cases of fp8 weights: their rounding, and the product with rounded rows."""
    outputs = 48
    width = 4 * inputs.shape.width
    weights = [inputs(outputs, width, dtype=torch.float32) for _ in range(3)]

    def rounded(ops: Any) -> Fp8Weight:
        shapes = ((3 * outputs, width), (width, 3 * outputs))
        empty = [torch.zeros(*sizes, device=inputs.device).to(E4M3) for sizes in shapes]
        parts = [Fp8Rows(values, torch.zeros(len(values), 1, device=inputs.device)) for values in empty]
        weight = Fp8Weight(parts[0], parts[1])
        ops.round_weight(weights, weight)
        return weight

    yield "round_weight", lambda ops: [rounded(ops).forward, rounded(ops).backward], FP8_LIMIT
    left = reference.round_rows(inputs(outputs, width))
    right = rounded(reference).forward
    assert isinstance(left, Fp8Rows)

    def product(ops: Any) -> Tensor:
        if ops is reference:
            return left.dequantized() @ right.dequantized().t()
        return multiply(left, right, None, inputs.dtype, fast_sums=True)

    yield "fp8 product", product, FP8_LIMIT
