"""What engines train in a task: a `DiffusionTrainingModule`, or a module with a custom ``forward(data)``."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from accelerate.utils import send_to_device
from torch import Tensor, nn

from sd3_light.config.faults import UserError
from sd3_light.core.batch import Batch
from sd3_light.core.model import Losses, TrainedModel, tapped
from sd3_light.core.objective import Objective, Prediction
from sd3_light.engines.errors import as_user_error
from sd3_light.randomness import stream
from sd3_light.runlog import info
from sd3_light.tasks.module import DiffusionTrainingModule, seeded
from sd3_light.tasks.prepare import POINT, STORED, ItemPreparer, samples_in


class _OwnLoss(Objective):
    """The loss of a module that computes it itself: it has no parts."""

    weights: Mapping[str, float] = {}

    def losses(self, out: Prediction, batch: Batch) -> dict[str, Tensor]:
        """Not called."""
        raise NotImplementedError


class TaskModel(TrainedModel):
    """A user's module as engines train it. `preparer` makes its batches."""

    def __init__(self, module: nn.Module, denoiser: nn.Module, objective: Objective | None = None) -> None:
        super().__init__(denoiser, objective or _OwnLoss())
        self._module = (module,)  # in a tuple: of the module only the denoiser is wrapped, copied and sharded

    @property
    def module(self) -> Any:
        """The user's module."""
        return self._module[0]

    def to(self, *args: Any, **kwargs: Any) -> "TaskModel":
        """Move the whole module."""
        self.module.to(*args, **kwargs)
        return self

    def trainable(self) -> dict[str, nn.Parameter]:
        """Return what trains, by name; raise a `UserError` if there is nothing, or not in float32."""
        parameters = super().trainable()
        if not parameters:
            raise UserError(
                "nothing to train: no parameter of the module's transformer requires gradients; unfreeze some of them"
            )
        for name, weight in parameters.items():
            if weight.dtype != torch.float32:
                raise UserError(
                    f"{name} is {weight.dtype}; trainable weights must be float32: call .float() on the transformer"
                )
        return parameters

    def trained_weights(self) -> list[nn.Parameter]:
        """Return the weights that a task will train."""
        return [weight for weight in self.denoiser.parameters() if weight.requires_grad]

    def preparer(self, pin: bool = False) -> ItemPreparer:
        """Return what makes batches in workers; ``pin`` is for a trainer without workers."""
        return ItemPreparer()

    def predict(self, batch: Batch, taps: Sequence[int] = ()) -> Prediction:
        """Not available: the module computes its loss itself."""
        raise NotImplementedError


class UnitModel(TaskModel):
    """A `DiffusionTrainingModule`: its units, then its loss, or the loss of a ``forward`` that it overrides."""

    def __init__(self, module: DiffusionTrainingModule) -> None:
        module.require_transformer()
        super().__init__(module, module.transformer, module.objective)
        self._overrides_forward = type(module).forward is not DiffusionTrainingModule.forward

    def preparer(self, pin: bool = False) -> ItemPreparer:
        """Return what makes batches in workers; ``pin`` is for a trainer without workers."""
        module: DiffusionTrainingModule = self.module
        return ItemPreparer() if self._overrides_forward else module.preparer(pin)

    def forward(self, batch: Batch) -> Losses:
        """Return the loss with its gradient, and without it ``each`` sample's and, if they are drawn, the times."""
        module: DiffusionTrainingModule = self.module
        if self.dropout is not None:
            self.dropout.forward(module.device)
        if self._overrides_forward:
            return self._own_loss(batch)
        if module.objective is not None:
            batch = self._noisy(batch)
            return {**super().forward(batch), "t": batch["t"]}
        inputs = module.inputs(batch)
        each = module.losses(inputs)
        times = {"t": module.times(inputs)} if hasattr(module.loss, "times") else {}
        return {"loss": each.mean(), "each": each.detach(), **times}

    def _own_loss(self, batch: Batch) -> Losses:
        samples = samples_in(batch)
        if batch.host[POINT] is None:
            loss: Tensor = self.module(samples)
            return {"loss": loss, "each": loss.detach().expand(batch.size)}
        each: Tensor = self.module.each(samples, batch.host[POINT])
        return {"loss": each.mean(), "each": each}

    def _noisy(self, batch: Batch) -> Batch:
        """Return what an objective reads; a batch that it has drawn is that already."""
        module: DiffusionTrainingModule = self.module
        return batch if "noisy" in batch.values else module.noisy_batch(module.inputs(batch))

    def draw(self, batch: Batch) -> Batch:
        """See `TrainedModel.draw`."""
        return super().draw(self._noisy(batch))

    def evaluate(self, batch: Batch) -> Tensor:
        """See `TrainedModel.evaluate`."""
        return super().evaluate(self._noisy(batch) if self.objective.draws else batch)

    def predict(self, batch: Batch, taps: Sequence[int] = ()) -> Prediction:
        """Run ``denoise`` on what an objective gets: noisy latents, times and the inputs of the batch."""
        with tapped(self.blocks(), taps, _image_tokens) as features:
            velocity = self.module.denoise(batch["noisy"], batch["t"], {**batch.host, **batch.values})
        return Prediction(velocity, features)


