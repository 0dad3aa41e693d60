"""Where the training cache of a run is: the choice of `cache_residence = "auto"`, equal on all ranks, and loading."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sd3_light.check.run_setup import BatchSetup, run_setup
from sd3_light.config import TrainConfig, batch_size_for
from sd3_light.core.columns import named_bucket
from sd3_light.core.cost import Cost, Layout
from sd3_light.cost.gpu_memory import CONTEXT_BYTES, gpu_memory
from sd3_light.cost.residence import FROM_HOST, ResidenceChoice, Room, choose_residence
from sd3_light.data.order import Order
from sd3_light.data.resident import CacheTooLarge, ResidentCache
from sd3_light.data.store import LocalStore
from sd3_light.data.stream import CachedDataset
from sd3_light.engines import Launch
from sd3_light.engines.feed import load_cache
from sd3_light.engines.processes import ProcessGroups
from sd3_light.runlog import info
from sd3_light.system import available_memory

_PLACES = {"stream": "streamed from its shards", "host": "in host memory", "device": "in GPU memory"}


@dataclass(frozen=True)
class TrainingProcess:
    """A process of a run: its rank, its device, the groups it belongs to, and whether DeepSpeed trains."""

    launch: Launch
    device: torch.device
    groups: ProcessGroups
    by_deepspeed: bool = False


def place_cache(
    data: CachedDataset, order: Order, config: TrainConfig, cost: Cost, process: TrainingProcess
) -> ResidentCache | None:
    """Read the cache into the memory of host or device, as the config says or as fits; None if it is streamed.

    A cache that was chosen to be in memory and does not fit after all is streamed by all ranks.
    """
    launch = process.launch
    device = process.device
    reads_data = launch.reads_data(config.pipeline_stages)
    if config.residence != "auto":
        return load_cache(data, config, launch, device) if reads_data else None
    room = room_for_cache(data, config, cost, process, config.length(order.steps_per_epoch))
    choice = _choose(data, order, config, process.groups.gathered(room))
    info(f'cache: {_PLACES[choice.residence]} (cache_residence = "auto": {choice.reason})')
    if choice.residence == "stream":
        return None
    chosen = config.model_copy(update={"cache_residence": choice.residence})
    resident = None
    problem = None
    try:
        resident = load_cache(data, chosen, launch, device) if reads_data else None
    except (CacheTooLarge, RuntimeError) as error:
        if not _is_out_of_memory(error):
            raise
        problem = str(error).partition("\n")[0]
    problem = process.groups.first_problem(problem)
    if problem is None:
        return resident
    info(f"cache: {_PLACES['stream']}, because it could not be loaded ({problem})")
    del resident
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return None


def _is_out_of_memory(error: Exception) -> bool:
    """Return whether memory did not suffice; for host memory torch raises a plain RuntimeError."""
    is_full = isinstance(error, CacheTooLarge | torch.OutOfMemoryError)
    return is_full or "can't allocate memory" in str(error)


def room_for_cache(
    data: CachedDataset, config: TrainConfig, cost: Cost, process: TrainingProcess, steps: int | None = None
) -> Room:
    """Return the memory of this process: what it has, and what ``steps`` take of it by the formula of `check`."""
    launch = process.launch
    if process.device.type != "cuda":
        return Room(None, 0, available_memory(), launch.local_world_size)
    free, total = torch.cuda.mem_get_info(process.device)
    layout = Layout(launch.world_size, process.by_deepspeed)
    accumulation = config.gradient_accumulation_steps
    setups = []
    for bucket in data.buckets:
        samples = batch_size_for(config.micro_batch_size_per_gpu, bucket.resolution)
        batches = BatchSetup(cost.tokens(named_bucket(bucket.bucket)), samples, accumulation, len(data.buckets), steps)
        setups.append(run_setup(config, cost, layout, batches))
    training = max(gpu_memory(setup).total for setup in setups)
    # other processes may use the GPU; the context of this one is part of the estimate
    return Room(min(total, free + CONTEXT_BYTES), training, available_memory(), launch.local_world_size)


def _choose(data: CachedDataset, order: Order, config: TrainConfig, rooms: Sequence[Room]) -> ResidenceChoice:
    epochs = config.length(order.steps_per_epoch) / order.steps_per_epoch
    why_not_device = FROM_HOST if config.pipeline_stages > 1 else None
    return choose_residence(data.manifest.nbytes, rooms, epochs, not isinstance(data.store, LocalStore), why_not_device)
