"""Follow images while they are drawn: cancel them within an operation, and show what each step has so far.

A preview is linear in the latents. The numbers are fitted to each VAE, by least squares on three images of colors.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d, interpolate
from torch.overrides import TorchFunctionMode

from sd3_light.encoding.vae import LatentScale, decode_raw, encode_pixels

Show = Callable[[int, int, Image.Image | None], None]
"""Called with the index of a request, the steps that are done, and a preview."""

_STATE = ("_set_", "set_", "_enter_", "_exit_")
"""Begin the names of functions that change the state of a thread: what has changed it must be able to restore it."""
_FITTED_SIDE = 128  # pixels of the image that the fit sees
_RIDGE = 1e-3
_FIRST = 0.1  # the weight of the colors of the first fit, against that of a finished image
_EARLIER = 0.6  # the weight of earlier images when another is learned
_PATCH = 2  # the side of a patch whose latent pixels are packed as channels


class Cancelled(BaseException):
    """The caller cancelled the images while they were drawn.

    Not an `Exception`: tokenizers turn every one that meets their tensors into an error of their own.
    """


@dataclass(frozen=True)
class Watch:
    """What follows a drawing. Without ``is_cancelled`` it cannot be cancelled; without ``show`` it is drawn unseen.

    ``preview`` returns images of latents; without it, ``show`` gets only the number of steps.
    """

    is_cancelled: Callable[[], bool] | None = None
    show: Show | None = None
    preview: "Preview | None" = None


@contextmanager
def cancellable(is_cancelled: Callable[[], bool] | None) -> Iterator[None]:
    """Raise `Cancelled` in this thread before the next torch operation once ``is_cancelled`` returns True.

    A large denoiser computes for seconds per step, but not per operation. Loading weights consists of operations too.
    """
    if is_cancelled is None:
        yield
        return
    with _Cancellable(is_cancelled):
        yield


class _Cancellable(TorchFunctionMode):
    """Asks before each function of torch that Python calls; the results keep their bits."""

    def __init__(self, is_cancelled: Callable[[], bool]) -> None:
        super().__init__()
        self._is_cancelled = is_cancelled

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_state = getattr(func, "__name__", "").startswith(_STATE)
        if not is_state and self._is_cancelled():
            raise Cancelled
        return func(*args, **(kwargs or {}))


@dataclass
class Preview:
    """Shows latents of a model folder's VAE as small images, one pixel per latent pixel.

    It learns from every image that is finished: a small VAE knows only images like those of its training.
    """

    folder: Path
    _lock: Lock = field(default_factory=Lock)
    _fit: "_Fit | None" = None

    @torch.no_grad()
    def images(self, vae: Any, latents: Tensor, aspect: float) -> list[Image.Image]:
        """Return the images of latents as the pipeline has them; ``aspect`` is height / width. Clips show one frame."""
        with self._lock:
            if self._fit is None:
                self._fit = _fit_of(vae, LatentScale.of_folder(self.folder))
            weights = self._fit.weights
        grid = as_grid(latents, aspect).float().cpu()
        pixels = (torch.einsum("bchw,cd->bhwd", _with_ones(grid), weights) + 1) * 127.5
        return [Image.fromarray(each.numpy()) for each in pixels.nan_to_num().clamp(0, 255).round().to(torch.uint8)]

    @torch.no_grad()
    def learn(self, latents: Tensor, images: Sequence[Image.Image]) -> None:
        """Improve the next previews by finished images and their latents."""
        height = images[0].height
        width = images[0].width
        grid = as_grid(latents, height / width).float().cpu()
        pixels = torch.stack([torch.from_numpy(np.array(image.convert("RGB"))) for image in images])
        with self._lock:
            if self._fit is not None and grid.isfinite().all():
                self._fit = self._fit.joined(grid, pixels.movedim(-1, 1) / 127.5 - 1)


class _Fit(NamedTuple):
    """Sums of a least-squares fit from latents and a constant to colors from -1 to 1, per latent pixel."""

    gram: Tensor
    moments: Tensor

    @property
    def weights(self) -> Tensor:
        """The solution, [C + 1, 3]; a little ridge, because latents of a small VAE may be almost dependent."""
        ridge = _RIDGE * torch.eye(len(self.gram), dtype=self.gram.dtype)
        solution: Tensor = torch.linalg.solve(self.gram + ridge, self.moments)
        return solution.float()

    def joined(self, latents: Tensor, pixels: Tensor) -> "_Fit":
        """Return a fit to latents [B, C, h, w] and images [B, 3, H, W], in which the present one counts less."""
        colors = adaptive_avg_pool2d(pixels, (latents.shape[-2], latents.shape[-1]))
        rows = _with_ones(latents).movedim(1, -1).flatten(0, 2).double()
        targets = colors.movedim(1, -1).flatten(0, 2).double()
        gram = _EARLIER * self.gram + rows.T @ rows / len(rows)
        return _Fit(gram, _EARLIER * self.moments + rows.T @ targets / len(rows))


def _fit_of(vae: Any, scale: LatentScale) -> _Fit:
    """Return a fit to what a VAE makes of soft colors, and of plain ones."""
    parameter = next(vae.encoder.parameters())
    latents = scale.draw(encode_pixels(vae, _colors().movedim(1, -1).to(parameter.device)).float(), None)
    decoded = decode_raw(vae, scale.denormalise(latents).to(parameter.dtype)).float().clamp(-1, 1)
    channels = latents.shape[1] + 1
    nothing = _Fit(torch.zeros(channels, channels).double(), torch.zeros(channels, 3).double())
    fit = nothing.joined(latents.cpu(), decoded.cpu())
    return _Fit(_FIRST * fit.gram, _FIRST * fit.moments)


class SeenBatch:
    """Shows a batch of images after every step; ``indices`` are those of their requests, all of one size."""

    def __init__(self, watch: Watch, pipe: Any, indices: Sequence[int], aspect: float) -> None:
        self._watch = watch
        self._pipe = pipe
        self._indices = indices
        self._aspect = aspect
        self._estimate = StepEstimate(pipe.scheduler)
        self._latents: Tensor | None = None

    def after(self, step: int, latents: Tensor) -> None:
        """Show the latents after step number ``step``, from 0."""
        watch = self._watch
        if watch.show is None:
            return
        self._latents = latents
        likely = None if watch.preview is None else self._estimate.after(step, latents)
        images: Sequence[Image.Image | None] = [None] * len(self._indices)
        if watch.preview is not None and likely is not None:
            vae = getattr(self._pipe.vae, "host", self._pipe.vae)  # of a model in phases
            images = watch.preview.images(vae, likely, self._aspect)
        for index, image in zip(self._indices, images, strict=True):
            watch.show(index, step + 1, image)

    def finish(self, images: Sequence[Image.Image]) -> None:
        """Let the preview learn from the finished images."""
        if self._latents is not None and self._watch.preview is not None:
            self._watch.preview.learn(self._latents, images)


def as_grid(latents: Tensor, aspect: float) -> Tensor:
    """Return latents as [B, C, h, w]: rows of packed patches are unpacked, and of clips the middle frame is taken."""
    if latents.dim() == 5:
        return latents[:, :, latents.shape[2] // 2]
    if latents.dim() == 4:
        return latents
    size, tokens, channels = latents.shape
    height = round(math.sqrt(tokens * aspect))
    packed = latents.reshape(size, height, tokens // height, channels // _PATCH**2, _PATCH, _PATCH)
    return packed.permute(0, 3, 1, 4, 2, 5).flatten(4, 5).flatten(2, 3)


def _colors() -> Tensor:
    """Return three images [3, 3, H, W] from 0 to 255: soft colors, plain squares, and squares on almost white."""
    generator = torch.Generator().manual_seed(0)
    soft = interpolate(torch.rand((1, 3, 8, 8), generator=generator), _FITTED_SIDE, mode="bicubic").clamp(0, 1)
    squares = (torch.rand((1, 3, 4, 4), generator=generator) * 1.5 - 0.25).clamp(0, 1)
    board = torch.tensor([[1.0, 0.0], [0.0, 1.0]]).repeat(2, 2)
    plain = [interpolate(each, _FITTED_SIDE) for each in (squares, torch.where(board > 0, squares, 0.95))]
    return torch.cat([soft, *plain]) * 255


def _with_ones(latents: Tensor) -> Tensor:
    return torch.cat([latents, torch.ones_like(latents[:, :1])], dim=1)


class StepEstimate:
    """Estimates, after each step of a flow's sampler, the latents without noise: on the line of the last step."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._last: tuple[float, Tensor] | None = None

    def after(self, step: int, latents: Tensor) -> Tensor | None:
        """Return the estimate after step number ``step`` (from 0); None after the first."""
        times = self._scheduler.timesteps
        time = float(times[step + 1]) / self._scheduler.config.num_train_timesteps if step + 1 < len(times) else 0.0
        last = self._last
        self._last = time, latents
        if last is None or last[0] <= time:
            return None
        return latents - time * (last[1] - latents) / (last[0] - time)
