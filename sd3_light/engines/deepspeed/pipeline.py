"""DeepSpeed's pipeline over the list of layers: stages times data parallel, ZeRO 0 or 1."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.pipe import PipelineModule
from deepspeed.runtime import utils as partitions
from deepspeed.utils.timer import NoopTimer
from torch import Tensor, nn

from sd3_light.config import TrainConfig
from sd3_light.config.faults import UserError
from sd3_light.engines.deepspeed.base import DeepSpeedBase
from sd3_light.engines.deepspeed.instructions import instructions
from sd3_light.engines.deepspeed.setup import quiet, settings
from sd3_light.engines.deepspeed.stage_state import PipelineGrid, StageState
from sd3_light.engines.launch import Launch
from sd3_light.engines.prefetch import to_device
from sd3_light.engines.protocol import MicroBatch, StepResult
from sd3_light.flow.bands import NUM_BANDS, sum_by_band
from sd3_light.optim.build import make_optimizer


class _Stages(PipelineModule):
    """The layers of one stage, cut as the config says and without telling about it.

    Where there is only one stage ``whole()`` runs all layers, whatever DeepSpeed hands in.
    """

    def __init__(self, layers: Sequence[nn.Module], config: TrainConfig, loss: Any, whole: Callable[[], Any]) -> None:
        self._config, self._whole = config, whole
        with quiet():
            super().__init__(layers=list(layers), num_stages=config.pipeline_stages, loss_fn=loss)

    def forward(self, state: Any) -> Any:
        """What the last layer of the stage gives."""
        return self._whole() if self.num_stages == 1 else super().forward(state)

    def _partition_layers(self, method: str = "") -> None:
        method, stages = self._config.partition_method, self._config.pipeline_stages
        count = len(self._layer_specs)
        if method == "manual":
            self.parts = [0, *self._config.partition_split, count]
        elif method == "uniform":
            self.parts = partitions.partition_uniform(count, stages)
        else:
            self.parts = partitions.partition_balanced(self._count_layer_params(), stages)
        for number, (start, stop) in enumerate(pairwise(self.parts)):
            if not sum(self._count_layer_params()[start:stop]):
                raise UserError(
                    f"pipeline stage {number} (layers {start} to {stop - 1}) would have nothing to train; lower "
                    "pipeline_stages, choose another partition_method, or freeze less"
                )
        stage = self._topo.get_coord(self.global_rank).pipe
        self._set_bounds(start=self.parts[stage], stop=self.parts[stage + 1])


class PipelineEngine(DeepSpeedBase[StageState]):
    """Steps over float32 weights, each process holding one stage of the model.

    ``module`` is a `SD3TrainingModule`: its layers are cut, and its losses are computed by the last stage, from
    where they reach all. One stage alone runs the module as torch's engine does. All processes of a pipeline are given
    the same micro-batches; the first stage takes their features and the last their labels, so nothing of them is sent.
    A step whose loss or gradient is not finite is not taken.
    """

    def __init__(
        self, module: nn.Module, config: TrainConfig, launch: Launch, device: torch.device, writers: int = 1
    ) -> None:
        self.rank, self.world, self.device = launch.rank, launch.world, device
        self.grid = PipelineGrid(launch.rank, config.pipeline_stages, launch.world // config.pipeline_stages)
        self.sequential_micro_batches = self.grid.stages == 1
        self.module = _any(module)
        self.names: tuple[str, ...] = self.module.loss_names
        self.clip = config.gradient_clipping
        self.eval_pieces = config.eval_gradient_accumulation_steps if self.grid.stages > 1 else 1
        names = {
            id(weight): name for name, weight in self.module.transformer.named_parameters() if weight.requires_grad
        }
        stages = _Stages(self.module.pipeline_layers(), config, self._loss, self._whole)
        parameters = {names[id(weight)]: weight for weight in stages.parameters() if weight.requires_grad}
        assert all(weight.dtype == torch.float32 for weight in parameters.values()), "weights learn in fp32"
        self.optimizer = make_optimizer(parameters, config.optimizer, device)
        with quiet():
            self.engine: Any = deepspeed.initialize(
                model=stages,
                optimizer=self.optimizer.torch_optimizer,
                config=settings(config),
                dist_init_required=False,
            )[0]
        self.engine.timers = NoopTimer()  # they would collect events that nobody reads
        self.engine._INSTRUCTION_MAP = instructions(self.engine, self._before_reduction, self._step)
        if config.zero_stage:
            self.engine.optimizer.scaled_global_norm = self._zero_norm
        self.pipe = self.engine.mpu.get_pipe_parallel_group() if self.grid.stages > 1 else None
        self.state = self._state(stages, parameters, names, config.zero_stage, writers)
        self.writers = self.state.writers
        self._features: deque[tuple[Tensor, ...]] = deque()
        self._labels: deque[tuple[Tensor, tuple[Tensor | None, ...]]] = deque()
        self._purpose = self._learn
        self._share = 1.0

    def _state(
        self,
        stages: _Stages,
        parameters: Mapping[str, nn.Parameter],
        names: Mapping[int, str],
        zero_stage: int,
        writers: int,
    ) -> StageState:
        """What this process holds; the layers of other stages are let go."""
        stage_of, shapes = {}, {}
        for index, layer in enumerate(stages._layer_specs):
            for weight in layer.parameters():
                if weight.requires_grad:
                    stage_of[names[id(weight)]] = stages.stage_owner(index)
                    shapes[names[id(weight)]] = tuple(weight.shape)
        for index, layer in enumerate(stages._layer_specs):
            if stages.stage_owner(index) != self.grid.stage:
                layer.to("meta")
        zero = self.engine.optimizer if zero_stage else None
        everybody = self.grid.stages > 1 or zero is not None
        return StageState(
            self.grid,
            parameters,
            stage_of,
            shapes,
            self.optimizer.torch_optimizer,
            zero,
            self.world if everybody else writers,
        )

    # --- steps ---------------------------------------------------------------------------------

    def train_step(self, batches: Sequence[MicroBatch], lr: float) -> StepResult:
        """The micro-batches through the pipeline and back, then a step clipped by the norm over all stages."""
        self.optimizer.set_rate(lr)
        self._numbers = torch.zeros(len(self.names) + 2 * NUM_BANDS, device=self.device)
        self._purpose, self._share = self._learn, 1 / len(batches)
        self.engine.reset_activation_shape()
        self.engine.train_batch(self._feed(batches))
        return StepResult(self.names, self._numbers)

    def _feed(self, batches: Sequence[MicroBatch]) -> Iterator[tuple[tuple[Tensor, ...], Tensor]]:
        """Micro-batches as DeepSpeed takes them: on the device, or it would wait for its end to copy them.

        Labels wait here, as its own cannot be without a mask, and so do the features of a stage that is alone, which
        it would copy twice. Those of a first stage of several are its copies: they must outlast other micro-batches.
        """
        first, last = self.grid.stage == 0, self.grid.stage == self.grid.stages - 1
        shapes = set()
        for features, label in batches if self.sequential_micro_batches else _even(batches):
            shapes.add(tuple(features[0].shape))
            assert len(shapes) == 1, "micro-batches of a step must be equal"
            mine, label = to_device((features if first else features[1:2], label), self.device)
            times = mine[1] if first else mine[0]
            if last:
                self._labels.append((times, label))
            if self.sequential_micro_batches:
                self._features.append(mine)
            whole = first and not last
            yield tuple(part.to(self.device, non_blocking=True) for part in mine) if whole else (times,), times

    def _whole(self) -> Any:
        """All layers, for the micro-batch whose turn it is."""
        return self.module.run(self._features.popleft())

    def _loss(self, outputs: tuple[Tensor, ...], _: object) -> Tensor:
        """Called on the last stage, for each micro-batch in its turn."""
        times, label = self._labels.popleft()
        return self._purpose(outputs, times, label)

    def _learn(self, outputs: tuple[Tensor, ...], times: Tensor, label: tuple[Tensor | None, ...]) -> Tensor:
        losses: dict[str, Tensor] = dict(self.module.losses(outputs, label))
        bands = sum_by_band(losses.pop("each"), times / 1000)
        self._numbers += StepResult.pack({name: losses[name] for name in self.names}, bands) * self._share
        return losses["loss"]

    def _before_reduction(self) -> None:
        missing = [name for name, weight in self.state.parameters.items() if weight.grad is None]
        assert not missing, f"no gradient reached {missing[:3]}"  # DeepSpeed would make it zero, and decay the weight

    def _step(self, take: Any) -> None:
        """Take the step if it is finite. The last stage's numbers reach all others first."""
        self._numbers = self.sum_over_ranks(self._numbers) / self.grid.replicas
        self._finite = torch.isfinite(self._numbers[: len(self.names)]).all()
        if self.state.zero is None:
            self._clip()
        take()
        self._numbers = torch.cat([self._numbers, self._norm.float().view(1), self._finite.float().view(1)])

    def _clip(self) -> None:
        """Without ZeRO: scale all gradients down to the limit."""
        grads: Any = [weight.grad for weight in self.state.parameters.values()]
        norm = self._judge_norm(torch.stack(torch._foreach_norm(grads)).square().sum())
        if self.clip:
            torch._foreach_mul_(grads, torch.clamp(self.clip / (norm + 1e-6), max=1.0))

    def _zero_norm(self) -> Tensor:
        """The norm of all gradients together, by which ZeRO clips.

        Its own way is a sum over the stages for each group of weights, which hangs or adds up different groups where
        stages have other numbers of them: embeddings do not decay.
        """
        grads = [grad for group in self.engine.optimizer.averaged_gradients.values() for grad in group]
        return self._judge_norm(self.sum_over_ranks(torch.stack(torch._foreach_norm(grads)).square().sum()))

    def _judge_norm(self, squares: Tensor) -> Tensor:
        """The norm; a step with one that is not finite, or with such a loss, will not be taken."""
        self._norm = squares.sqrt()
        self._finite = self._finite & torch.isfinite(self._norm)
        optimizer: Any = self.optimizer.torch_optimizer
        optimizer.grad_scale, optimizer.found_inf = None, (~self._finite).float()
        return self._norm

    def weight_norm(self) -> float:
        """The norm over all trainable weights."""
        return self.state.norm(self.pipe)

    # --- without learning ----------------------------------------------------------------------

    @torch.no_grad()
    def evaluate(self, batch: MicroBatch) -> Tensor:
        """[sum of the flow losses, number of samples] on the last stage, zeros on others; padding weighs nothing."""
        self._sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        self._run(_split(batch, self.eval_pieces), self._judge)
        return self._sums

    def _judge(self, outputs: tuple[Tensor, ...], _: Tensor, label: tuple[Tensor | None, ...]) -> Tensor:
        each: Tensor = self.module.losses(outputs, label)["each"].double()
        weight = torch.ones_like(each) if len(label) < 3 or label[2] is None else label[2].double()
        self._sums += torch.stack([(each * weight).sum(), weight.sum()])
        return each.mean()

    @torch.no_grad()
    def denoise(self, features: tuple[Tensor, ...]) -> Tensor:
        """The predicted velocity, on all stages; all processes call it equally often."""
        size = tuple(features[0].shape)
        self._velocity = torch.empty(size, device=self.device)
        self._run([(features, ())], partial(self._show, size[-2:]))
        if self.pipe is not None:
            last = self.grid.first_of(self.grid.stages - 1) + self.grid.replica
            dist.broadcast(self._velocity, last, group=self.pipe)
        return self._velocity

    def _show(self, size: Sequence[int], outputs: tuple[Tensor, ...], *_: object) -> Tensor:
        self._velocity = self.module.velocity(outputs, size)
        return self._velocity.mean()

    def _run(self, batches: Sequence[MicroBatch], purpose: Any) -> None:
        self._purpose = purpose
        self.engine.reset_activation_shape()
        self.engine.eval_batch(
            self._feed(batches), reduce_output=None, bcast_loss=False, num_micro_batches=len(batches)
        )


def _any(module: nn.Module) -> Any:
    """A module whose attributes are not for the type checker to guess."""
    return module


def _split(batch: MicroBatch, pieces: int) -> list[MicroBatch]:
    """A micro-batch as up to ``pieces`` equal ones, so that the stages have work at the same time."""
    features, label = batch
    pieces = pieces if len(features[0]) % pieces == 0 else 1
    parts = zip(*(tensor.chunk(pieces) for tensor in features), strict=True)
    labels = zip(*([None] * pieces if part is None else part.chunk(pieces) for part in label), strict=True)
    return list(zip(parts, labels, strict=True))


def _even(batches: Sequence[MicroBatch]) -> Iterator[MicroBatch]:
    """Texts of one length: stages tell each other shapes once a step. What real text is followed by changes nothing."""
    longest = max(features[2].shape[1] for features, _ in batches)
    for features, label in batches:
        noisy, times, prompt, *rest = features
        more = longest - prompt.shape[1]
        yield (noisy, times, nn.functional.pad(prompt, (0, 0, 0, more)) if more else prompt, *rest), label
