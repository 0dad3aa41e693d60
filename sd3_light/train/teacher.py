"""The teacher of an objective: the start of the run, its average, or another model of the family.

A copy is whole in every process, also where the trained weights are sharded. It is frozen, in the compute dtype, and
runs the stock blocks.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sd3_light.config import TrainConfig, UserError
from sd3_light.core.batch import Batch
from sd3_light.core.model import TrainedModel
from sd3_light.core.objective import Prediction
from sd3_light.core.registry import family_of
from sd3_light.engines.protocol import Engine
from sd3_light.export.of_run import model_config
from sd3_light.export.trainable import frozen_dtype
from sd3_light.model.adapter_layers import without_adapter
from sd3_light.model.block_swap import trained_blocks
from sd3_light.model.loading import StoredWeights, kept_in_float32, read_weights
from sd3_light.optim.ema import MAIN_TRACK, Averages

_INPUTS = ("in_channels", "joint_attention_dim", "pooled_projection_dim", "caption_channels")
"""What a denoiser's config says about its inputs, in one family or another."""


def load_teacher(model: TrainedModel, config: TrainConfig, device: torch.device) -> None:
    """Give the model its objective's teacher, unless that is the average, and its start if that is kept.

    Call it before the engine is made.
    """
    teacher = model.objective.teacher
    if config.adapter is not None:
        model.start = partial(start_of_adapter, model)
    elif model.objective.keeps_start or teacher == "start":
        model.start = _copy_of_start(model, config, device)
    if teacher == "start":
        model.teacher = model.start
    elif isinstance(teacher, Path):
        denoiser, stored = _open_folder(model, config, teacher)
        read_weights(denoiser, stored, frozen_dtype(config, device), device)
        model.teacher = _frozen(denoiser, config, device)


def _copy_of_start(
    model: TrainedModel, config: TrainConfig, device: torch.device
) -> Callable[[Batch, Sequence[int]], Prediction]:
    """Return the prediction of a copy of the weights, in the compute dtype."""
    if trained_blocks(model.denoiser) is not None:
        raise UserError("the objective compares with the start of weights that are swapped; write swap_blocks = 0")
    dtype = frozen_dtype(config, device)
    parameters = dict(model.denoiser.named_parameters())
    whole = kept_in_float32(model.denoiser)
    state = {
        name: tensor.detach().to(device, dtype if name in parameters and not whole(name) else None, copy=True)
        for name, tensor in model.denoiser.state_dict().items()
    }
    return _frozen(family_of(config.model).weights.from_state(model_config(model.denoiser), state), config, device)


def _frozen(
    denoiser: nn.Module, config: TrainConfig, device: torch.device
) -> Callable[[Batch, Sequence[int]], Prediction]:
    """Return the prediction of another denoiser, which runs the stock blocks."""
    training = family_of(config.model).training
    return training.model(denoiser.requires_grad_(False), config, fast=False).to(device).infer


def text_of_guidance(config: TrainConfig, empty: Mapping[str, Tensor]) -> Callable[[Batch], Batch]:
    """Return what replaces a batch's text by that of guidance without a prompt, given the cached empty caption."""
    sampling = family_of(config.model).sampling
    text = sampling.text(empty)
    negative = sampling.negative_text(text, config.model)
    one = sampling.batch([text if negative is None else negative], config.model, 1.0)
    values = {name: value for name, value in one.values.items() if name != "guidance"}

    def without_text(batch: Batch) -> Batch:
        device = batch["t"].device
        for name, value in values.items():  # copied once
            values[name] = value.to(device)
        rows = {name: value.expand(batch.size, *value.shape[1:]) for name, value in values.items()}
        host = {name: value.expand(batch.size, *value.shape[1:]) for name, value in one.host.items()}
        return replace(batch.with_values(rows), host={**batch.host, **host})

    return without_text


def teach_by_average(model: TrainedModel, engine: Engine, averages: Averages) -> None:
    """Make the run's main average the model's teacher, if its objective wants that."""
    if model.objective.teacher != "average":
        return
    if MAIN_TRACK not in averages.tracks:
        raise UserError("the objective's teacher is the run's average, and there is none; write ema.enable = true")

    swap = ExitStack()
    is_in_place = False  # it stays in place of the weights between the passes of a batch that is drawn

    def teach(batch: Batch, taps: Sequence[int]) -> Prediction:
        nonlocal is_in_place
        if not is_in_place:
            swap.enter_context(averages.in_place_of(MAIN_TRACK, engine.weights))
            is_in_place = True
        try:
            return model.infer_in_place(batch, taps)
        finally:
            if not model.is_drawing:
                leave()

    def leave() -> None:
        nonlocal is_in_place
        is_in_place = False
        swap.close()

    model.teacher = teach
    model.restore = leave


def start_of_adapter(model: TrainedModel, batch: Batch, taps: Sequence[int]) -> Prediction:
    """Return the prediction of the denoiser without its adapter."""
    with without_adapter(model.denoiser):
        return model.infer(batch, taps)


def _open_folder(model: TrainedModel, config: TrainConfig, folder: Path) -> tuple[nn.Module, StoredWeights]:
    weights = family_of(config.model).weights
    start = weights.start(config.model.model_copy(update={"init": folder, "size": None, "shape": None}))
    denoiser, stored = weights.unread(start)
    own: Any = model.denoiser.config
    other: Any = denoiser.config
    for name in _INPUTS:
        if own.get(name) != other.get(name):
            raise UserError(
                f"the teacher in {folder} has {name} = {other.get(name)} and the model {own.get(name)}; give a model "
                "with the same VAE and text encoders"
            )
    return denoiser, stored
