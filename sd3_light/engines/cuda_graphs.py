"""Replay forward and backward passes as CUDA graphs: one launch per micro-batch instead of hundreds of kernels.

A graph is recorded once per shape of a micro-batch and contains the kernels of the normal path, so a replay computes
the same bits. It reads its inputs from fixed memory and adds to gradients in fixed memory. Only this part of a step is
recorded: data, noise, clipping, optimizer and averages run as usual, and so do evaluation and sampling.
"""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from sd3_light.core.batch import Batch
from sd3_light.cost.graph_choice import MAX_GRAPHS
from sd3_light.engines.protocol import sum_of_squares
from sd3_light.runlog import info

_NORM_TOLERANCE = 1e-3  # attention may sum its gradients in any order

Numbers = tuple[tuple[str, ...], Tensor]
"""Names of the losses of a micro-batch, and its numbers as `StepResult.pack` orders them."""
RunPass = Callable[[Batch, int], Numbers]
"""(micro-batch, micro-batches per step) -> numbers; adds to the gradients of the weights."""


class Recording(Protocol):
    """Recorded work."""

    def replay(self) -> Numbers:
        """Queue the work again; return its outputs, which the next replay of any recording overwrites."""


class Recorder(Protocol):
    """Records the work that a function queues."""

    def warming_up(self) -> AbstractContextManager[None]:
        """Return a context in which a function runs normally, so that nothing is initialized while it is recorded."""

    def record(self, function: Callable[[], Numbers]) -> Recording:
        """Record a function without running it; raise a RuntimeError if it does something that cannot be recorded."""


class MicroBatchGraphs:
    """Runs micro-batches through graphs, and with ``run`` those of further shapes, or with tensors on the host.

    A shape that cannot be recorded, or whose graph computes other numbers, is reported, and no further one is tried.
    """

    def __init__(self, run: RunPass, weights: Sequence[nn.Parameter], recorder: Recorder) -> None:
        self._run = run
        self._weights = weights
        self._recorder = recorder
        self._gradients: list[Tensor] = []  # those of the first pass
        self._is_clear = True
        self._graphs: dict[Any, _Graph] = {}
        self._records = True

    @property
    def count(self) -> int:
        """The number of recorded shapes."""
        return len(self._graphs)

    def clear_gradients(self) -> None:
        """Set the gradients to zero, in the memory that graphs add to."""
        self._use_gradients()
        if self._gradients:
            torch._foreach_zero_(self._gradients)
        self._is_clear = True

    def run(self, batch: Batch, count: int) -> Numbers:
        """Queue forward and backward pass; the numbers are valid until the next call."""
        key = count, batch.shapes()
        is_recordable = not any(isinstance(value, Tensor) for value in batch.host.values())
        if is_recordable and self._records and key not in self._graphs:
            graph = self._record(batch, count)
            if graph is not None:
                self._graphs[key] = graph
            self._records = graph is not None and len(self._graphs) < MAX_GRAPHS
        graph = self._graphs.get(key) if is_recordable else None
        self._is_clear = False
        if graph is not None:
            return graph.run(batch)
        return self._run(batch, count) if self._gradients or not self._records else self._first_run(batch, count)

    def _first_run(self, batch: Batch, count: int) -> Numbers:
        """Run a micro-batch that is not recorded before any that is: its gradients are those that graphs add to."""
        with self._recorder.warming_up():
            numbers = self._run(batch, count)
        self._gradients = self._made_gradients()
        return numbers

    def _record(self, batch: Batch, count: int) -> "_Graph | None":
        device = self._weights[0].device
        try:
            with self._keeping_gradients():
                inputs = batch.map_tensors(lambda tensor: tensor.to(device, copy=True))
                run = partial(self._run, inputs, count)
                expected = self._warm_up(run)
                graph = _Graph(inputs.tensors(), self._recorder.record(run))
                is_right = self._agrees(graph.recording, expected)
        except RuntimeError as error:  # also if the GPU's memory is full
            reason = str(error).partition("\n")[0]
            info(f"CUDA graphs: recording failed, so kernels are launched one by one ({reason})")
            return None
        if not is_right:
            info("CUDA graphs: a graph computes other numbers than its kernels, so these are launched one by one")
            return None
        return graph

    @contextmanager
    def _keeping_gradients(self) -> Iterator[None]:
        """Restore the gradients after the block: earlier micro-batches of the step may have added to them."""
        earlier = [] if self._is_clear else [gradient.clone() for gradient in self._gradients]
        try:
            yield
        finally:
            self._use_gradients()
            if earlier:
                torch._foreach_copy_(self._gradients, earlier)
            elif self._gradients:
                torch._foreach_zero_(self._gradients)

    def _warm_up(self, run: Callable[[], Numbers]) -> tuple[Tensor, Tensor]:
        """Run twice, the second time adding to gradients; return numbers and squared gradient norm of the first.

        The very first pass makes the gradients that all graphs add to.
        """
        if self._gradients:
            torch._foreach_zero_(self._gradients)
        with self._recorder.warming_up():
            _, numbers = run()
            self._gradients = self._made_gradients()
            squares = sum_of_squares(self._gradients)
            run()
        return numbers, squares

    def _made_gradients(self) -> list[Tensor]:
        gradients = [weight.grad for weight in self._weights if weight.grad is not None]
        assert len(gradients) == len(self._weights), "no gradient reached some weights"
        return gradients

    def _agrees(self, recording: Recording, expected: tuple[Tensor, Tensor]) -> bool:
        """Replay on zero gradients and compare with the warm-up."""
        torch._foreach_zero_(self._gradients)
        _, numbers = recording.replay()
        squares = sum_of_squares(self._gradients)
        is_same = torch.allclose(numbers, expected[0], rtol=0, atol=0, equal_nan=True)
        return is_same and torch.allclose(squares, expected[1], rtol=2 * _NORM_TOLERANCE, atol=0, equal_nan=True)

    def _use_gradients(self) -> None:
        for weight, gradient in zip_longest(self._weights, self._gradients):
            weight.grad = gradient


