"""Modules with a custom ``forward(data)`` that returns the loss of one sample, such as DiffSynth's."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from accelerate.utils import send_to_device
from torch import Tensor, nn

from sd3_light.config.faults import UserError
from sd3_light.engines.errors import as_user_error
from sd3_light.randomness import stream
from sd3_light.runlog import info
from sd3_light.tasks.helpers import seeded
from sd3_light.tasks.module import DiffusionTrainingModule


class CustomForward(nn.Module):
    """Gives a module with a custom ``forward(data)`` the interface that launchers and engines expect.

    A batch is computed sample by sample. Samples of a dataset with ``load_from_cache`` are passed as
    ``forward({}, inputs=sample)``. Each call starts with generators that are seeded from the sample and the epoch
    (law 1), so its loss does not depend on the batch, the number of processes or a resume.
    """

    adapter = dropout = bands = None

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.name = model, type(model).__name__
        self.seed, self.device = 0, torch.device("cpu")
        self._narrow: torch.dtype | None = None  # the dtype in which the module's weights were loaded

    def to(self, *args: Any, **kwargs: Any) -> "CustomForward":
        """Move the module by its own ``to``, and its parts by theirs: a pipeline notes its device there."""
        for part in (*self.model.children(), self.model):
            part.to(*args, **kwargs)
        device: Any = torch._C._nn._parse_to(*args, **kwargs)[0]
        self.device = self.device if device is None else device
        return self

    # --- what trains -----------------------------------------------------------------------------

    def named_trainable(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield (name, parameter) of what ``trainable_modules()`` yields, by the names in the module."""
        with as_user_error(f"trainable_modules() of {self.name}"):
            chosen = list(self.model.trainable_modules())  # type: ignore[operator]
        named = {id(parameter): name for name, parameter in self.model.named_parameters()}
        for parameter in chosen:
            if not isinstance(parameter, nn.Parameter) or id(parameter) not in named:
                raise UserError(
                    f"trainable_modules() of {self.name} yields a {type(parameter).__name__} that is not one of its "
                    "parameters; yield parameters of torch modules that are its attributes"
                )
        yield from ((named[id(parameter)], parameter) for parameter in chosen if parameter.requires_grad)

    def freeze_the_rest(self) -> None:
        """Freeze what ``trainable_modules()`` does not yield; store what trains in float32 (law 4)."""
        trained = dict(self.named_trainable())
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(name in trained)
        for parameter in trained.values():
            if parameter.dtype == torch.bfloat16:
                self._narrow = parameter.dtype
                parameter.data = parameter.data.float()
        if self._narrow is not None:
            info(f"the trained weights of {self.name} are stored in float32 and computed in bfloat16")

    # --- a batch ---------------------------------------------------------------------------------

    def forward(self, batch: Sequence[dict[str, Any]]) -> Tensor:
        """Return the mean loss of the batch, with its gradient."""
        return torch.stack([self._loss(sample, "forward") for sample in batch]).mean()

    def each(self, batch: Sequence[dict[str, Any]], quantile: float | None = None) -> Tensor:
        """Return the loss of each sample; every ``quantile`` of a validation is another fixed draw."""
        fixed = [{**sample, "epoch": 0, "repeat": 0} for sample in batch]
        return torch.stack([self._loss(sample, f"eval-{quantile}") for sample in fixed])

    @torch.no_grad()
    def process(self, data: Any, data_id: int = 0) -> Any:
        """Return what the module returns for an item in the first of two stages."""
        return self._call({"data": data, "data_id": data_id, "epoch": 0, "repeat": 0}, "process")

    def _loss(self, sample: dict[str, Any], purpose: str) -> Tensor:
        loss = self._call(sample, purpose)
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
            kind = f"a tensor {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
            raise UserError(f"forward of {self.name} returned {kind}; return the loss, a tensor of one number")
        if torch.is_grad_enabled() and not loss.requires_grad:
            raise UserError(
                f"the loss of {self.name} depends on no weight that trains; does its forward use what "
                "trainable_modules() yields?"
            )
        return loss.float().reshape(())

    def _call(self, sample: dict[str, Any], purpose: str) -> Any:
        draws = stream(self.seed, purpose, sample["epoch"], sample["repeat"], sample["data_id"])
        data = send_to_device(sample["data"], self.device)
        seed = int(draws.integers(2**63))
        with seeded(seed, self.device), self._autocast(), as_user_error(f"forward of {self.name}"):
            return self.model({}, inputs=data) if sample.get("load_from_cache") else self.model(data)

    def _autocast(self) -> AbstractContextManager[Any]:
        if self._narrow is None or torch.is_autocast_enabled(self.device.type):
            return nullcontext()
        return torch.autocast(self.device.type, self._narrow)


TaskModule = DiffusionTrainingModule | CustomForward


def task_module(model: Any) -> TaskModule:
    """Return the module to train: ``model``, or `CustomForward` around one with a custom ``forward(data)``."""
    if isinstance(model, DiffusionTrainingModule) and not model.has_custom_forward:
        return model
    if not (isinstance(model, nn.Module) and callable(getattr(model, "trainable_modules", None))):
        raise UserError(
            f"the model is a {type(model).__name__}; derive it from DiffusionTrainingModule, or give a torch module "
            "with forward(data), which returns the loss, and trainable_modules()"
        )
    return CustomForward(model)
