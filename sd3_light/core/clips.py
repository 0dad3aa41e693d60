"""How many frames a clip may have: a family allows certain lengths, and `frames` of a directory stands for them."""

from collections.abc import Iterator
from dataclasses import replace

from sd3_light.config import DatasetConfig, DirectoryConfig, Fault


def with_clip_lengths(dataset: DatasetConfig, step: int | None) -> DatasetConfig:
    """Return a dataset whose directories name all lengths of clips: those that are allowed, up to a given number.

    ``step`` is that of `Family.frame_step`. Lengths that a directory lists stay as they are.
    """
    return replace(dataset, directories=tuple(_with_lengths(each, step) for each in dataset.directories))


def _with_lengths(directory: DirectoryConfig, step: int | None) -> DirectoryConfig:
    most = directory.frames
    if step is None or not isinstance(most, int) or most == 1:
        return directory
    return directory.model_copy(update={"frames": tuple(range(1 + step, most + 1, step))})


def clip_faults(dataset: DatasetConfig, step: int | None, title: str) -> Iterator[Fault]:
    """Yield the faults of `frames`: lengths that the family named ``title`` does not allow."""
    for number, directory in enumerate(dataset.directories):
        for length in directory.clip_lengths:
            fault = Fault(str(dataset.path), f"directory[{number}].frames", "", str(length))
            if step is None:
                yield replace(fault, problem=f"{title} trains on images only", hint="remove frames")
            elif (length - 1) % step:
                below = length - (length - 1) % step
                problem = f"clips of {title} have {step}·n + 1 frames"
                yield replace(fault, problem=problem, hint=f"write {below} or {below + step}")
