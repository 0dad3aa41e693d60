"""Replacements for some instructions of DeepSpeed's pipeline schedule."""

from collections.abc import Callable
from itertools import compress
from typing import Any

import torch
from deepspeed.runtime.pipe import schedule

Instructions = dict[type, Callable[..., None]]


def instructions(engine: Any, before_reduction: Callable[[], None], step: Callable[[Any], None]) -> Instructions:
    """Return DeepSpeed's instruction map with the replacements.

    ``before_reduction()`` checks the gradients; ``step(take)`` wraps the optimizer step, which ``take()`` runs.
    """
    stock: Instructions = engine._INSTRUCTION_MAP

    def reduce(self: Any) -> None:
        before_reduction()
        if self.dp_world_size > 1 or self.zero_optimization():  # a single process would only copy all gradients twice
            stock[schedule.ReduceGrads](self)

    def take_step(self: Any) -> None:
        step(lambda: stock[schedule.OptimizerStep](self))

    def backward(self: Any, buffer_id: int) -> None:
        if self.is_last_stage():
            stock[schedule.BackwardPass](self, buffer_id)
        else:
            _stage_backward(self, buffer_id)

    def send_grads(self: Any, buffer_id: int) -> None:
        _fill_gradients(self, buffer_id)
        stock[schedule.SendGrad](self, buffer_id)

    replacements: Instructions = {
        schedule.ReduceGrads: reduce,
        schedule.OptimizerStep: take_step,
        schedule.BackwardPass: backward,
        schedule.SendGrad: send_grads,
    }
    return {**stock, **replacements}


def _stage_backward(engine: Any, buffer_id: int) -> None:
    """Run one backward pass from all outputs of a stage; DeepSpeed runs one per output through the same layers.

    Outputs without a gradient, such as text kept for reconstruction, are skipped.
    """
    outputs = engine.pipe_buffers["outputs"][buffer_id]
    floats = [tensor for tensor in outputs if tensor.is_floating_point()]
    grads = list(engine.grad_layer)
    needs_grad = [out.requires_grad for out in floats]
    engine._running_engine_backward = True
    try:
        torch.autograd.backward(list(compress(floats, needs_grad)), list(compress(grads, needs_grad)))
    finally:
        engine._running_engine_backward = False
    engine.pipe_buffers["output_tensors"][buffer_id] = None
    engine.pipe_buffers["outputs"][buffer_id] = None


def _fill_gradients(engine: Any, buffer_id: int) -> None:
    """Set zero gradients for inputs that no output depends on: the previous stage expects one for each."""
    for tensor in engine.pipe_buffers["inputs"][buffer_id]:
        if tensor.is_floating_point() and tensor.grad is None:
            tensor.grad = torch.zeros_like(tensor)
        elif tensor.grad is not None:
            tensor.grad = tensor.grad.contiguous()
