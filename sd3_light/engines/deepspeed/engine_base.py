"""Base class of the DeepSpeed engines: setup, and access to weights and optimizer state by canonical name."""

from collections.abc import Iterator
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor, nn

from sd3_light.config import TrainConfig
from sd3_light.core.model import TrainedModel
from sd3_light.engines.deepspeed.runtime import quiet, settings
from sd3_light.engines.deepspeed.shard_state import ShardState
from sd3_light.engines.deepspeed.stage_state import StageState
from sd3_light.engines.protocol import Engine, TensorPiece, ToHost, sum_of_squares, to_host
from sd3_light.launch import Launch
from sd3_light.optim.build import make_optimizer
from sd3_light.optim.chunks import Named, Tensors


class DeepSpeedBase(Engine):
    """The part of `Engine` that pipelines and ZeRO share.

    ``parts_group`` joins the processes that hold every weight once together; None if each process holds all of them.
    """

    state: StageState | ShardState
    parts_group: dist.ProcessGroup | None = None

    def __init__(self, module: Any, launch: Launch, device: torch.device) -> None:
        self.rank = launch.rank
        self.world_size = launch.world_size
        self.device = device
        self.module = module
        self.names: tuple[str, ...] = module.loss_names

    def _initialize(self, model: nn.Module, parameters: Named, config: TrainConfig) -> None:
        """Make the optimizer and DeepSpeed's engine for these weights."""
        assert all(weight.dtype == torch.float32 for weight in parameters.values()), "weights must be float32"
        # heads train by AdamW: their lists of layers are no blocks
        weighed = self.module.denoiser if isinstance(self.module, TrainedModel) else self.module
        self.optimizer = make_optimizer(weighed, parameters, config.optimizer, self.device)
        options = {"optimizer": self.optimizer.torch_optimizer, "config": settings(config)}
        with quiet():
            self.engine: Any = deepspeed.initialize(model=model, dist_init_required=False, **options)[0]

    def _take_state(self, state: StageState | ShardState) -> None:
        self.state = state
        self.weights = state.weights
        self.shapes = state.shapes

    def _skip_unless(self, finite: Tensor) -> None:
        """Make the optimizer's next step change nothing if ``finite`` is false, decided on the device."""
        optimizer: Any = self.optimizer.torch_optimizer
        optimizer.grad_scale = None
        optimizer.found_inf = (~finite).float()

    def weight_norm(self) -> Tensor:
        """Return the norm over all trainable weights, on the device."""
        squares = sum_of_squares(self.weights.values())
        if self.parts_group is not None:
            dist.all_reduce(squares, group=self.parts_group)
        return squares.sqrt()

    def pieces(self) -> Iterator[TensorPiece]:
        """Yield the weights, then the optimizer state of each."""
        yield from self.state.pieces()
        if self.networks is not None:
            yield from self.networks.pieces()

    def like_weights(self, kind: str, held: Tensors) -> Iterator[TensorPiece]:
        """Yield the pieces of tensors laid out like the weights."""
        return self.state.like_weights(kind, held)

    def gather(self, held: Tensors, to_host: ToHost = to_host) -> dict[str, Tensor] | None:
        """Gather tensors laid out like the weights, of all stages, in rank 0's host memory."""
        return self.state.gather(held, to_host)