def _image_tokens(output: Any) -> Tensor:
    """Return the image tokens of a block's output: the last tensor of several, after the text."""
    tokens: Tensor = output[-1] if isinstance(output, tuple) else output
    return tokens


class CustomForward(TaskModel):
    """A module with a custom ``forward(data)`` that returns the loss of one sample, such as DiffSynth's.

    A batch is computed sample by sample. Samples of a dataset with ``load_from_cache`` are passed as
    ``forward({}, inputs=sample)``. Each call starts with generators that are seeded from the sample and the epoch
    (law 1), so its loss does not depend on the batch, the number of processes or a resume.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model, model)
        self.seed = 0
        self.name = type(model).__name__
        self.device = torch.device("cpu")
        self._narrow: torch.dtype | None = None  # the dtype in which the module's weights were loaded

    def to(self, *args: Any, **kwargs: Any) -> "CustomForward":
        """Move the module by its own ``to``, and its parts by theirs: a pipeline notes its device there."""
        for part in (*self.module.children(), self.module):
            part.to(*args, **kwargs)
        device: Any = torch._C._nn._parse_to(*args, **kwargs)[0]
        self.device = self.device if device is None else device
        return self

    def freeze_the_rest(self) -> None:
        """Freeze what ``trainable_modules()`` does not yield; store what trains in float32 (law 4)."""
        chosen = {id(parameter) for parameter in self.trained_weights()}
        for parameter in self.module.parameters():
            parameter.requires_grad_(id(parameter) in chosen)
            if parameter.requires_grad and parameter.dtype == torch.bfloat16:
                self._narrow = parameter.dtype
                parameter.data = parameter.data.float()
        if self._narrow is not None:
            info(f"the trained weights of {self.name} are stored in float32 and computed in bfloat16")

    def trained_weights(self) -> list[nn.Parameter]:
        """Return what ``trainable_modules()`` yields and requires gradients."""
        with as_user_error(f"trainable_modules() of {self.name}"):
            chosen = list(self.module.trainable_modules())
        own = {id(parameter) for parameter in self.module.parameters()}
        for parameter in chosen:
            if not isinstance(parameter, nn.Parameter) or id(parameter) not in own:
                raise UserError(
                    f"trainable_modules() of {self.name} yields a {type(parameter).__name__} that is not one of its "
                    "parameters; yield parameters of torch modules that are its attributes"
                )
        return [parameter for parameter in chosen if parameter.requires_grad]

    # --- a batch ---------------------------------------------------------------------------------

    def forward(self, batch: Batch) -> Losses:
        """Return the mean loss of the batch with its gradient; every point of a validation is another fixed draw."""
        point = batch.host[POINT]
        purpose = "forward" if point is None else f"eval-{point}"
        each = torch.stack([self._loss(sample, purpose, batch.host[STORED]) for sample in samples_in(batch)])
        return {"loss": each.mean(), "each": each.detach()}

    @torch.no_grad()
    def process(self, data: Any, data_id: int = 0) -> Any:
        """Return what the module returns for an item in the first of two stages."""
        return self._call({"data": data, "data_id": data_id, "epoch": 0, "repeat": 0}, "process")

    def _loss(self, sample: dict[str, Any], purpose: str, is_stored: bool) -> Tensor:
        loss = self._call(sample, purpose, is_stored)
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
            kind = f"a tensor {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
            raise UserError(f"forward of {self.name} returned {kind}; return the loss, a tensor of one number")
        if torch.is_grad_enabled() and not loss.requires_grad:
            raise UserError(
                f"the loss of {self.name} depends on no weight that trains; does its forward use what "
                "trainable_modules() yields?"
            )
        return loss.float().reshape(())

    def _call(self, sample: dict[str, Any], purpose: str, is_stored: bool = False) -> Any:
        draws = stream(self.seed, purpose, sample["epoch"], sample["repeat"], sample["data_id"])
        data = send_to_device(sample["data"], self.device)
        seed = int(draws.integers(2**63))
        with seeded(seed, self.device), self._autocast(), as_user_error(f"forward of {self.name}"):
            return self.module({}, inputs=data) if is_stored else self.module(data)

    def _autocast(self) -> AbstractContextManager[Any]:
        if self._narrow is None or torch.is_autocast_enabled(self.device.type):
            return nullcontext()
        return torch.autocast(self.device.type, self._narrow)


def task_model(model: Any) -> UnitModel | CustomForward:
    """Return what an engine trains of a module."""
    if isinstance(model, DiffusionTrainingModule) and not model.has_custom_forward:
        return UnitModel(model)
    if not (isinstance(model, nn.Module) and callable(getattr(model, "trainable_modules", None))):
        raise UserError(
            f"the model is a {type(model).__name__}; derive it from DiffusionTrainingModule, or give a torch module "
            "with forward(data), which returns the loss, and trainable_modules()"
        )
    return CustomForward(model)
