"""The parts verb: train VAE, tokenizers and text encoders on a dataset, and write them as an SD3 folder.

    OUT/model_index.json, scheduler/, tokenizer*/, text_encoder*/, vae/    what `diffusers_path` needs
    OUT/judge/                                                            image and text tower, to measure results with
    OUT/training/                                                         states to resume from, grids; may be deleted

The same command continues where an earlier one stopped. A finished part is not trained again; another folder with
`init` trains its VAE further.
"""

import json
import math
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from textwrap import shorten
from types import FrameType
from typing import Any, Literal

import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from transformers import PreTrainedTokenizerBase

from sd3_light import __version__
from sd3_light.checkpoint.requests import SIGNALS, RunRequests
from sd3_light.config import DatasetConfig, load_images
from sd3_light.config.faults import Stopped, UserError
from sd3_light.encoding.vae import LOW_PSNR
from sd3_light.engines import Launch
from sd3_light.evaluate.feature_model import MADE, save_feature_model
from sd3_light.files import apply_umask, new_folder, refuse_existing, write_atomically, write_errors
from sd3_light.inputs import read_json_file
from sd3_light.model.folder import JUDGE, WORK
from sd3_light.parts.contrastive import CaptionedImages, TextOptions, TextTask, Towers, captioned_images, is_of_judge
from sd3_light.parts.fit import Fit, FitOptions, Interrupted, Progress, interrupt_between_layers, saved_identity
from sd3_light.parts.images import Pool, load_pools, on_device
from sd3_light.parts.sizes import TEXT_SIZES, VAE_SIZES
from sd3_light.parts.text_encoders import encode, scale_outputs
from sd3_light.parts.tokenizers import (
    MAX_TOKENS,
    T5_FOLDER,
    learn_tokenizers,
    load_tokenizers,
    longest,
    save_tokenizers,
)
from sd3_light.parts.vae import VaeOptions, VaeTask, build_vae, channel_statistics, open_vae
from sd3_light.runlog import info

_TEXT_FOLDERS = ("text_encoder", "text_encoder_2", "text_encoder_3")
_CLASSES = {
    "scheduler": ("diffusers", "FlowMatchEulerDiscreteScheduler"),
    "text_encoder": ("transformers", "CLIPTextModelWithProjection"),
    "text_encoder_2": ("transformers", "CLIPTextModelWithProjection"),
    "text_encoder_3": ("transformers", "T5EncoderModel"),
    "tokenizer": ("transformers", "CLIPTokenizerFast"),
    "tokenizer_2": ("transformers", "CLIPTokenizerFast"),
    "tokenizer_3": ("transformers", "T5TokenizerFast"),
    "vae": ("diffusers", "AutoencoderKL"),
    **dict.fromkeys(("transformer", "feature_extractor", "image_encoder"), (None, None)),
}
_KEPT = "no part is in training, and what is finished is kept"
_SHOWN_CAPTION = 160  # letters
_SCALED_CAPTIONS = 2048  # captions that the scale of the text encoders is measured on


@dataclass(frozen=True)
class PartsOptions:
    """What to train and how. ``only`` is one of the parts; ``words`` are words of Chinese, Japanese or Korean that are
    one token each; ``stop_after`` limits this run in minutes. ``judge_share`` of the captions train a separate judge,
    and not the text encoders; with 0 the judge is the second text encoder."""

    only: Literal["vae", "text", "judge"] | None = None
    vae_size: str = "small"
    text_size: str = "small"
    channels: int = 16
    random_text: bool = False
    init: Path | None = None
    vae: VaeOptions = field(default_factory=VaeOptions)
    text: TextOptions = field(default_factory=TextOptions)
    vae_fit: FitOptions = field(default_factory=lambda: FitOptions(minutes=5))
    text_fit: FitOptions = field(default_factory=lambda: FitOptions(minutes=3))
    judge_share: float = 0.0
    judge_fit: FitOptions = field(default_factory=lambda: FitOptions(minutes=3))
    vocabulary: int = 8192
    words: tuple[str, ...] = ()
    max_images: int = 200_000
    workers: int | None = None
    stop_after: float | None = None


@dataclass(frozen=True)
class PartsResult:
    """The parts that a run trained, those that the folder still lacks, and the dataset they were trained on."""

    trained: tuple[str, ...]
    missing: tuple[str, ...]
    dataset: DatasetConfig

    @property
    def resolution(self) -> int:
        """The side of squares of about the largest area of the images, a multiple of 16."""
        directories = self.dataset.directories
        sizes = (size for one in directories for size in (*one.resolutions, *(one.size_buckets or ())))
        return max(16, *(round(math.sqrt(width * height) / 16) * 16 for width, height in sizes))


