"""The run's folder: resolved config, log, samples, checkpoints, exports. Only the main process writes."""

import os
import tomllib
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from PIL import Image

from sd3_light.checkpoint.lock import take_folder
from sd3_light.checkpoint.state import Progress
from sd3_light.config import LoadedConfig, TrainConfig, resolved_toml
from sd3_light.data.files import write_atomically
from sd3_light.data.order import Order
from sd3_light.data.stream import CachedDataset
from sd3_light.engines import Launch
from sd3_light.runlog import RunLog, say
from sd3_light.runlog.trackers import open_trackers


class RunFolder:
    """``<output_dir>``, taken for one run at a time; nothing in it changes before the run announces itself."""

    def __init__(self, loaded: LoadedConfig, is_main: bool) -> None:
        self.loaded, self.path, self.is_main = loaded, loaded.train.output_dir, is_main
        self._log: RunLog | None = None
        self._lock: int | None = None

    def __enter__(self) -> Self:
        if self.is_main:
            self._lock = take_folder(self.path)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._log is not None:
            if fault is not None:
                self._log.event("stop", reason=str(fault) or type(fault).__name__)
            self._log.close()
        if self._lock is not None:
            os.close(self._lock)

    def announce(
        self,
        config: TrainConfig,
        start: str,
        progress: Progress,
        total: int,
        order: Order,
        launch: Launch,
        device: torch.device,
        checkpoint: Path | None,
        engine: str,
    ) -> None:
        """Open the log; say and write down what is about to happen."""
        padding = sum(bucket.padding for bucket in order.buckets)
        say(
            f"train: {start}; steps {progress.step} to {total}, {order.steps_per_epoch} an epoch in "
            f"{len(order.buckets)} buckets (padding repeats {padding} samples an epoch), {launch.world} process(es)"
        )
        if not self.is_main:
            return
        # with the settings in force, which may be the checkpoint's
        resolved = resolved_toml(replace(self.loaded, train=config))
        write_atomically(self.path / "config.toml", resolved.encode())
        self._log = self._open_log()
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
        facts = {"total": total, "steps_per_epoch": order.steps_per_epoch, "world": launch.world, "device": name}
        facts["trains"] = start
        event = "start" if checkpoint is None else "resume"
        source = {} if checkpoint is None else {"checkpoint": checkpoint.name}
        self.log(event, **progress.as_dict(), **facts, engine=engine, **source)

    def _open_log(self) -> RunLog:
        train = self.loaded.train
        key = train.monitoring.wandb_api_key
        secrets = () if key is None else (key.get_secret_value(),)
        axis = "samples" if train.x_axis_examples else "step"
        trackers = open_trackers(train.monitoring, self.path, tomllib.loads(resolved_toml(self.loaded)), axis)
        return RunLog(self.path, trackers=trackers, secrets=secrets, x_axis=axis)

    def log(self, event: str, **fields: Any) -> None:
        """One line of log.jsonl."""
        if self._log is not None:
            self._log.event(event, **fields)

    def picture(self, path: Path, image: Image.Image, progress: Progress, weights: str) -> None:
        """A grid of samples was drawn."""
        if self._log is not None:
            self._log.picture(f"samples/{weights}", image, **progress.counts())
        self.log("sample", **progress.counts(), weights=weights, file=str(path.relative_to(self.path)))

    def tell_dropped(self, data: CachedDataset, order: Order) -> None:
        """Name the buckets that are left out because they are smaller than a batch."""
        if order.dropped:
            buckets = {data.buckets[number].bucket: data.buckets[number].size for number in order.dropped}
            named = ", ".join(f"{name} ({size} samples)" for name, size in buckets.items())
            say(f"small_buckets = 'drop' leaves out {sum(buckets.values())} samples in smaller buckets: {named}")
            self.log("dropped", buckets=buckets)