@dataclass(frozen=True)
class _Graph:
    """A recording and the tensors that it reads."""

    inputs: list[Tensor]
    recording: Recording

    def run(self, batch: Batch) -> Numbers:
        """Copy a micro-batch into the inputs and replay."""
        torch._foreach_copy_(self.inputs, batch.tensors(), non_blocking=True)
        return self.recording.replay()


@dataclass(frozen=True)
class CudaRecording:
    """A CUDA graph and its output tensors."""

    graph: torch.cuda.CUDAGraph
    outputs: Numbers

    def replay(self) -> Numbers:
        """See `Recording.replay`."""
        self.graph.replay()
        return self.outputs


class CudaRecorder:
    """Records CUDA graphs, which share memory: they never run at the same time, and outputs are used at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool: Any = torch.cuda.graph_pool_handle()

    @contextmanager
    def warming_up(self) -> Iterator[None]:
        """Run on the stream of the recordings: autograd remembers the stream of a weight's first use."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            yield
        current.wait_stream(self._stream)

    def record(self, function: Callable[[], Numbers]) -> CudaRecording:
        """See `Recorder.record`."""
        gc.collect()  # autograd nodes in reference cycles would belong to another stream
        current = torch.cuda.current_stream(self._device)
        graph = torch.cuda.CUDAGraph()
        try:
            # other threads, such as that of checkpoints, may use the GPU meanwhile
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                outputs = function()
        except RuntimeError:
            self._recover(current)
            raise
        return CudaRecording(graph, outputs)

    def _recover(self, current: torch.cuda.Stream) -> None:
        """Undo what a failed recording leaves behind: the current stream, and a generator that is being recorded."""
        torch.cuda.set_stream(current)
        generator = torch.cuda.default_generators[current.device_index]
        generator.graphsafe_set_state(generator.clone_state())
        torch.cuda.synchronize(self._device)