def run(data: Path, out: Path, options: PartsOptions | None = None) -> PartsResult:
    """Train the parts on a folder of captioned images, or those of a dataset TOML, and write them to ``out``."""
    options = options or PartsOptions()
    dataset = load_images(data)
    _open_folder(out)
    try:
        with write_errors(out), _stopping_at_once():
            return _PartsRun(dataset, out, options, RunRequests(out / WORK)).build()
    except Interrupted as error:  # after the last step
        raise Stopped(f"{error}; {_KEPT}") from error


@contextmanager
def _stopping_at_once() -> Iterator[None]:
    """Inside the block, in which nothing needs to be saved, SIGTERM and SIGINT end the run at once."""

    def stop(number: int, frame: FrameType | None) -> None:
        for each in SIGNALS:  # another signal changes nothing
            signal.signal(each, signal.SIG_IGN)
        raise Stopped(f"{signal.Signals(number).name}; {_KEPT}")

    previous = {number: signal.signal(number, stop) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in previous.items():
            if signal.getsignal(number) is stop:
                signal.signal(number, handler)


def _open_folder(out: Path) -> None:
    """Create the folder, or recognize it as one of an earlier run by its working folder."""
    if not (out / WORK).is_dir():
        if not out.is_dir() or any(out.iterdir()):
            refuse_existing(out)
        (out / WORK).mkdir(parents=True)


def _stop_rule(requests: RunRequests, minutes: float | None) -> Callable[[], str | None]:
    deadline = None if minutes is None else time.monotonic() + 60 * minutes

    def reason() -> str | None:
        requests.poll()
        if requests.quit:
            return requests.reason
        is_late = deadline is not None and time.monotonic() > deadline
        return f"--stop-after {minutes:g} minutes" if is_late else None

    return reason


class _PartsRun:
    """One run of the verb."""

    def __init__(self, dataset: DatasetConfig, out: Path, options: PartsOptions, requests: RunRequests) -> None:
        self.dataset = dataset
        self.out = out
        self.options = options
        self.requests = requests
        self.should_stop = _stop_rule(requests, options.stop_after)
        self.device = Launch().device()
        torch.backends.cudnn.benchmark = self.device.type == "cuda"

    def build(self) -> PartsResult:
        """Train what is missing."""
        todo = tuple(name for name in self._missing() if self.options.only in (None, name))
        if todo:
            self._train(todo)
        self._warn_of_low_psnr()
        return PartsResult(todo, self._missing(), self.dataset)

    def _train(self, todo: Sequence[str]) -> None:
        workers = self.options.workers if self.options.workers is not None else min(16, (os.cpu_count() or 2) - 1)
        pools = load_pools(self.dataset, self.out / WORK, self.options.max_images, workers)
        total = sum(len(pool.ids) for pool in pools)
        held_out = sum(pool.held_out for pool in pools)
        if not held_out and ("vae" in todo or not self.options.random_text):
            raise UserError(
                f"{total} images are too few: none is held out to measure training with; give at least 4 of one size"
            )
        info(f"{total:,} images, {held_out:,} of them held out")
        tokenizers = self._tokenizers(pools)
        self._write_index()
        if "vae" in todo:
            self._train_vae(pools)
        if "text" in todo:
            self._train_text(pools, tokenizers)
        if "judge" in todo:
            self._train_judge(pools, tokenizers)

    def _missing(self) -> tuple[str, ...]:
        """Return the parts that are not trained, by the last folder that each writes."""
        last = {"vae": "vae", "text": _TEXT_FOLDERS[-1]} | ({"judge": JUDGE} if self.options.judge_share else {})
        return tuple(part for part, folder in last.items() if not (self.out / folder / MADE).is_file())

    def _warn_of_low_psnr(self) -> None:
        made = self.out / "vae" / MADE
        history = read_json_file(made).get("history") if made.is_file() else None  # a copied VAE has none
        if history and (score := history[-1]["psnr"]) < LOW_PSNR:
            info(
                f"warning: the VAE reconstructs held-out images with {score:.1f} dB, below {LOW_PSNR:g} dB: what they "
                f"show is lost before training. {self.out / WORK / 'vae' / 'grid.png'} shows it; train it longer, with "
                f"a higher --vae-minutes and --init {self.out} in another folder"
            )

    def _tokenizers(self, pools: list[Pool]) -> dict[str, PreTrainedTokenizerBase]:
        """Return the tokenizers, learned unless an earlier run did; training depends on them."""
        done = self.out / WORK / "tokenizers.json"
        if not done.is_file():
            captions = sorted({text for pool in pools for texts in pool.captions for text in texts})
            tokenizers = learn_tokenizers(captions, self.options.vocabulary, self.options.words)
            most = {name: longest(tokenizer, captions) for name, tokenizer in tokenizers.items()}
            example = max(captions, key=lambda caption: longest(tokenizers[T5_FOLDER], [caption]))
            if max(most.values()) > MAX_TOKENS:
                info(f"warning: the longest caption has {max(most.values()):,} tokens; {MAX_TOKENS} are used")
            save_tokenizers(tokenizers, self.out)
            facts = {"captions": len(captions), "longest": most, "tokens": {n: len(t) for n, t in tokenizers.items()}}
            write_atomically(done, json.dumps(facts).encode())
            text = f"the longest has {max(most.values())} tokens: {shorten(example, _SHOWN_CAPTION)}"
            info(f"tokenizers: {len(captions):,} different captions; {text}")
        return load_tokenizers(self.out)

    def _write_index(self) -> None:
        FlowMatchEulerDiscreteScheduler(shift=1.0).save_pretrained(self.out / "scheduler")
        index = {"_class_name": "StableDiffusion3Pipeline", "_diffusers_version": "0.42.0", **_CLASSES}
        write_atomically(self.out / "model_index.json", (json.dumps(index, indent=1) + "\n").encode())

    def _train_vae(self, pools: list[Pool]) -> None:
        options = self.options
        work = self.out / WORK / "vae"
        own = replace(options.vae, batch=options.vae.batch or saved_identity(work).get("batch"))
        pools = on_device(pools, self.device)
        start = build_vae(VAE_SIZES[options.vae_size], options.channels, own.seed)
        vae = start if options.init is None else open_vae(options.init)
        task = VaeTask(vae, pools, self.device, own, work / "grid.png")
        if options.init is None:
            task.start_new()
        else:
            task.start_from()
        millions = sum(value.numel() for value in vae.parameters()) / 1e6
        info(f"vae: {millions:.1f} M parameters on {self.device}, {task.batch} images per step")
        own = task.options
        init = None if options.init is None else options.init.name
        identity = {**_facts(own), "channels": options.channels, "size": options.vae_size, "images": _digests(pools),
                    "init": init}  # fmt: skip
        fit = Fit("vae", task, options.vae_fit, work, identity)
        progress = self._fit(fit)
        fit.use_averages()
        finished = task.finished()
        mean, std = channel_statistics(finished, pools, self.device)
        note = {"latent_mean": _rounded(mean), "latent_std": _rounded(std), **self._note(identity, progress)}
        with new_folder(self.out / "vae", replace=True) as folder:
            finished.cpu().save_pretrained(folder)
            _write_note(folder, note)

    def _train_text(self, pools: list[Pool], tokenizers: dict[str, PreTrainedTokenizerBase]) -> None:
        options = self.options
        work = self.out / WORK / "text"
        share = self.options.judge_share
        images = captioned_images(pools, tokenizers, self.device, lambda caption: not is_of_judge(caption, share))
        task = self._text_task(tokenizers, images, work, options.text.seed)
        identity = self._text_identity(task, pools)
        note: dict[str, Any] = {**identity, "version": __version__}
        if not options.random_text:
            note = self._train_towers("text", task, options.text_fit, identity)
            if not share:
                self._write_judge(task, tokenizers, note)
        self._write_encoders(task, images, note)

    def _train_judge(self, pools: list[Pool], tokenizers: dict[str, PreTrainedTokenizerBase]) -> None:
        """Train a separate judge: other weights, other batches, other captions."""
        share = self.options.judge_share
        images = captioned_images(pools, tokenizers, self.device, lambda caption: is_of_judge(caption, share))
        task = self._text_task(tokenizers, images, self.out / WORK / JUDGE, self.options.text.seed + 1)
        note = self._train_towers(JUDGE, task, self.options.judge_fit, self._text_identity(task, pools))
        self._write_judge(task, tokenizers, note)

    def _text_task(
        self, tokenizers: dict[str, PreTrainedTokenizerBase], images: CaptionedImages, work: Path, seed: int
    ) -> TextTask:
        count = len(images.pixels) - images.held_out
        if count < 2:
            raise UserError(f"{count} images are too few for {work.name}; give another --judge-share")
        batch = self.options.text.batch or saved_identity(work).get("batch")
        towers = Towers(TEXT_SIZES[self.options.text_size], tokenizers, images.pixels.shape[1], seed)
        return TextTask(towers, images, self.device, replace(self.options.text, batch=batch, seed=seed))

    def _text_identity(self, task: TextTask, pools: list[Pool]) -> dict[str, Any]:
        options = self.options
        facts = {"size": options.text_size, "random": options.random_text, "images": _digests(pools)}
        share = {"judge_share": options.judge_share} if options.judge_share else {}
        return {**_facts(task.options), **facts, **share}

    def _train_towers(
        self, title: str, task: TextTask, fit_options: FitOptions, identity: Mapping[str, Any]
    ) -> dict[str, Any]:
        millions = sum(value.numel() for value in task.towers.parameters()) / 1e6
        pairs = len(task.data.pixels) - task.data.held_out
        info(f"{title}: {millions:.1f} M parameters on {self.device}, {task.batch} of {pairs:,} pairs per step")
        fit = Fit(title, task, fit_options, self.out / WORK / title, identity)
        note = self._note(identity, self._fit(fit))
        fit.use_averages()
        return note

    def _write_judge(
        self, task: TextTask, tokenizers: dict[str, PreTrainedTokenizerBase], note: Mapping[str, Any]
    ) -> None:
        with new_folder(self.out / JUDGE, replace=True) as folder:
            save_feature_model(task.judge(), tokenizers["tokenizer_2"], task.data.pixels.shape[1], folder)
            _write_note(folder, note)

    def _fit(self, fit: Fit) -> Progress:
        """Train; a signal stops it after the step, on a CPU also inside of one."""
        if self.device.type == "cpu":
            interrupt_between_layers(fit.task.model, lambda: self.requests.signal)
        with self.requests.handling_signals():
            return fit.run(self.should_stop)

    def _write_encoders(self, task: TextTask, images: CaptionedImages, note: Mapping[str, Any]) -> None:
        for name, model, ids in zip(_TEXT_FOLDERS, task.encoders(), images.ids, strict=True):
            stride = -(-len(ids) // _SCALED_CAPTIONS)
            with torch.no_grad():
                scale_outputs(model, *encode(model, ids[::stride].cpu()))
            with new_folder(self.out / name, replace=True) as folder:
                model.save_pretrained(folder)
                _write_note(folder, note)

    def _note(self, identity: Mapping[str, Any], progress: Progress) -> dict[str, Any]:
        device = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu"
        return {
            **identity, "version": __version__, "device": device, "steps": progress.step,
            "seconds": round(progress.seconds), "history": progress.history,
        }  # fmt: skip


def _facts(options: VaeOptions | TextOptions) -> dict[str, Any]:
    facts = asdict(options)
    del facts["compile"]
    return facts


def _digests(pools: list[Pool]) -> list[str]:
    return [pool.digest for pool in pools]


def _rounded(values: torch.Tensor) -> list[float]:
    return [round(value, 4) for value in values.tolist()]


def _write_note(folder: Path, note: Mapping[str, Any]) -> None:
    """Write what made a part beside its weights, which then get the permissions of any new file."""
    for path in folder.glob("*.safetensors"):
        apply_umask(path)
    (folder / MADE).write_text(json.dumps(note, indent=1) + "\n", encoding="utf-8")


def check_options(options: PartsOptions) -> None:
    """Raise a UserError for options that contradict each other or name unknown sizes."""
    for key, sizes in (("vae_size", VAE_SIZES), ("text_size", TEXT_SIZES)):
        if (size := getattr(options, key)) not in sizes:
            raise UserError(f"--{key.replace('_', '-')}: unknown size {size!r}; give one of {', '.join(sizes)}")
    if options.only not in (None, "vae", "text", "judge"):
        raise UserError(f"--only: unknown part {options.only!r}; give vae, text or judge")
    if options.only == "judge" and not options.judge_share:
        raise UserError("--only judge trains a separate judge; give the share of the captions with --judge-share")
    if options.random_text and options.judge_share:
        raise UserError("--random-text trains on no captions; leave out --judge-share")
    if options.vae.decoder_only and options.init is None:
        raise UserError("--decoder-only keeps an existing encoder; give its VAE with --init")
