"""TensorBoard beside the log: its curves, and its pictures."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch.utils.tensorboard import SummaryWriter

LARGEST_SIDE = 2048
"""Pixels: larger pictures are shown smaller, as event files keep every one of them."""


class TensorBoard:
    """A tracker that writes event files to ``folder``; nothing is written before there is something to show."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._purge: int | None = None
        self._writer: SummaryWriter | None = None

    def begin(self, first: int) -> None:
        """A run begins or goes on: whatever an earlier process drew at ``first`` or later is hidden.

        TensorBoard takes the first such mark in a folder for the start of it all, so a fresh run needs one too.
        """
        assert self._writer is None, "the mark stands before the first point"
        self._purge = first

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Add a point to each named curve."""
        writer = self._open()
        for name, number in values.items():
            writer.add_scalar(name, number, global_step=step)

    def image(self, name: str, image: "Image", step: int) -> None:
        """Show a picture under a name."""
        import numpy as np

        self._open().add_image(name, np.asarray(bounded(image)), global_step=step, dataformats="HWC")

    def close(self) -> None:
        """Write what is left."""
        if self._writer is not None:
            self._writer.close()

    def _open(self) -> "SummaryWriter":
        if self._writer is None:
            # imported here: it costs a second, which commands that train nothing need not pay
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(log_dir=str(self._folder), purge_step=self._purge, flush_secs=10)
        return self._writer


def bounded(image: "Image") -> "Image":
    """The picture in RGB, no side longer than `LARGEST_SIDE`."""
    shown = image.convert("RGB")
    if max(shown.size) > LARGEST_SIDE:
        shown.thumbnail((LARGEST_SIDE, LARGEST_SIDE))
    return shown
