"""The one list of keys that the schema knows and this version cannot obey yet: they are faults, never ignored."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from sd3_light.config import Fault, LoadedConfig, TrainConfig


@dataclass(frozen=True)
class NotYet:
    """A feature that is not there: when it is asked for, by which key, and what to use in its place."""

    asked: Callable[[TrainConfig], bool]
    key: str
    instead: str


def _given(key: str) -> Callable[[TrainConfig], bool]:
    """Asked for by being written at all."""
    return lambda train: key in train.model_fields_set


# fmt: off
NOT_YET = (
    NotYet(lambda t: t.pipeline_stages > 1,                "pipeline_stages",               "write pipeline_stages = 1"),
    NotYet(lambda t: t.eval_gradient_accumulation_steps > 1, "eval_gradient_accumulation_steps", "remove it: pipelines alone use it"),
    NotYet(lambda t: t.parallel == "fsdp2",                "parallel",                      'write parallel = "ddp"'),
    NotYet(lambda t: t.optimizer.type != "adamw",          "optimizer.type",                'write type = "adamw"'),
    NotYet(lambda t: t.adapter is not None,                "adapter",                       "remove [adapter]: all weights train"),
    NotYet(lambda t: t.model.text_tokens == "real",        "model.text_tokens",             'write text_tokens = "padded"'),
    NotYet(lambda t: bool(t.ema.track),                    "ema.track",                     "keep the one track of [ema]"),
    NotYet(lambda t: t.monitoring.enable_wandb,            "monitoring.enable_wandb",       "remove it: TensorBoard and log.jsonl are written"),
    NotYet(lambda t: t.monitoring.enable_trackio,          "monitoring.enable_trackio",     "remove it: TensorBoard and log.jsonl are written"),
    NotYet(lambda t: not t.sd3_streaming_dataset,          "sd3_streaming_dataset",         "write sd3_streaming_dataset = true"),
    NotYet(_given("caching_num_workers"),                  "caching_num_workers",           "remove it: the caching process decodes itself"),
    NotYet(_given("map_num_proc"),                         "map_num_proc",                  "remove it: one process scans"),
)
# fmt: on


def not_yet_faults(loaded: LoadedConfig) -> Iterator[Fault]:
    """A fault for each key that asks for what is not there."""
    for line in NOT_YET:
        if line.asked(loaded.train):
            yield Fault(str(loaded.path), line.key, "this version does not have it yet", hint=line.instead)
