"""Initialize DeepSpeed quietly, without compiling kernels, on the existing processes; and its settings."""

import contextlib
import importlib
import logging
import os
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from sd3_light.config import TrainConfig
from sd3_light.engines.processes import open_default_group
from sd3_light.launch import Launch

BUCKET = 50_000_000
"""Elements per reduction or gather: 200 MB."""

MAX_LIVE = 4 * BUCKET
"""Elements that ZeRO-3 may hold gathered; its default is a billion, 4 GB on every GPU."""


def prepare(launch: Launch, device: torch.device) -> None:
    """Import DeepSpeed and give it the process group; a single process gets its own."""
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    for call in ("all_gather_into_tensor", "reduce_scatter_tensor"):  # deprecated names in newer torch
        warnings.filterwarnings("ignore", f".*{call}", FutureWarning)
    os.environ.setdefault("LOCAL_RANK", str(launch.local_rank))  # the pipeline reads it, also under plain python
    with quiet():
        library: Any = importlib.import_module("deepspeed")
        # on a CPU it would spend a minute compiling a shared-memory kernel; we use none of its kernels
        importlib.import_module("deepspeed.ops").__compatible_ops__ = {}  # type: ignore[attr-defined]
        # an earlier engine of this process may have left its topology
        importlib.import_module("deepspeed.utils.groups").mpu = None  # type: ignore[attr-defined]
        if launch.world_size == 1:
            store = dist.HashStore()  # type: ignore[attr-defined]
            open_default_group("nccl" if device.type == "cuda" else "gloo", store=store, rank=0, world_size=1)
        library.init_distributed(dist_init_required=False, verbose=False)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppress DeepSpeed's prints and hints, but not its errors."""
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    with open(os.devnull, "w", encoding="utf-8") as nowhere, contextlib.redirect_stdout(nowhere):
        yield
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)  # its import resets the level


def settings(config: TrainConfig) -> dict[str, Any]:
    """Return DeepSpeed's configuration for a run.

    Weights stay float32 and bf16 comes from autocast, as in the torch engine: both give the same numbers, every weight
    is its own master copy, and gradients are summed in float32. The learning rate is set before each step.
    """
    zero = config.zero_stage
    return {
        # DeepSpeed only uses its ratio to the batch: real micro-batch sizes differ by resolution
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": config.gradient_accumulation_steps,
        "steps_per_print": 2**31 - 1,
        # without ZeRO it would clip by the norm of one stage: see `PipelineEngine`
        "gradient_clipping": config.gradient_clipping if zero else 0.0,
        "communication_data_type": "fp32",
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": zero,
            "contiguous_gradients": zero > 1,
            "overlap_comm": False,
            "reduce_bucket_size": BUCKET,
            "allgather_bucket_size": BUCKET,
            # weights exist only as shards, which may change between steps; gathered weights are freed after use
            "stage3_param_persistence_threshold": 0,
            "stage3_max_reuse_distance": 0,
            "stage3_max_live_parameters": MAX_LIVE,
            "stage3_prefetch_bucket_size": BUCKET,
        },
        "pipeline": {"use_reentrant": False},
        "timers": {"throughput": {"enabled": False}},
    }
