"""Clips and images from the command line: new, check, cache, train, resume, export and sample with a tiny Wan."""

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from diffusers import WanPipeline
from PIL import Image
from safetensors.torch import load_file

from sd3_light.core.columns import Bucket, named_bucket
from sd3_light.data.manifest import Manifest
from sd3_light.export.wan_names import wan_to_comfyui
from sd3_light.runlog import read_log
from sd3_light.sources.video import has_av, probe_video
from tests.stock import save_stock
from tests.unit.sources.videos import encode, encode_gif, numbered

pytestmark = pytest.mark.skipif(not has_av(), reason="PyAV (av) is not installed")
COMMAND = ("-m", "sd3_light")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m", "sd3_light")
WIDE, TALL, LONG = (96, 48), (48, 96), 14
SET = ("--set", "num_dataloader_workers=0", "--set", "sampling.steps=2", "--set", "sampling.every_n_steps=2")
KEYS = (*SET, "--set", "max_steps=4", "--set", "checkpoint_every_n_steps=2", "--set", "save_every_n_steps=4")


def run(folder: Path, *arguments: object, by: Sequence[str] = COMMAND, code: int = 0) -> str:
    """Run a command in a folder; return what it prints."""
    command = [sys.executable, *by, *map(str, arguments)]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600, check=False)
    assert result.returncode == code, result.stdout + result.stderr
    return result.stdout + result.stderr


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, clips of two shapes and two lengths, images, a broken clip and one that is too short."""
    folder = tmp_path_factory.mktemp("wan")
    save_stock("wan", folder / "model")
    clips = folder / "clips"
    clips.mkdir()
    files = {f"wide{number}.mp4": encode(numbered(LONG, WIDE), 16 + number) for number in range(4)}
    files |= {f"tall{number}.mp4": encode(numbered(7, TALL), 16 + number) for number in range(3)}
    files |= {
        "tall.gif": encode_gif(numbered(LONG, TALL)),
        "broken.mp4": files["wide0.mp4"][:200],
        "short.mp4": encode(numbered(3, WIDE)),
    }
    for name, data in files.items():
        (clips / name).write_bytes(data)
        (clips / name).with_suffix(".txt").write_text(f"a stripe, {name}", encoding="utf-8")
    for number in range(2):
        colours = np.random.default_rng(number).integers(0, 255, (96, 48, 3), dtype=np.uint8)
        Image.fromarray(colours).save(clips / f"still{number}.png")
        (clips / f"still{number}.txt").write_text("a still image", encoding="utf-8")
    run(folder, "new", "lora", "--model", "model", "--data", "clips", "--resolution", "64")
    data = (folder / "lora_data.toml").read_text(encoding="utf-8")
    assert "frames = 81 " in data
    # every frame of a video, whatever its rate
    (folder / "lora_data.toml").write_text(re.sub(r"fps = .*\n", "", data), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def trained(project: Path) -> Path:
    """The project after a run without interruption."""
    run(project, "train", "lora.toml", *KEYS)
    return project


def test_check_counts_clips_and_their_tokens(project: Path) -> None:
    text = run(project, "check", "lora.toml")
    for bucket, samples in (("96x48x13", 4), ("48x96x5", 3), ("48x96x13", 1), ("48x96", 2)):
        assert re.search(rf"^ *{bucket} +64x64 +{samples} ", text, re.MULTILINE), text
    assert "broken_video" in text
    assert "too_short" in text
    other = project / "wrong"
    other.mkdir()
    data = (project / "lora_data.toml").read_text(encoding="utf-8")
    data = re.sub(r"frames = .*", "frames = 80", data).replace('"clips"', f'"{project / "clips"}"')
    (other / "lora_data.toml").write_text(data, encoding="utf-8")
    train = (project / "lora.toml").read_text(encoding="utf-8").replace('"model"', f'"{project / "model"}"')
    (other / "lora.toml").write_text(train, encoding="utf-8")
    text = run(other, "check", "lora.toml", code=2)
    assert "clips of Wan have 4·n + 1 frames" in text
    assert "77 or 81" in text


def test_a_cache_has_buckets_with_frames(trained: Path) -> None:
    manifest = Manifest.load(trained / "lora_data.cache")
    counts: dict[Bucket, int] = {}
    for shard in manifest.shards:
        bucket = named_bucket(shard.bucket)
        counts[bucket] = counts.get(bucket, 0) + shard.count
        moments = load_file(trained / "lora_data.cache" / "shards" / shard.file)["moments"]
        frames = (bucket.frames - 1) // 4 + 1
        assert moments.shape[2:] == (8, frames, bucket.height // 8, bucket.width // 8)
    assert counts == {Bucket(48, 96): 2, Bucket(48, 96, 5): 3, Bucket(48, 96, 13): 1, Bucket(96, 48, 13): 4}
    rejects = (trained / "lora_data.cache" / "rejects.jsonl").read_text(encoding="utf-8").splitlines()
    reasons = {Path(json.loads(line)["key"]).name: json.loads(line)["reason"] for line in rejects}
    assert reasons == {"broken.mp4": "broken_video", "short.mp4": "too_short"}


@pytest.mark.slow
def test_two_processes_train_like_one(trained: Path) -> None:
    settings = ("--set", "output_dir='both'", "--set", "micro_batch_size_per_gpu=1", "--trust-cache")
    run(trained, "train", "lora.toml", *KEYS, *settings, by=TORCHRUN)
    alone, both = (
        [event["loss"] for event in read_log(trained / name / "log.jsonl") if event["event"] == "step"]
        for name in ("runs/lora", "both")
    )
    assert both == pytest.approx(alone, rel=1e-4)


def test_clips_are_sampled(trained: Path) -> None:
    options = ("--width", 96, "--height", 48, "--steps", 2, "--guidance", 5)
    run(trained, "sample", "runs/lora", "a stripe", *options, "--frames", 5)
    with open(trained / "samples" / "00000.mp4", "rb") as file:
        assert probe_video(file, (5,)).frames == 5
    with Image.open(trained / "samples" / "00000.png") as image:
        assert image.size == (96, 48)
    text = run(trained, "sample", "runs/lora", "a stripe", *options, "--frames", 6, code=2)
    assert "such as 5 or 9" in text


def test_grids_pages_and_loras_of_clips(trained: Path) -> None:
    """The commonest bucket has 13 frames; the PNG shows the one in the middle."""
    with Image.open(trained / "runs" / "lora" / "samples" / "step-00000004.webp") as grid:
        assert grid.n_frames == 13
    with Image.open(trained / "runs" / "lora" / "samples" / "step-00000004.png") as still:
        assert still.size == grid.size
    run(trained, "inspect", "lora_data.cache", "--out", "page.html")
    page = (trained / "page.html").read_text(encoding="utf-8")
    assert "96x48x13" in page
    assert len(re.findall(r"\d+ dB", page)) >= 10
    export = trained / "runs" / "lora" / "exports" / "step-00000004"
    tensors = load_file(export / "pytorch_lora_weights.safetensors")
    assert "diffusion_model.blocks.0.self_attn.q.lora_A.weight" in tensors
    assert wan_to_comfyui(tensors) == tensors
    pipe = WanPipeline.from_pretrained(trained / "model", local_files_only=True)
    pipe.load_lora_weights(str(export))
    assert len(pipe.get_list_adapters()["transformer"]) == 1
    assert "text-to-video" in (export / "README.md").read_text(encoding="utf-8")
