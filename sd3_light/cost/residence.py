"""Decide where the training cache is during a run; `check` and training share these rules."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

from sd3_light.cost.amount import format_bytes

USABLE = 0.92
"""Share of a GPU's memory that is planned for: the estimate was within 8% of the measured memory."""
LARGEST_SHARE = 0.8
"""Share of the free memory that a cache may take."""
AUTO_SHARE = 0.5
"""Share of the free host memory that the copies of a cache may take unless the config says `host`."""

FROM_HOST = "pipeline stages take their batches from the host"
"""Why such a run does not hold its cache in GPU memory."""

Residence = Literal["stream", "host", "device"]


class Room(NamedTuple):
    """Memory for a training process, in bytes.

    ``gpu`` is that of its GPU, None on a CPU; ``training`` is what training takes of it, estimated. ``host`` is the
    free memory of its machine, None if unknown, which ``processes`` share.
    """

    gpu: int | None
    training: int
    host: int | None
    processes: int


class ResidenceChoice(NamedTuple):
    """Where the cache is, and why."""

    residence: Residence
    reason: str


def choose_residence(
    cache: int, rooms: Sequence[Room], epochs: float, is_remote: bool = False, why_not_device: str | None = None
) -> ResidenceChoice:
    """Choose GPU memory if the cache fits beside training for every process; else host memory, else its shards.

    ``cache`` are its bytes, of which every process holds a copy. ``epochs`` is how often the run reads a sample.
    ``is_remote``: the cache is at a URL. ``why_not_device`` is another reason against GPU memory.
    """
    on_gpus = [(room.gpu, room.training) for room in rooms if room.gpu is not None]
    if len(on_gpus) < len(rooms):
        return ResidenceChoice("stream", "on a CPU the model takes longer than reading")
    if is_remote:
        return ResidenceChoice("stream", "shards at a URL are fetched while the model trains")
    if epochs < 1:
        return ResidenceChoice("stream", f"the run reads only {epochs:.0%} of the cache")
    takes = f"it takes {format_bytes(cache)}"
    left = min(int(min(USABLE * total - training, LARGEST_SHARE * total)) for total, training in on_gpus)
    gpu = why_not_device or f"GPU memory has room for {format_bytes(max(0, left))} beside training"
    if why_not_device is None and cache <= left:
        return ResidenceChoice("device", f"{takes}; {gpu}")
    shares = [AUTO_SHARE * room.host / room.processes for room in rooms if room.host is not None]
    if len(shares) < len(rooms):
        return ResidenceChoice("stream", f"{takes}; {gpu}; the free host memory is unknown")
    host = f"half of the free host memory is {format_bytes(min(shares))} per process"
    return ResidenceChoice("host" if cache <= min(shares) else "stream", f"{takes}; {gpu}; {host}")
