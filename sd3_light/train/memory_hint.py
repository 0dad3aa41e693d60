"""What to change if the GPU's memory is full: the keys that this run allows, those that cost least first."""

from collections.abc import Iterator

from sd3_light.config import TrainConfig
from sd3_light.config.cross_checks import deepspeed_problem, one_process_problem, run_cross_checks
from sd3_light.core.cost import Layout
from sd3_light.cost.residence import Residence

_BATCH = "lower micro_batch_size_per_gpu (and raise gradient_accumulation_steps)"
_GRAPHS = "write cuda_graphs = false, which needs about half of a step's memory"
_CHECK = "`sd3-light check` estimates memory use"


def memory_hint(config: TrainConfig, layout: Layout, has_graphs: bool = False, residence: Residence = "stream") -> str:
    """Return what to change, given whether CUDA graphs are recorded and where the cache is."""
    keys = list(memory_savings(config, layout))
    hints = ['write cache_residence = "stream"'] if residence == "device" else []
    hints += [_GRAPHS] if has_graphs else []
    hints += [f"write {', then '.join(keys)}"] if keys else []
    hints.append(_BATCH)
    if config.parallel == "ddp" and not layout.by_deepspeed and config.pipeline_stages == 1:
        hints.append("on several GPUs, write parallel = 'fsdp2'")
    return f"{', or '.join(hints)}; {_CHECK}"


def memory_savings(config: TrainConfig, layout: Layout) -> Iterator[str]:
    """Yield keys that save memory, are not in use, and are valid for the run, as they are written in a config.

    Swapped blocks compute the same in about the same time, 8 bits round frozen weights, a released gradient is not
    clipped, and recomputing activations takes a quarter to a third of the time.
    """
    changes: dict[str, dict[str, object]] = {}
    if config.swap_blocks == 0:
        changes['swap_blocks = "all"'] = {"swap_blocks": "all"}
    if config.adapter is not None and config.adapter.base_bits == 16:
        changes["adapter.base_bits = 8"] = {"adapter": config.adapter.model_copy(update={"base_bits": 8})}
    if not config.gradient_release:
        unclipped = " with gradient_clipping = 0" if config.gradient_clipping else ""
        changes[f"gradient_release = true{unclipped}"] = {"gradient_release": True, "gradient_clipping": 0.0}
    if config.activation_checkpointing is not True:
        changes["activation_checkpointing = true"] = {"activation_checkpointing": True}
    for key, change in changes.items():
        if _problems(config.model_copy(update=change), layout) <= _problems(config, layout):
            yield key


def _problems(config: TrainConfig, layout: Layout) -> int:
    """Return how many problems a config has with these processes."""
    problems = [one_process_problem(config, layout.world_size, layout.by_deepspeed)]
    if layout.by_deepspeed:
        problems.append(deepspeed_problem(config, layout.world_size))
    faults = sum(1 for _ in run_cross_checks(config, frozenset()))
    return faults + sum(problem is not None for problem in problems)
