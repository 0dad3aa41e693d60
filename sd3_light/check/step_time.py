"""The speed of training on this machine's CPU: a few steps of the real layers, timed in another process."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from sd3_light.check.estimate import BucketEstimate, RunEstimate
from sd3_light.config import LoadedConfig, TrainConfig
from sd3_light.core.columns import Bucket
from sd3_light.cost.throughput import CPU_CORE_FLOPS
from sd3_light.cost.training_flops import training_flops
from sd3_light.system import available_memory, usable_cores

_SMALL = 20_000_000  # parameters of a denoiser that is timed as a whole
_KINDS = 3  # of blocks, at most: one of each is timed
_STEP_SECONDS = 0.5  # of a timed step, at an assumed speed
_SIDES = (512, 256, 128)  # of smaller images, where the run's own take longer
_MOST_BYTES = 3 << 30
_TIMEOUT_SECONDS = 120


def cpu_speed(
    loaded: LoadedConfig, overrides: Sequence[str], estimate: RunEstimate, micro_batch: int | None = None
) -> float | None:
    """Return the FLOP/s that a run reaches here, by `RunEstimate.run_flops`; None if they are not measured.

    ``overrides`` are those of ``loaded``, ``micro_batch`` replaces its own.

    No weight is read. A denoiser of many blocks is timed with one of each kind, large batches with fewer samples and
    large images with smaller ones. It is not measured if even that takes too much time or memory, or cannot run.
    """
    size = _timed_size(loaded.train, estimate, micro_batch)
    if size is None:
        return None
    bucket, samples, flops = size
    request = {
        "config": str(loaded.path),
        "overrides": [*overrides],
        "bucket": [bucket.width, bucket.height, bucket.frames],
        "samples": samples,
        "whole": _is_small(estimate),
        "flops": flops,
    }
    program = Path(__file__).with_name("timed_step.py")
    command = [sys.executable, "-P", str(program), json.dumps(request)]
    try:
        process = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired:
        return None
    return None if process.returncode else flops / float(json.loads(process.stdout.splitlines()[-1]))


def _is_small(estimate: RunEstimate) -> bool:
    return estimate.setup.cost.parameters <= _SMALL


def _timed_size(train: TrainConfig, estimate: RunEstimate, micro_batch: int | None) -> tuple[Bucket, int, int] | None:
    """Return the bucket and the samples of a step that is timed, and the FLOPs of that step with all blocks."""
    cost = estimate.setup.cost
    share = 1.0 if _is_small(estimate) else min(1.0, _KINDS / cost.num_blocks)
    weights = share * cost.parameters * (4 if train.adapter is not None else 16)
    if weights > min(_MOST_BYTES, (available_memory() or _MOST_BYTES) / 2):
        return None
    affordable = _STEP_SECONDS * CPU_CORE_FLOPS * usable_cores() / share
    usual = max(estimate.data.rows, key=lambda row: row.samples)
    for bucket in (usual.bucket, *(Bucket(side, side) for side in _SIDES if side**2 < usual.bucket.area)):
        flops = _sample_flops(train, estimate, usual, bucket)
        samples = min(micro_batch or usual.micro_batch, int(affordable / flops))
        if samples:
            return bucket, samples, samples * flops
    return None


def _sample_flops(train: TrainConfig, estimate: RunEstimate, row: BucketEstimate, bucket: Bucket) -> int:
    if bucket == row.bucket:
        return row.step_flops.value // row.global_batch
    cost = estimate.setup.cost
    adapter = train.adapter is not None
    return training_flops(cost, cost.tokens(bucket), train.activation_checkpointing, adapter, train.terms).value
