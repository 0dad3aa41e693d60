"""The whole journey of a user with a tiny model, by the installed command: from `new` to `report`."""

import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from sd3_light.core.registry import family_of_folder
from sd3_light.world import draw_image
from tests.e2e.live import Log
from tests.waiting import HANG_SECONDS, wait_until

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
SIDE = 64
WIDE = 8
SQUARE = 16
PROMPT = "a red fox on a mat"
STEPS = 16
"""More than an epoch of two processes, which has 12."""
KEYS = {"max_steps": STEPS, "micro_batch_size_per_gpu": 1, "checkpoint_every_n_steps": 1000}
KEYS |= {"save_every_n_steps": 1000, "warmup_steps": 1, "sampling.steps": 2, "sampling.every_n_steps": STEPS}
KEYS |= {"save_dtype": '"float32"', "model.dtype": '"float32"', "num_dataloader_workers": 0, "caching_num_workers": 0}


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


@dataclass(frozen=True)
class Journey:
    """A project of `new` in a folder with a model and images."""

    folder: Path
    kind: str
    guidance: float = 3.5

    @property
    def toml(self) -> Path:
        """The train TOML."""
        return self.folder / f"{self.kind}.toml"

    def command(self, *words: object, launcher: tuple[str, ...] = (), code: int = 0) -> str:
        """Run the command; return what it printed."""
        command = [sys.executable, *launcher, "-m", "sd3_light", *map(str, words)]
        done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False, timeout=900)
        output = done.stdout + done.stderr
        assert done.returncode == code, f"{' '.join(map(str, words))}: {done.returncode}\n{output}"
        return output

    def settings(self, run: str) -> list[str]:
        """Return the options of a short run in float32."""
        keys = {**KEYS, "output_dir": f'"{run}"'}
        return [word for key, value in keys.items() for word in ("--set", f"{key}={value}")]

    def train(self, run: str, *flags: str) -> str:
        """Train in two processes."""
        return self.command("train", self.toml, *flags, *self.settings(run), launcher=TORCHRUN)

    def stop(self, run: str) -> int:
        """Train in two processes, and stop them by SIGTERM in the first epoch; return the last step."""
        output, pids = self.folder / "stopped.txt", self.folder / "pid.txt"
        pids.unlink(missing_ok=True)
        command = [sys.executable, *TORCHRUN, "-m", "sd3_light", "train", str(self.toml), *self.settings(run)]
        log = Log(self.folder / run / "log.jsonl")
        with output.open("wb") as file:
            variables = {**environment(), "SD3_LIGHT_TEST_PID_FILE": str(pids)}
            process = subprocess.Popen(command, stdout=file, stderr=file, env=variables, start_new_session=True)
        try:
            wait_until(lambda: log.read("step") or process.poll() is not None, output.read_text)
            process.send_signal(signal.SIGTERM)
            process.wait(HANG_SECONDS)
        finally:
            process.kill()
        assert [event["reason"] for event in log.read("stop")] == ["SIGTERM"], output.read_text()
        return int(log.read("step")[-1]["step"])

    def sample(self, out: str, *words: object) -> Any:
        """Draw one image, or clip of one frame; return its pixels."""
        size = ("--width", SIDE, "--height", SIDE, "--steps", 2, "--seed", 3, "--guidance", self.guidance)
        frames = ("--frames", 1) if self.is_video else ()
        self.command("sample", *words, PROMPT, "--out", self.folder / out, "--no-grid", *size, *frames)
        return np.asarray(Image.open(self.folder / out / "00000.png"))

    @property
    def is_video(self) -> bool:
        """Whether the model draws clips."""
        return family_of_folder(self.folder / "model").media == "video"


def environment() -> dict[str, str]:
    """Return the environment of commands: one thread, and the CPU, which computes the same bits each time."""
    return {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


def stock_image(model: Path, guidance: float, lora: Path | None = None) -> Any:
    """Return the pixels of an image that the stock pipeline draws of a prompt."""
    import diffusers

    pipe: Any = diffusers.DiffusionPipeline.from_pretrained(model, local_files_only=True, torch_dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    if lora is not None:
        pipe.load_lora_weights(lora, weight_name="pytorch_lora_weights.safetensors")
    name = family_of_folder(model).name
    arguments: dict[str, Any] = {"guidance_scale": guidance}
    if name == "qwen_image":
        arguments = {"true_cfg_scale": guidance, "negative_prompt": " "}
    if name == "sana":
        arguments["use_resolution_binning"] = False
    if name == "wan":
        arguments["num_frames"] = 1
    generator = torch.Generator("cpu").manual_seed(3)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        result = pipe(
            PROMPT, width=SIDE, height=SIDE, num_inference_steps=2, generator=generator, output_type="pil", **arguments
        )[0][0]
    finally:
        torch.set_num_threads(before)
    return np.asarray(result[0] if name == "wan" else result)


def shards(cache: Path) -> dict[str, bytes]:
    """Return the shards of a cache by name."""
    return {path.name: path.read_bytes() for path in sorted((cache / "shards").glob("*.safetensors"))}


def sd3_words(text: str) -> list[str]:
    """Return the words that only SD3's users know."""
    return re.findall(r"t5_max_length|text_encoder_3|\bSD3(?!-Light)[.5]*|Stable Diffusion 3", text)
