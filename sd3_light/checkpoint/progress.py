"""The counters of a run, and the names under which a checkpoint stores averages."""

from dataclasses import asdict, dataclass

EMA = "ema"


@dataclass(frozen=True)
class Progress:
    """Counters of a run: optimizer steps attempted, samples seen, steps skipped, and the position in the data order.

    The position is the number of steps since the start of the data; only `--reset-dataloader` resets it.
    """

    step: int = 0
    samples: int = 0
    skipped: int = 0
    position: int = 0

    def after(self, samples: int) -> "Progress":
        """Return the progress one step later."""
        return Progress(self.step + 1, self.samples + samples, self.skipped, self.position + 1)

    def as_dict(self) -> dict[str, int]:
        """Return the counters for JSON."""
        return asdict(self)

    def counts(self) -> dict[str, int]:
        """Return the counters that every log line contains."""
        return {"step": self.step, "samples": self.samples}


def track_kind(track: str) -> str:
    """Return the kind under which an average's tensors are saved: `ema` for the main one, `ema.NAME` for others."""
    return EMA if track == EMA else f"{EMA}.{track}"
