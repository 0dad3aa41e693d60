"""Host memory of whole commands, and the time of an export: interpreters, what they load, and what a proof adds. Pure.

Mapped files do not count: the kernel drops their pages when it needs them.
"""

from sd3_light.cost.amount import GIB, MIB
from sd3_light.cost.training_setup import TrainingSetup

INTERPRETER_BYTES = 3 * GIB // 10
"""A process with torch, diffusers and transformers: an export of a tiny adapter and its clean process take 0.61 GiB."""
CUDA_BYTES = GIB // 2
"""What CUDA adds to the host memory of a process, by subtraction: a LoRA of SD3.5 medium took 4.9 GiB."""
ENCODING_BYTES = 5 * GIB // 4
"""The same of `cache`, with the kernels of encoders: it took 1.5 (Wan) to 2.1 GiB (Sana) with encoders in bfloat16."""
WORKER_BYTES = 32 * MIB
"""What a worker process does not share with the one that it was forked from; four of them took 70 MiB at 128 px."""
MEASURED_CORES = 16
"""The cores behind the seconds below: proofs of 2.24 B parameters took 20 to 31 s for adapters, 72 s for a merge."""
_START_SECONDS = 12.0
_PASS_SECONDS = 2e-9  # per weight: read, cast to float32, multiplied
_ADAPTER_PASSES = 3  # the base and the adapter in the clean process, the adapter here
_MODEL_PASSES = 10  # writing, hashes, an output and the steps of an image, in both processes


def export_seconds(setup: TrainingSetup) -> float:
    """Return the duration of an export with its proof, of an adapter or of all weights."""
    passes = _MODEL_PASSES if setup.adapter is None else _ADAPTER_PASSES
    return _START_SECONDS + passes * _PASS_SECONDS * setup.cost.parameters


def export_host(setup: TrainingSetup, save_bytes: int) -> int:
    """Return the host memory that an export and its proof add to a process that trains, or that exports.

    Copies of all weights are freed before the clean process loads them.
    """
    layer = _layer(setup)
    if setup.adapter is None:
        return max(save_bytes * setup.cost.parameters + layer, clean_process(setup))
    return 12 * sum(setup.adapter) + layer + clean_process(setup)


def export_command_host(setup: TrainingSetup, save_bytes: int) -> int:
    """Return the host memory of `export`."""
    return INTERPRETER_BYTES + export_host(setup, save_bytes)


def clean_process(setup: TrainingSetup) -> int:
    """Return the memory of the process that proves an export: it maps the weights, and widens one layer at a time."""
    return INTERPRETER_BYTES + max(_layer(setup), setup.cost.table_bytes)


def _layer(setup: TrainingSetup) -> int:
    """Return the bytes of six matrices in one, as they are stored, in float32 and with their update."""
    return 60 * setup.cost.width**2


def train_host(setup: TrainingSetup, loaders: int, workers: int, export: int) -> int:
    """Return the host memory of a process that trains on a GPU, with its workers and while an export is proven.

    ``loaders`` are batches, copies for checkpoints and blocks in host memory. Random weights are drawn in float32
    before they go to the GPU; stored ones are read one by one.
    """
    one_by_one = setup.adapter is not None or setup.hosted_parameters or setup.weight_bytes == 2
    loading = 0 if one_by_one else 4 * setup.cost.parameters
    return INTERPRETER_BYTES + CUDA_BYTES + workers * WORKER_BYTES + max(loading, loaders + export)


def cache_host(encoders: int, workers: int) -> int:
    """Return the host memory of `cache` on a GPU. ``encoders`` are the weights that are converted on the host."""
    return INTERPRETER_BYTES + ENCODING_BYTES + encoders + workers * WORKER_BYTES
