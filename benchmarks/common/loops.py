"""Settings, random batches and training steps that `step.py` measures."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from diffusers import SD3Transformer2DModel
from torch import Tensor, nn

from common.caches import t5_lengths
from sd3_light.config import ModelSize
from sd3_light.core.compiling import compile_blocks
from sd3_light.core.cost import Tokens
from sd3_light.cost.training_flops import step_flops
from sd3_light.families.sd3.cost import SD3Cost, image_tokens
from sd3_light.families.sd3.fast.block import BlockOptions
from sd3_light.families.sd3.fast.forward import FastDenoiser
from sd3_light.families.sd3.layers import unpatchify
from sd3_light.flow.objective import flow_loss

NUM_BATCHES = 4
"""Number of batches that steps cycle through, so that lengths and buckets change from step to step."""
CLIP_TOKENS, T5_TOKENS = 77, 256
SQUARE = ((256, 256),)


@dataclass(frozen=True)
class Row:
    """Settings of one line. ``step`` is the kind of step; ``sides`` are image sizes, one bucket per batch."""

    step: str
    batch: int
    text: str = "padded"
    sides: tuple[tuple[int, int], ...] = SQUARE
    optimizer: str = "folded"
    size: str = "sd3_light"
    qk_norm: bool = True
    options: BlockOptions = field(default_factory=BlockOptions)
    batches: int = NUM_BATCHES
    steps: int | None = None


# --- batches -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Batch:
    """A prepared micro-batch on the device, with its real text lengths on the host."""

    features: tuple[Tensor, ...]
    target: Tensor
    lengths: list[int] | None

    def text_tokens(self) -> list[int]:
        """Return the text tokens of each sample."""
        return self.lengths or [self.features[2].shape[1]] * len(self.target)


def real_lengths(count: int, rng: np.random.Generator) -> list[int]:
    """Draw text tokens of typical captions: those of T5, and as many of CLIP, at most 77. No text is dropped."""
    t5 = t5_lengths(count, T5_TOKENS, rng)
    return (t5 + np.minimum(t5, CLIP_TOKENS)).tolist()  # type: ignore[no-any-return]


def batches(row: Row, size: ModelSize, device: torch.device) -> list[Batch]:
    """Return random batches of the right shapes."""
    rng, made = np.random.default_rng(0), []
    for number in range(row.batches):
        width, height = row.sides[number % len(row.sides)]
        latent = (row.batch, size.latent_channels, height // 8, width // 8)
        lengths = real_lengths(row.batch, rng) if row.text == "real" else None
        longest = CLIP_TOKENS + T5_TOKENS if lengths is None else max(lengths)
        prompt = torch.randn(row.batch, longest, size.text_width, device=device, dtype=torch.bfloat16)
        pooled = torch.randn(row.batch, size.pooled_width, device=device, dtype=torch.bfloat16)
        noisy, target = (torch.randn(latent, device=device) for _ in range(2))
        made.append(Batch((noisy, 1000 * torch.rand(row.batch, device=device), prompt, pooled), target, lengths))
    return made


def flops(row: Row, size: ModelSize, batch: Batch) -> int:
    """Return the FLOPs of a step on this batch."""
    height, width = batch.target.shape[-2:]
    tokens = (Tokens(image_tokens(8 * width, 8 * height), text) for text in batch.text_tokens())
    return step_flops(SD3Cost(size), Counter(tokens))


# --- steps -------------------------------------------------------------------------------------

Step = Callable[[Batch], Tensor]


def autocast(device: torch.device) -> Any:
    """Return a bf16 autocast context on GPUs."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


def plain_step(row: Row, model: SD3Transformer2DModel, device: torch.device) -> Step:
    """The straightforward loop: stock model, autocast, mean squared error, clipping, AdamW."""
    if row.options.keep == "inputs":
        model.train()
        model.enable_gradient_checkpointing()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01)

    def step(batch: Batch) -> Tensor:
        noisy, times, prompt, pooled = batch.features
        if device.type == "cpu":
            prompt, pooled = prompt.float(), pooled.float()
        with autocast(device):
            velocity = model(
                hidden_states=noisy, timestep=times, encoder_hidden_states=prompt, pooled_projections=pooled
            ).sample
            loss = nn.functional.mse_loss(velocity.float(), batch.target)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def make_optimizer(model: SD3Transformer2DModel, kind: str) -> Callable[[], None]:
    """Return a function that clips by the global norm and steps. ``folded``: the AdamW kernel scales the gradients."""
    parameters = list(model.parameters())
    options = {"lr": 1e-4, "weight_decay": 0.01, "fused": True, "capturable": parameters[0].is_cuda}
    optimizer: Any = torch.optim.AdamW(parameters, **options)

    def step() -> None:
        grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
        assert len(grads) == len(parameters)
        norm = torch.stack(torch._foreach_norm(grads)).square().sum().sqrt()
        optimizer.found_inf = (~torch.isfinite(norm)).float()
        if kind == "folded":
            optimizer.grad_scale = torch.clamp(norm + 1e-6, min=1.0)
        else:
            torch._foreach_mul_(grads, torch.clamp(1.0 / (norm + 1e-6), max=1.0))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def compiled_step(row: Row, model: SD3Transformer2DModel, device: torch.device) -> Step:
    """A step of the stock model with compiled blocks."""
    compile_blocks(model)
    update = make_optimizer(model, row.optimizer)

    def step(batch: Batch) -> Tensor:
        noisy, times, prompt, pooled = batch.features
        with autocast(device):
            velocity = model(noisy, prompt.float(), pooled.float(), times, return_dict=False)[0]
        loss = flow_loss(velocity, batch.target).mean()
        loss.backward()
        update()
        return loss.detach()

    return step


def fast_step(row: Row, model: SD3Transformer2DModel, device: torch.device) -> Step:
    """A step with the fast blocks."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    denoiser = FastDenoiser(model, dtype, row.options)
    update = make_optimizer(model, row.optimizer)

    def step(batch: Batch) -> Tensor:
        features = tuple(feature.to(dtype) if index == 2 else feature for index, feature in enumerate(batch.features))
        patches = denoiser(features, batch.lengths)
        loss = flow_loss(unpatchify(patches, *batch.target.shape[-2:]), batch.target).mean()
        loss.backward()
        update()
        return loss.detach()

    return step


def make_step(row: Row, size: ModelSize, device: torch.device) -> Step:
    """Build the model on the device and return its step."""
    with torch.device(device):
        model = SD3Transformer2DModel(**size.transformer_config())
    if row.step == "plain":
        return plain_step(row, model, device)
    make = compiled_step if row.step == "compiled" else fast_step
    return make(row, model, device)
