"""The whole journey of a user with a tiny model, by the installed command: from `new` to `report`."""

import inspect
import os
import re
import signal
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import DiffusionPipeline, QwenImagePipeline
from PIL import Image

from sd3_light.core.registry import family_of_folder
from sd3_light.world import draw_image
from tests import warm
from tests.e2e.live import TORCHRUN, Log
from tests.waiting import HANG_SECONDS, wait_until

SIDE = 64
SQUARE = 16
WIDE = 8
EPOCH = (SQUARE + WIDE) // 2
"""Steps of two processes."""
STEPS = EPOCH + 8
PROMPT = "a red fox on a mat"
GUIDANCE = 3.5
KEYS = {"max_steps": STEPS, "micro_batch_size_per_gpu": 1, "checkpoint_every_n_steps": 1000, "warmup_steps": 1}
KEYS |= {"sampling.steps": 2, "sampling.every_n_steps": STEPS, "save_dtype": '"float32"', "model.dtype": '"float32"'}
KEYS |= {"num_dataloader_workers": 0, "caching_num_workers": 0}
KINDS = {
    "lora": {"save_every_n_steps": 1000},
    "finetune": {"epochs": 1000, "save_every_n_epochs": 1000, "optimizer.lr": 1e-3},
}


def write_images(folder: Path) -> Path:
    """Write images of two aspect ratios, two of them with one caption, and a broken file."""
    folder.mkdir(parents=True)
    for index in range(SQUARE + WIDE):
        size = (SIDE, SIDE) if index < SQUARE else (2 * SIDE, SIDE)
        draw_image(index, 1)[0].resize(size).save(folder / f"{index:02}.png")
        caption = "one caption of two images" if index in (1, SQUARE + 1) else f"image {index} of a fox"
        (folder / f"{index:02}.txt").write_text(caption, encoding="utf-8")
    (folder / "broken.png").write_bytes((folder / "00.png").read_bytes()[:200])
    (folder / "broken.txt").write_text("a broken file", encoding="utf-8")
    return folder


@dataclass
class Journey:
    """A project of `new` in a folder with the folders `model` and `images`.

    ``packages`` is a folder of packages that the model needs and this environment has not. ``output`` is all that
    commands printed.
    """

    folder: Path
    kind: str
    packages: Path | None = None
    output: str = ""

    @property
    def toml(self) -> Path:
        return self.folder / f"{self.kind}.toml"

    @property
    def model(self) -> Path:
        return self.folder / "model"

    def command(self, *words: object, launcher: Sequence[str] = ()) -> str:
        line, environment = self._line(words, launcher), self._environment()
        done = subprocess.run(line, env=environment, capture_output=True, text=True, check=False)
        output = done.stdout + done.stderr
        assert done.returncode == 0, f"{words}: {done.returncode}\n{output}"
        self.output += output
        return output

    def stop(self, run: str) -> int:
        """Train in two processes and stop them by SIGTERM after a step; return the last step."""
        output = self.folder / f"{run}.txt"
        log = Log(self.folder / run / "log.jsonl")
        line = self._line(("train", self.toml, *self.settings(run)), TORCHRUN)
        with output.open("wb") as file:
            process = subprocess.Popen(line, stdout=file, stderr=file, env=self._environment())
        try:
            wait_until(lambda: log.read("step") or process.poll() is not None, output.read_text)
            process.send_signal(signal.SIGTERM)
            process.wait(HANG_SECONDS)
        finally:
            process.kill()
            process.wait()
        assert [event["reason"] for event in log.read("stop")] == ["SIGTERM"], output.read_text()
        return int(log.read("step")[-1]["step"])

    def settings(self, run: str) -> list[str]:
        """Return the options of a short run in float32."""
        keys = {**KEYS, **KINDS[self.kind], "output_dir": f'"{run}"'}
        return [word for key, value in keys.items() for word in ("--set", f"{key}={value}")]

    def sample(self, out: Path, *words: object) -> Any:
        """Draw an image; return its pixels."""
        size = ("--width", SIDE, "--height", SIDE, "--steps", 2, "--seed", 3, "--guidance", GUIDANCE)
        frames = ("--frames", 1) if family_of_folder(self.model).media == "video" else ()
        self.command("sample", *words, PROMPT, "--out", out, "--no-grid", *size, *frames)
        return np.asarray(Image.open(out / "00000.png"))

    def stock_image(self, model: Path, lora: Path | None = None) -> Any:
        """Return the pixels of the same image of the stock pipeline, with text of the length of training."""
        table = tomllib.loads(self.toml.read_text(encoding="utf-8"))["model"]
        length = table.get("text_max_length", table.get("t5_max_length"))
        pipe: Any = DiffusionPipeline.from_pretrained(model, dtype=torch.float32, local_files_only=True)
        pipe.set_progress_bar_config(disable=True)
        if lora is not None:
            pipe.load_lora_weights(lora, weight_name="pytorch_lora_weights.safetensors")
        known = inspect.signature(type(pipe).__call__).parameters
        options = {"max_sequence_length": length, "use_resolution_binning": False, "num_frames": 1}
        if isinstance(pipe, QwenImagePipeline):
            options |= {"true_cfg_scale": GUIDANCE, "negative_prompt": ""}
        options = {key: value for key, value in options.items() if key in known}
        options |= {"width": SIDE, "height": SIDE, "num_inference_steps": 2, "guidance_scale": GUIDANCE}
        generator = torch.Generator("cpu").manual_seed(3)
        result = pipe(prompt=PROMPT, generator=generator, output_type="pil", **options)[0][0]
        return np.asarray(result[0] if isinstance(result, list) else result)

    def _line(self, words: Sequence[object], launcher: Sequence[str]) -> list[str]:
        python = sys.executable if self.packages is None else warm.REAL_PYTHON  # the server has imported its own
        return [python, *launcher, "-m", "sd3_light", *map(str, words)]

    def _environment(self) -> dict[str, str]:
        """Return the variables of commands: only the CPU computes the same bits each time."""
        paths = {} if self.packages is None else {"PYTHONPATH": str(self.packages)}
        return {**os.environ, **paths, "CUDA_VISIBLE_DEVICES": ""}


def shards(cache: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((cache / "shards").glob("*.safetensors"))}


def sd3_words(text: str) -> list[str]:
    """Return the words that only SD3's users know."""
    return re.findall(r"t5_max_length|text_encoder_3|\bSD3(?!-Light)[.5]*|Stable Diffusion 3", text)


def write_ftfy(folder: Path) -> Path:
    """Write a package that stands in for ftfy, with which PRX cleans captions."""
    facts = folder / "ftfy-6.3.1.dist-info"
    facts.mkdir(parents=True)
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: ftfy\nVersion: 6.3.1\n", encoding="utf-8")
    (folder / "ftfy.py").write_text("def fix_text(text):\n    return text\n", encoding="utf-8")
    return folder
