"""The images that a run draws for [reward]: drawn every few steps, scored, and trained on until the next ones.

Prompts, seeds, noise and times are functions of the step. The images also depend on the weights, so their latents and
rewards are part of checkpoints: a run that is resumed between two draws trains on the same images.

P prompts with G images each make N images; latents are [N, C, h, w].
"""

import math
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sd3_light.config import TrainConfig, UserError
from sd3_light.config.schema_reward import RewardConfig
from sd3_light.core.batch import Batch
from sd3_light.core.model import TrainedModel
from sd3_light.core.objective import Objectives, Observes
from sd3_light.core.registry import family_of
from sd3_light.core.sampling import Decoder, EncodedText, Sampling
from sd3_light.core.training import Preparer
from sd3_light.data.prepare import FlowPreparer
from sd3_light.data.prompt_features import encode_prompts_one_by_one, has_prompt, read_prompt
from sd3_light.data.prompt_lists import read_prompts
from sd3_light.evaluate.rewards import Images, Reward, open_reward, scores
from sd3_light.export.model_facts import bucket_size
from sd3_light.flow.objective import flow_loss, interpolate, velocity
from sd3_light.flow.reward import Rewarded, diversity, relative_rewards
from sd3_light.formats import plural
from sd3_light.randomness import fill_rows, occurrence_words, stream
from sd3_light.runlog import info
from sd3_light.sample.generate import not_finite, to_images
from sd3_light.sample.in_training import assigned
from sd3_light.sample.loop import draw_latents, starting_noise
from sd3_light.train.context import RunContext

EVENT = "reward"
"""The log event of a draw."""


def draw_rewards(model: TrainedModel, context: RunContext, preparer: Preparer, score: Reward | None) -> None:
    """Let the model's objective draw its images, which ``score`` scores in place of the config's."""
    assert isinstance(model.objective, Objectives) and isinstance(preparer, FlowPreparer)
    (part,) = (part for part in model.objective.parts if isinstance(part, Rewarded))
    rollouts = Rollouts.of(context, preparer, score)
    part.attach(rollouts.batch, rollouts.state)


def drawn_samples(samples: int, position: int) -> int:
    """Return the samples of a step at a position of the data: always ``samples``."""
    return samples


@dataclass(frozen=True)
class Prompts:
    """The prompts of a run and their encoded texts, which are read from the cache when they are used.

    ``encoded`` are those that the cache lacks.
    """

    texts: tuple[str, ...]
    seed: int
    read: Callable[[str], Mapping[str, Tensor] | None]
    encoded: Mapping[str, Mapping[str, Tensor]]

    @staticmethod
    def of(context: RunContext, table: RewardConfig) -> "Prompts":
        """Encode prompts that are missing in the cache (it is at a URL, or read-only)."""
        location = context.loaded.dataset.cache_dir
        recipe = context.data.manifest.recipe
        texts = read_prompts(table.prompts)
        missing = [text for text in texts if not has_prompt(location, text, recipe)]
        if missing:
            info(f"train: not in the cache, encoding now: {plural(len(missing), 'prompt')}")
        features = encode_prompts_one_by_one(context.config.model, missing, context.device) if missing else []
        encoded = dict(zip(missing, features, strict=True))
        return Prompts(texts, context.config.seed, lambda text: read_prompt(location, text, recipe), encoded)

    def of_window(self, window: int, count: int) -> list[str]:
        """Return the prompts of a draw: each of them once, in an order that changes, before one recurs."""
        total = len(self.texts)
        places = [divmod(number, total) for number in range(window * count, (window + 1) * count)]
        return [self.texts[shuffled(self.seed, "reward-prompts", turn, 0, total)[place]] for turn, place in places]

    def features(self, text: str) -> Mapping[str, Tensor]:
        """Return the encoded text of a prompt."""
        known = self.encoded.get(text) or self.read(text)
        if known is None:
            raise UserError(f"the prompt {text!r} is damaged in the cache; run `sd3-light cache CONFIG`")
        return known


@lru_cache(maxsize=8)  # those of the latest draws
def shuffled(seed: int, purpose: str, epoch: int, repeat: int, count: int) -> list[int]:
    """Return the numbers below ``count`` in a random order."""
    order: list[int] = stream(seed, purpose, epoch, repeat, 0).permutation(count).tolist()
    return order


