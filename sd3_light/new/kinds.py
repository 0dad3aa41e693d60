"""The kinds of projects that `sd3-light new` writes: one record each."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

_SD3 = "stabilityai/stable-diffusion-3-medium-diffusers"
_SD35 = "stabilityai/stable-diffusion-3.5-medium"


@dataclass(frozen=True)
class CpuScale:
    """What a CPU can train: samples per step, layers and heads of the denoiser, and minutes of training."""

    batch: int
    layers: int
    minutes: int


@dataclass(frozen=True)
class Kind:
    """A kind of project: its recipe, the default model, and the sizes that it aims at.

    ``batch`` is the number of samples per step, of which a GPU takes at most ``largest_micro_batch`` at a time. The
    length is ``epochs`` passes over the images, within ``shortest`` and ``longest`` steps, but at most ``most_epochs``
    passes. ``cpu`` replaces sizes and length on a CPU.
    """

    description: str
    recipe: str
    model: str
    resolution: int
    batch: int
    largest_micro_batch: int
    epochs: int
    shortest: int = 1
    longest: int | None = None
    most_epochs: int | None = None
    cpu: CpuScale | None = None
    continues: bool = False
    """Whether training starts from the weights of the model; otherwise it uses its text encoders and its VAE."""
    t5_length: int = 256
    shrunk: int = 1
    """How many times smaller the batch is than that of the recipe."""
    smaller_size: str | None = None
    """Size of the denoiser where the recipe's does not fit."""
    pads_for_others: bool = False
    """Whether text is padded if the model has encoders that other programs know, so that they draw the same images."""

    references: bool = False
    """Whether the model sees an image beside the text: that of the same name in the folder DATA-before."""
    distills: bool = False
    """Whether the model learns from itself with guidance and many steps, and is then drawn as it learnt."""
    draws: bool = False
    """Whether the run draws images of prompts, which are the captions, in place of training on images."""

    def with_fair_batch(self, buckets: Sequence[int]) -> "Kind":
        """Return the kind with the largest batch that shows no image much more often than others, and as many samples.

        ``buckets`` are their numbers of images: the samples of a bucket repeat to fill its last batch.
        """
        batch = self.batch
        while batch > 1 and not _is_fair(batch, buckets):
            batch //= 2
        shrunk = self.batch // batch
        return replace(self, batch=batch, shrunk=shrunk, shortest=self.shortest * shrunk)

    def steps(self, epoch_steps: int, affordable: int | None = None) -> int:
        """Return the number of optimizer steps, from those of an epoch; at most ``affordable``."""
        limits = (self.longest, self.most_epochs and self.most_epochs * epoch_steps, affordable)
        return min([max(self.shortest, self.epochs * epoch_steps), *(limit for limit in limits if limit is not None)])


def _is_fair(batch: int, buckets: Sequence[int]) -> bool:
    """Return whether no image has more than 1.5 times its share of an epoch, or 2% of it if that is more."""
    padded = [batch * math.ceil(images / batch) for images in buckets]
    largest = max((samples / images for samples, images in zip(padded, buckets, strict=True)), default=1.0)
    return largest / max(1, sum(padded)) <= max(1.5 / max(1, sum(buckets)), 0.02)


KINDS = {
    "lora": Kind(
        "a LoRA on SD3 or SD3.5: a subject or a style, from about 20 images",
        recipe="lora",
        model=_SD35,
        resolution=1024,
        batch=4,
        largest_micro_batch=4,
        epochs=10,
        shortest=800,
        continues=True,
    ),
    "edit": Kind(
        "a LoRA for edits, on Flux Kontext or SD3: pairs of images, with instructions as captions",
        recipe="lora",
        model="black-forest-labs/FLUX.1-Kontext-dev",
        resolution=1024,
        batch=4,
        largest_micro_batch=4,
        epochs=10,
        shortest=400,
        continues=True,
        references=True,
    ),
    "finetune": Kind(
        "all weights of SD3 or SD3.5, on thousands of images",
        recipe="finetune",
        model=_SD35,
        resolution=1024,
        batch=32,
        largest_micro_batch=32,
        epochs=10,
        continues=True,
    ),
    "reward": Kind(
        "a LoRA on SD3 or SD3.5 towards a score of images that the run draws",
        recipe="reward",
        model=_SD35,
        resolution=512,
        batch=16,
        largest_micro_batch=16,
        epochs=1,
        shortest=1000,
        longest=1000,
        continues=True,
        draws=True,
    ),
    "pretrain": Kind(
        "a model of 0.5 or 1.3 billion parameters from random weights, on millions of images",
        recipe="sd3_light_256",
        model=_SD3,
        resolution=256,
        batch=512,
        largest_micro_batch=128,
        epochs=100,
        shortest=10_000,
        longest=500_000,
        smaller_size="sd3_light_square",
    ),
    "icons": Kind(
        "a small model from random weights, on thousands of icons or other simple images",
        recipe="icons_128",
        model=_SD3,
        resolution=128,
        batch=1024,
        largest_micro_batch=1024,
        epochs=200,
        shortest=2_000,
        longest=100_000,
        most_epochs=1000,
        cpu=CpuScale(batch=16, layers=4, minutes=60),
        t5_length=77,
        pads_for_others=True,
    ),
    "distill": Kind(
        "a LoRA on SD3 or SD3.5 that draws in few steps without guidance, from some hundred images",
        recipe="distill",
        model=_SD35,
        resolution=1024,
        batch=8,
        largest_micro_batch=8,
        epochs=10,
        shortest=2000,
        longest=10_000,
        continues=True,
        distills=True,
    ),
}
