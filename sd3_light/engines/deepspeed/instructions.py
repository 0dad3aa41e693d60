"""The instructions of DeepSpeed's pipeline schedule that are carried out otherwise than it does."""

from collections.abc import Callable
from itertools import compress
from typing import Any

import torch
from deepspeed.runtime.pipe import schedule

Instructions = dict[type, Callable[..., None]]


def instructions(engine: Any, before_reduction: Callable[[], None], step: Callable[[Any], None]) -> Instructions:
    """DeepSpeed's map of instructions with ours in it.

    ``before_reduction`` looks at the gradients, and ``step(take)`` decides about the step that ``take()`` takes.
    """
    known: Instructions = engine._INSTRUCTION_MAP

    def reduce(self: Any) -> None:
        before_reduction()
        if self.dp_world_size > 1 or self.zero_optimization():  # alone it would only copy all gradients, twice
            known[schedule.ReduceGrads](self)

    def take_step(self: Any) -> None:
        step(lambda: known[schedule.OptimizerStep](self))

    def back(self: Any, buffer_id: int) -> None:
        if self.is_last_stage():
            known[schedule.BackwardPass](self, buffer_id)
        else:
            _backward(self, buffer_id)

    def send_back(self: Any, buffer_id: int) -> None:
        _fill_gradients(self, buffer_id)
        known[schedule.SendGrad](self, buffer_id)

    ours: Instructions = {
        schedule.ReduceGrads: reduce,
        schedule.OptimizerStep: take_step,
        schedule.BackwardPass: back,
        schedule.SendGrad: send_back,
    }
    return {**known, **ours}


def _backward(engine: Any, buffer_id: int) -> None:
    """One backward pass from all outputs of a stage at once; DeepSpeed makes one for each of them, through the same
    layers. An output without a gradient, such as text that is kept to be compared, takes none."""
    outputs = engine.pipe_buffers["outputs"][buffer_id]
    floats = [tensor for tensor in outputs if tensor.is_floating_point()]
    grads = list(engine.grad_layer)
    learning = [out.requires_grad for out in floats]
    engine._running_engine_backward = True
    try:
        torch.autograd.backward(list(compress(floats, learning)), list(compress(grads, learning)))
    finally:
        engine._running_engine_backward = False
    engine.pipe_buffers["output_tensors"][buffer_id] = None
    engine.pipe_buffers["outputs"][buffer_id] = None


def _fill_gradients(engine: Any, buffer_id: int) -> None:
    """Zeros for the inputs of a stage that its outputs do not depend on: the stage before waits for one of each."""
    for tensor in engine.pipe_buffers["inputs"][buffer_id]:
        if tensor.is_floating_point() and tensor.grad is None:
            tensor.grad = torch.zeros_like(tensor)
        elif tensor.grad is not None:
            tensor.grad = tensor.grad.contiguous()
