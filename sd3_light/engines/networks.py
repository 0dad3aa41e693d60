"""The networks that an objective trains beside the denoiser, each by its own AdamW; every process holds all of them."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sd3_light.core.batch import Batch
from sd3_light.core.model import TrainedModel
from sd3_light.engines.protocol import TensorPiece, sum_of_squares
from sd3_light.launch import Launch
from sd3_light.optim.build import create_adamw_state

NETWORK_KIND = "network"
"""The kind under which a checkpoint stores their weights; those of optimizer state begin with it."""
STATE_KIND = "objective"
"""The kind under which a checkpoint stores the `Objective.state`."""


class Networks:
    """Trains the networks of a model's objective on the micro-batches of the denoiser's steps."""

    def __init__(self, model: TrainedModel, launch: Launch, device: torch.device) -> None:
        self._model = model
        self._launch = launch
        self._networks = model.objective.networks
        self._weights: dict[str, dict[str, torch.nn.Parameter]] = {}
        self._optimizers: dict[str, torch.optim.AdamW] = {}
        self._gradients: dict[str, list[Tensor]] = {}
        for name, network in self._networks.items():
            named = dict(network.module.to(device).named_parameters())
            assert all(weight.dtype == torch.float32 for weight in named.values()), f"{name} must be float32"
            self._weights[name] = named
            self._optimizers[name] = torch.optim.AdamW(
                named.values(), lr=network.lr, betas=network.betas, weight_decay=network.weight_decay, fused=True
            )
            network.module.requires_grad_(False)  # the denoiser's loss does not train it
            for weight in named.values():
                create_adamw_state(self._optimizers[name], weight)

    def _due(self) -> list[str]:
        step = self._model.step + 1
        return [name for name, network in self._networks.items() if step % network.every == 0]

    def accumulate(self, batch: Batch, count: int) -> None:
        """Add the gradients of one of a step's ``count`` micro-batches, if the step trains a network."""
        due = self._due()
        for name in due:
            self._networks[name].module.requires_grad_(True)
        each = self._model.objective.network_losses(self._model, batch) if due else {}
        for name in due:
            weights = list(self._weights[name].values())
            gradients = torch.autograd.grad(each[name].mean() / count, weights, retain_graph=name != due[-1])
            earlier = self._gradients.get(name)
            self._gradients[name] = list(gradients if earlier is None else torch._foreach_add(earlier, gradients))
        for name in due:
            self._networks[name].module.requires_grad_(False)

    def step(self) -> None:
        """Update the networks that the step trains with their mean gradients; not where one is not finite."""
        for name, gradients in self._gradients.items():
            for gradient in gradients if self._launch.world_size > 1 else ():
                dist.all_reduce(gradient)
            for weight, gradient in zip(self._weights[name].values(), gradients, strict=True):
                weight.grad = gradient / self._launch.world_size
            optimizer: Any = self._optimizers[name]
            optimizer.grad_scale = None
            optimizer.found_inf = (~torch.isfinite(sum_of_squares(gradients))).float()
            optimizer.step()
            optimizer.zero_grad()
        self._gradients.clear()

    def weights(self) -> Iterator[TensorPiece]:
        """Yield the weights; rank 0 writes them."""
        for name, named in self._weights.items():
            for key, weight in named.items():
                yield self._piece(f"{NETWORK_KIND}/{name}.{key}", weight)

    def pieces(self) -> Iterator[TensorPiece]:
        """Yield the weights, then the optimizer state of each, then the state of the objective."""
        yield from self.weights()
        for name, named in self._weights.items():
            for key, weight in named.items():
                for kind, value in self._optimizers[name].state[weight].items():
                    yield self._piece(f"{NETWORK_KIND}.{kind}/{name}.{key}", value)
        for name, value in self._model.objective.state.items():
            yield self._piece(f"{STATE_KIND}/{name}", value)

    def _piece(self, name: str, value: Tensor) -> TensorPiece:
        return TensorPiece(name, value.detach().view(-1), 0, value.shape, writes=self._launch.rank == 0)
