"""The run's folder: resolved config, log, samples, checkpoints, exports. Only the main process writes."""

import tomllib
from contextlib import ExitStack
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

from PIL import Image

from sd3_light.checkpoint.lock import locked_folder
from sd3_light.checkpoint.progress import Progress
from sd3_light.config import LoadedConfig, TrainConfig, resolved_toml
from sd3_light.files import OWN_FILES, sweep_files, write_atomically
from sd3_light.runlog import RunLog
from sd3_light.runlog.trackers import open_trackers


class RunFolder:
    """``<output_dir>``, locked for one run at a time. Nothing in it changes before `begin`."""

    def __init__(self, loaded: LoadedConfig, is_main: bool) -> None:
        self.loaded = loaded
        self.path = loaded.train.output_dir
        self.is_main = is_main
        self._log: RunLog | None = None
        self._lock = ExitStack()
        self._has_stopped = False

    def __enter__(self) -> Self:
        if self.is_main:
            self._lock.enter_context(locked_folder(self.path))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._log is not None:
            if error is not None and not self._has_stopped:
                self._log.event("stop", reason=str(error) or type(error).__name__)
            self._log.close()
        self._lock.close()

    def begin(self, config: TrainConfig) -> None:
        """Write the settings in force, some of which may be a checkpoint's, and open the log."""
        if self.is_main:
            sweep_files(self.path, OWN_FILES)
            resolved = resolved_toml(replace(self.loaded, train=config))
            write_atomically(self.path / "config.toml", resolved.encode())
            key = config.monitoring.wandb_api_key
            secrets = () if key is None else (key.get_secret_value(),)
            axis = "samples" if config.x_axis_examples else "step"
            trackers = open_trackers(config.monitoring, self.path, tomllib.loads(resolved), axis)
            self._log = RunLog(self.path, trackers=trackers, secrets=secrets, x_axis=axis)

    def log(self, event: str, **fields: Any) -> None:
        """Append a line to log.jsonl."""
        if self._log is not None:
            self._has_stopped |= event == "stop"
            self._log.event(event, **fields)

    def log_image(self, image: Image.Image, progress: Progress, weights: str) -> None:
        """Send a grid of samples to TensorBoard and the trackers."""
        if self._log is not None:
            self._log.image(f"samples/{weights}", image, **progress.counts())
