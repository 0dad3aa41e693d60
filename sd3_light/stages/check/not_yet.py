"""The one list of keys that the schema knows and training cannot obey yet: they are faults, never ignored."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from sd3_light.config import Fault, LoadedConfig, TrainConfig


@dataclass(frozen=True)
class NotYet:
    """A feature that is not there: the key that asks for it, when it does so, and what to write in its place."""

    key: str
    asked: Callable[[TrainConfig], bool]
    instead: str


# One feature a line: delete the line when the feature lands.
# fmt: off
NOT_YET = (
    NotYet("pipeline_stages", lambda t: t.pipeline_stages > 1, "write pipeline_stages = 1"),
    NotYet("eval_gradient_accumulation_steps", lambda t: t.eval_gradient_accumulation_steps > 1, "remove it"),
    NotYet("partition_method", lambda t: t.partition_method != "parameters", "remove it: for pipelines"),
)
# fmt: on


def not_yet_faults(loaded: LoadedConfig) -> Iterator[Fault]:
    """A fault for each key that asks for what is not there."""
    for line in NOT_YET:
        if line.asked(loaded.train):
            yield Fault(str(loaded.path), line.key, "this version does not have it yet", hint=line.instead)
