"""torch's own engine: one process, or data parallel under torchrun."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from sd3_light.config import TrainConfig
from sd3_light.engines.launch import Launch
from sd3_light.engines.protocol import Prepared, StepResult
from sd3_light.optim.groups import parameter_groups

MOMENTS = ("exp_avg", "exp_avg_sq")


def start_process_group(launch: Launch, device: torch.device, timeout_sec: float) -> None:
    """Join the other processes; made after the cache stage, which needs none (law 9)."""
    if launch.world > 1 and not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_sec))


class TorchEngine:
    """AdamW over float32 weights; with several processes each has a replica and gradients are averaged (DDP).

    ``module(features, label)`` returns losses with the key ``loss``; its trainable parameters are those of
    ``module.transformer``, whose names are the canonical ones.
    """

    def __init__(self, module: nn.Module, config: TrainConfig, launch: Launch, device: torch.device) -> None:
        self.rank, self.world, self.device = launch.rank, launch.world, device
        self.module = module.to(device)
        self.clip = config.gradient_clipping
        denoiser: Any = module.transformer
        self._weights = {name: p for name, p in denoiser.named_parameters() if p.requires_grad}
        assert all(weight.dtype == torch.float32 for weight in self._weights.values()), "weights learn in fp32"
        optimizer = config.optimizer
        self.optimizer = torch.optim.AdamW(
            parameter_groups(self._weights.items(), optimizer.weight_decay),
            lr=optimizer.lr,
            betas=optimizer.betas,
            eps=optimizer.eps,
            fused=device.type == "cuda",
            foreach=None if device.type == "cuda" else True,
        )
        self._run: nn.Module = self.module
        if launch.world > 1:
            ids = [device.index] if device.type == "cuda" else None
            self._run = DistributedDataParallel(self.module, device_ids=ids, gradient_as_bucket_view=True)

    @property
    def weights(self) -> Mapping[str, Tensor]:
        """The trainable float32 weights, live, by canonical name."""
        return self._weights

    def train_step(self, batches: Sequence[Prepared], lr: float) -> StepResult:
        """Forward and backward over the micro-batches, clip by the global norm, step."""
        assert len({tuple(features[0].shape) for features, _ in batches}) == 1, "micro-batches of a step must be equal"
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.zero_grad(set_to_none=True)
        totals: dict[str, Tensor] = {}
        for number, prepared in enumerate(batches):
            features, label = self._to_device(prepared)
            last = number == len(batches) - 1
            with nullcontext() if last or self.world == 1 else self._run.no_sync():  # type: ignore[operator]
                losses = self._run(features, label)
                (losses["loss"] / len(batches)).backward()
            for name, loss in losses.items():
                totals[name] = totals.get(name, torch.zeros((), device=self.device)) + loss.detach() / len(batches)
        return self._finish_step(totals)

    def _finish_step(self, totals: dict[str, Tensor]) -> StepResult:
        norm = torch.nn.utils.clip_grad_norm_(self._weights.values(), self.clip or float("inf"))
        losses = self._mean_over_ranks(totals)
        grad_norm = float(norm)
        taken = all(map(_is_finite, (*losses.values(), grad_norm)))
        if taken:
            self.optimizer.step()
        return StepResult(losses, grad_norm, taken)

    @torch.no_grad()
    def evaluate(self, batch: Prepared) -> dict[str, float]:
        """Losses of one micro-batch, the mean over ranks."""
        features, label = self._to_device(batch)
        return self._mean_over_ranks({name: loss.detach() for name, loss in self.module(features, label).items()})

    def optimizer_state(self) -> dict[str, Tensor]:
        """``exp_avg/NAME``, ``exp_avg_sq/NAME`` and ``step/NAME``; before the first step there is none."""
        state = {}
        for name, weight in self._weights.items():
            own = self.optimizer.state.get(weight, {})
            state.update({f"{kind}/{name}": own[kind] for kind in ("step", *MOMENTS) if kind in own})
        return state

    def load_optimizer_state(self, state: Mapping[str, Tensor]) -> None:
        """What `optimizer_state` gave. AdamW keeps its step on the CPU unless it is fused."""
        for name, weight in self._weights.items():
            if f"step/{name}" not in state:
                continue
            step = state[f"step/{name}"].float().reshape(())
            self.optimizer.state[weight] = {
                "step": step.to(self.device) if self.device.type == "cuda" else step.clone(),
                **{kind: state[f"{kind}/{name}"].to(self.device).reshape(weight.shape).clone() for kind in MOMENTS},
            }

    def _mean_over_ranks(self, losses: dict[str, Tensor]) -> dict[str, float]:
        values = torch.stack([loss.float() for loss in losses.values()])
        if self.world > 1:
            dist.all_reduce(values)
            values /= self.world
        return dict(zip(losses, values.tolist(), strict=True))

    def _to_device(self, prepared: Prepared) -> Prepared:
        features, label = prepared
        return tuple(map(self._move, features)), tuple(map(self._move, label))

    def _move(self, tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.to(self.device, non_blocking=True)


def _is_finite(value: float) -> bool:
    return value - value == 0