@dataclass
class Rollouts:
    """Draws and scores images, and makes the batches of the steps until the next draw.

    ``state`` are the latents, the rewards, the number of the draw they are of, from 1 (0: none), and a number for its
    prompts.
    """

    config: TrainConfig
    table: RewardConfig
    context: RunContext
    prompts: Prompts
    preparer: FlowPreparer
    score: Reward
    size: tuple[int, int]
    state: dict[str, Tensor]
    texts: Sequence[EncodedText] = ()
    _texts_of: int = -1
    _position: tuple[int, int] = (-1, 0)
    _decoder: Decoder | None = None
    _ended: float | None = None
    _printed: int = -1

    @staticmethod
    def of(context: RunContext, preparer: FlowPreparer, score: Reward | None) -> "Rollouts":
        """Return the rollouts of a run; nothing is drawn yet."""
        config = context.config
        table = config.reward
        assert table is not None
        size = bucket_size(context.bucket)
        shape = family_of(config.model).sampling.latent_shape(config.model, size)
        state = {
            "latents": torch.zeros((table.images, *shape)),
            "rewards": torch.zeros(table.images),
            "draw": torch.zeros(1),
            "prompts": torch.zeros(1),
        }
        chosen = open_reward(table.score, context.device) if score is None else score
        return Rollouts(config, table, context, Prompts.of(context, table), preparer, chosen, size, state)

    # --- batches -----------------------------------------------------------------------------------

    def batch(self, model: Observes, placeholder: Batch) -> Batch:
        """Return the next micro-batch of a step; images are drawn before the first step that needs them."""
        window, turn = divmod(model.step, self.table.every_n_steps)
        if self._texts_of != window:
            prompts = self.prompts.of_window(window, self.table.prompts_per_draw)
            family = self._sampling
            self.texts = [family.text(self.prompts.features(prompt)) for prompt in prompts]
            self._texts_of = window
            self._require_prompts(window, prompts)
        if int(self.state["draw"]) != window + 1:
            self._draw(model, window)
        number = self._next_micro_batch(model.step)
        size = placeholder.size
        launch = self.context.share
        per_step = size * launch.world_size * self.config.gradient_accumulation_steps
        first = turn * per_step + (number * launch.world_size + launch.rank) * size
        return self._batch_of(window, range(first, first + size))

    def _require_prompts(self, window: int, prompts: Sequence[str]) -> None:
        """Refuse to train on the images of a checkpoint with other prompts than they were drawn for."""
        number = zlib.crc32("\0".join(prompts).encode()) >> 8  # below 2^24: a float32 holds it
        if int(self.state["draw"]) == window + 1 and int(self.state["prompts"]) != number:
            raise UserError(
                f"reward.prompts: {self.table.prompts} lacks the prompts of the checkpoint's images; restore it, or "
                f"resume from a checkpoint after a multiple of {self.table.every_n_steps} steps"
            )
        self.state["prompts"].fill_(number)

    def _next_micro_batch(self, step: int) -> int:
        """Return the number of this micro-batch in its step."""
        last, number = self._position
        self._position = (step, number + 1 if last == step else 0)
        return self._position[1]

    def _batch_of(self, window: int, uses: range) -> Batch:
        """Return the batch of the given uses of a window's images: all images are used once before one recurs."""
        count = self.table.images
        seed = self.config.seed
        turns = [use // count for use in uses]
        rows = [shuffled(seed, "reward-order", window, use // count, count)[use % count] for use in uses]
        latents = self.state["latents"][rows]
        occurrences = occurrence_words(window, turns, rows)
        noise = np.empty(latents.shape, dtype=np.float32)
        fill_rows(seed, "reward-noise", occurrences, noise)
        drawn = torch.from_numpy(noise)
        t = self.preparer.times(occurrences, latents.shape)
        inputs = self._inputs([self.texts[row // self.table.images_per_prompt] for row in rows])
        values = {
            "noisy": interpolate(latents, drawn, t),
            "t": t,
            **inputs.values,
            "target": velocity(latents, drawn),
            "reward": self.state["rewards"][rows],
        }
        return Batch(len(rows), values, inputs.host).to(self.context.device)

    def _inputs(self, texts: Sequence[EncodedText]) -> Batch:
        guidance = self.config.model.guidance
        return self._sampling.batch(texts, self.config.model, 1.0 if guidance is None else guidance)

    @property
    def _micro_batch(self) -> int:
        size = self.config.micro_batch_size_per_gpu
        assert isinstance(size, int), "images of one size"
        return size

    @property
    def _sampling(self) -> Sampling:
        return family_of(self.config.model).sampling

    # --- drawing -----------------------------------------------------------------------------------

    def _draw(self, model: Observes, window: int) -> None:
        """Draw the images of a window with all processes, score them, and keep latents and rewards."""
        began = self._now()
        table = self.table
        shape = (table.prompts_per_draw, table.images_per_prompt)
        latents, values = self._gathered(*self._own_images(model, window))
        self.state["latents"].copy_(latents)
        self.state["rewards"].copy_(relative_rewards(values.view(shape)).flatten())
        self.state["draw"].fill_(window + 1)
        facts = {
            "reward": float(values.mean()),
            "reward_deviation": float(values.view(shape).std(1, correction=0).mean()),
            "diversity": diversity(latents.view(*shape, -1)),
            **self._distance(model, window),
        }
        ended = self._now()
        facts["draw_seconds"] = round(ended - began, 3)
        if self._ended is not None:
            facts["draw_share"] = round((ended - began) / (ended - self._ended), 4)
        self._ended = ended
        self._report(model.step, facts)

    def _own_images(self, model: Observes, window: int) -> tuple[Tensor, Tensor]:
        """Return latents and scores of this process's share, in batches of equal size.

        All processes draw equally many batches, and some images may be drawn twice.
        """
        size = self._micro_batch
        launch = self.context.share
        count = self.table.images
        batches = assigned(math.ceil(count / size), launch.rank, launch.world_size)
        rows = [[row % count for row in range(number * size, (number + 1) * size)] for number in batches]
        drawn = [self._latents(model, window, each) for each in rows]
        fault = not_finite({"denoiser": drawn})
        if self._decoder is None:
            self._decoder = self._sampling.decoder(self.config.model, self.context.device)
        images: list[Images] = []
        with self._decoder:
            for latents in drawn:
                pixels = self._decoder.decode(latents)
                fault = fault or not_finite({"VAE": [pixels]})
                images.append(np.stack([np.asarray(image.convert("RGB")) for image in to_images(pixels)]))
        if problem := self.context.groups.first_problem(fault):
            raise UserError(f"the images of [reward] cannot be drawn: {problem}, or lower the learning rate")
        values = self._scores(window, images, rows)
        return torch.stack([latents.float().cpu() for latents in drawn]), torch.from_numpy(np.stack(values))

    def _scores(
        self, window: int, images: Sequence[Images], rows: Sequence[Sequence[int]]
    ) -> list[NDArray[np.float64]]:
        """Return the scores of this process's images; a reward that fails in one process ends all of them."""
        prompts = self.prompts.of_window(window, self.table.prompts_per_draw)
        values: list[NDArray[np.float64]] = []
        fault = None
        try:
            for batch, each in zip(images, rows, strict=True):
                texts = [prompts[row // self.table.images_per_prompt] for row in each]
                values.append(scores(self.score, batch, texts))
        except UserError as error:
            fault = str(error)
        if problem := self.context.groups.first_problem(fault):
            raise UserError(problem)
        return values

    def _latents(self, model: Observes, window: int, rows: Sequence[int]) -> Tensor:
        """Draw images with the teacher, without guidance."""
        sampling = self._sampling
        settings = self.config.model
        device = self.context.device
        noise = starting_noise(
            [self._seed(window, row) for row in rows], sampling.latent_shape(settings, self.size), device
        )
        scheduler = sampling.scheduler(settings, self.size, self.table.steps, device)
        texts = self._inputs([self.texts[row // self.table.images_per_prompt] for row in rows]).to(device)
        return draw_latents(lambda batch: model.teach(batch).velocity.float(), scheduler, noise, texts)

    def _seed(self, window: int, row: int) -> int:
        return int(stream(self.config.seed, "reward-seed", window, 0, row).integers(2**63))

    def _gathered(self, latents: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return the latents and scores of all images, from the batches of all processes."""
        launch = self.context.share
        parts = self.context.groups.gathered((latents, values))
        total = math.ceil(self.table.images / latents.shape[1])
        places = {
            number: (rank, turn)
            for rank in range(launch.world_size)
            for turn, number in enumerate(assigned(total, rank, launch.world_size))
        }
        in_order = [(parts[rank], turn) for rank, turn in (places[number] for number in range(total))]
        whole = [torch.cat([part[kind][turn] for part, turn in in_order])[: self.table.images] for kind in range(2)]
        return whole[0], whole[1]

    # --- the log -----------------------------------------------------------------------------------

    def _distance(self, model: Observes, window: int) -> dict[str, float]:
        """Return the squared distance from the start's prediction, where the start is kept."""
        if self.config.adapter is None and self.table.kl == 0 and self.table.teacher != "start":
            return {}
        batch = self._batch_of(window, range(self._micro_batch))
        return {"distance": float(flow_loss(model.infer(batch).velocity, model.first(batch).velocity).mean())}

    def _report(self, step: int, facts: Mapping[str, Any]) -> None:
        samples = step * self.context.share.world_size * self._micro_batch * self.config.gradient_accumulation_steps
        self.context.folder.log(EVENT, step=step, samples=samples, **facts)
        part = step // (self.config.steps_per_print or 1)
        if part == self._printed:
            return
        self._printed = part
        share = f", drawing takes {facts['draw_share']:.0%} of the time" if "draw_share" in facts else ""
        info(f"reward at step {step}: {facts['reward']:.4g}, diversity {facts['diversity']:.3g}{share}")

    def _now(self) -> float:
        if self.context.device.type == "cuda":
            torch.cuda.synchronize()
        return time.monotonic()
