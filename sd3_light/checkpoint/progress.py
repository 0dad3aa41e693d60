"""The one list of what a checkpoint holds, besides what the engine's optimizer remembers."""

from dataclasses import asdict, dataclass, replace

EMA = "ema"


@dataclass(frozen=True)
class Progress:
    """Counters of a run: optimizer steps tried, samples seen, steps not taken, and the position in the order of data.

    The position is the number of steps since the data began; `--reset_dataloader` sets it back and nothing else.
    """

    step: int = 0
    samples: int = 0
    skipped: int = 0
    position: int = 0

    def after(self, samples: int) -> "Progress":
        """One step later."""
        return Progress(self.step + 1, self.samples + samples, self.skipped, self.position + 1)

    def skipping(self, steps: int) -> "Progress":
        """With so many more steps known not to have been taken."""
        return replace(self, skipped=self.skipped + steps)

    def as_dict(self) -> dict[str, int]:
        """For JSON."""
        return asdict(self)

    def counts(self) -> dict[str, int]:
        """What every line of the log says."""
        return {"step": self.step, "samples": self.samples}


def track_kind(track: str) -> str:
    """The kind under which a running average's tensors are saved; the main one is `ema` alone."""
    return EMA if track == EMA else f"{EMA}.{track}"
