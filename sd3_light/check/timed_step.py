"""The process that times a training step: the real layers with random weights, one block of each kind.

It runs as a script, so that `check` and `new` import no torch. The request says what to train on; the time is printed.
"""

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import filter as matching
from typing import Any

import torch
from torch import nn

from sd3_light.check import verb as check
from sd3_light.check.denoiser_count import keep_of_each
from sd3_light.config import TrainConfig
from sd3_light.core.batch import LENGTH, Batch
from sd3_light.core.columns import MASK, Bucket
from sd3_light.core.model import denoiser_blocks, of_denoiser
from sd3_light.core.registry import family_of
from sd3_light.core.start import WeightsStart
from sd3_light.engines.cpu_threads import use_training_threads
from sd3_light.engines.torch import TorchEngine
from sd3_light.export.trainable import freeze, put_adapter
from sd3_light.launch import Launch
from sd3_light.optim.ema import Averages

_CPU = torch.device("cpu")
_REPEATS = 3


def step_seconds(config: TrainConfig, start: WeightsStart, batch: Batch, whole: bool) -> float:
    """Return the time of a step of one micro-batch: of the ``whole`` denoiser, or extrapolated by its depth."""
    family = family_of(config.model)
    denoiser = family.weights.empty(start.size.transformer_config())
    count = len(denoiser_blocks(denoiser))
    kinds = list(range(count)) if whole else keep_of_each(denoiser, 1)[1]
    _fill(denoiser.float().train())
    if config.adapter is None:
        names = [name for name, _ in denoiser.named_parameters()]
        freeze(denoiser, [pattern for pattern in config.freeze if matching(names, pattern)])
    else:
        put_adapter(denoiser.requires_grad_(False), config.adapter, config.seed)
    model = family.training.model(denoiser, config, False)
    engine = TorchEngine(model, config, Launch(), _CPU)
    averages = Averages(of_denoiser(engine.weights), config.ema)
    blocks = denoiser_blocks(denoiser)
    times = []
    for repeat in range(_REPEATS + 1):
        with _timing(model, *blocks) as seconds:
            started = time.perf_counter()
            engine.train_step([batch], 1e-6)
            averages.update(of_denoiser(engine.weights), config.ema.update_every)
            step = time.perf_counter() - started
        if repeat:  # the first one also allocates memory
            missing = sum((kinds.count(kind) - 1) * seconds[block] for kind, block in enumerate(blocks))
            times.append(step * (1 + missing / seconds[model]))
    return sorted(times)[_REPEATS // 2]


def _fill(denoiser: nn.Module) -> None:
    """Give the weights memory and small values: speed does not depend on them unless they are not finite."""
    denoiser.to_empty(device="cpu")
    with torch.no_grad():
        for weight in denoiser.parameters():
            weight.fill_(1 / max(weight.shape, default=1))
        for buffer in denoiser.buffers():
            buffer.zero_()


@contextmanager
def _timing(*modules: nn.Module) -> Iterator[dict[nn.Module, float]]:
    """Yield the times of the modules' first forward passes in the block; later ones compute activations again."""
    begun: dict[nn.Module, float] = {}
    seconds: dict[nn.Module, float] = {}

    def begin(module: nn.Module, _: Any) -> None:
        begun.setdefault(module, time.perf_counter())

    def end(module: nn.Module, *_: Any) -> None:
        seconds.setdefault(module, time.perf_counter() - begun[module])

    handles = [module.register_forward_pre_hook(begin) for module in modules]
    handles += [module.register_forward_hook(end) for module in modules]
    try:
        yield seconds
    finally:
        for handle in handles:
            handle.remove()


def made_up_batch(config: TrainConfig, bucket: Bucket, samples: int) -> Batch:
    """Return a micro-batch with the shapes of a bucket and captions of full length."""
    model = config.model
    family = family_of(model)
    values = {"t": torch.full((samples,), 0.5)}
    host = {}
    for column in family.prepared_columns(model, family.columns(model, model.diffusers_path, bucket)):
        if column.reads == MASK:
            continue
        values[column.name] = torch.full((samples, *column.shape), 0.1, dtype=getattr(torch, column.dtype))
        if column.ragged:
            host[column.name + LENGTH] = torch.full((samples,), column.shape[0])
    return Batch(samples, values, host)


def main(request: dict[str, Any]) -> float:
    """Return the time of the step that a request describes."""
    use_training_threads(request["flops"], 1)
    loaded = check.load(request["config"], request["overrides"])
    batch = made_up_batch(loaded.train, Bucket(*request["bucket"]), request["samples"])
    return step_seconds(loaded.train, check.require(loaded), batch, request["whole"])


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
