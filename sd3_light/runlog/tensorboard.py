"""TensorBoard: the curves and images of the log as event files."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch.utils.tensorboard import SummaryWriter

LARGEST_SIDE = 2048
"""Pixels. Larger images are scaled down, because event files keep every image."""


class TensorBoard:
    """A tracker that writes event files to ``folder``, which is created with the first point or image."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._purge: int | None = None
        self._writer: SummaryWriter | None = None

    def begin(self, first: int) -> None:
        """Hide what an earlier process logged at step ``first`` or later; call it when a run starts or resumes.

        TensorBoard treats the first such mark in a folder as the start of everything, so a new run needs one too.
        """
        assert self._writer is None, "the mark must precede the first point"
        self._purge = first

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Add a point to each named curve."""
        writer = self._open()
        for name, number in values.items():
            writer.add_scalar(name, number, global_step=step)

    def image(self, name: str, image: "Image", step: int) -> None:
        """Add an image under a name."""
        import numpy as np

        self._open().add_image(name, np.asarray(shrink(image)), global_step=step, dataformats="HWC")

    def close(self) -> None:
        """Write pending data and close the file."""
        if self._writer is not None:
            self._writer.close()

    def _open(self) -> "SummaryWriter":
        if self._writer is None:
            # imported late: it takes a second, and most commands do not need it
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(log_dir=str(self._folder), purge_step=self._purge, flush_secs=10)
        return self._writer


def shrink(image: "Image") -> "Image":
    """Return the image in RGB, no side longer than `LARGEST_SIDE`."""
    rgb = image.convert("RGB")
    if max(rgb.size) > LARGEST_SIDE:
        rgb.thumbnail((LARGEST_SIDE, LARGEST_SIDE))
    return rgb
