"""Rewards: functions that score images and their prompts, built in or of an installed package."""

from collections.abc import Callable, Sequence
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from sd3_light.config.faults import UserError
from sd3_light.config.schema_reward import PYTHON, WORLD
from sd3_light.engines.errors import as_user_error
from sd3_light.evaluate.feature_model import FeatureModel, load_feature_model
from sd3_light.evaluate.marked import require_marked
from sd3_light.world import judge
from sd3_light.world.captions import parse_caption
from sd3_light.world.scene import Scene

Images = NDArray[np.uint8]
"""Images of one size [N, H, W, 3]."""
Reward = Callable[[Images, Sequence[str]], Any]
"""Images and their prompts -> a finite number per image; a higher one is better."""
Marked = TypeVar("Marked", bound=Reward)

_MARKED: list[Reward] = []


def reward(function: Marked) -> Marked:
    """Mark a function, so that `reward.score` of a config can name it: ``function(images, prompts) -> scores``.

    ``images`` are uint8 [N, H, W, 3]. An image's score must not depend on the other images.
    """
    _MARKED.append(function)
    return function


def open_reward(name: str | Path, device: torch.device) -> Reward:
    """Return the reward that a config names; models are loaded on the device."""
    if name == WORLD:
        return world_reward
    if isinstance(name, Path):
        feature_model = load_feature_model(name, device)
        if not feature_model.reads_text:
            raise UserError(f"reward.score: {name} has no text encoder; give a CLIP folder")
        return partial(_similarity, feature_model)
    if name == PYTHON:
        raise UserError(
            'reward.score = "python" is a function that a script passes to sd3_light.tasks.launch_reward_task; '
            "train with that script, or name the score"
        )
    return _installed(name)


def scores(function: Reward, images: Images, prompts: Sequence[str]) -> NDArray[np.float64]:
    """Return the score of each image, as float64 [N]."""
    label = getattr(function, "__qualname__", "the reward")
    with as_user_error(f"the reward {label}"):
        values: NDArray[np.float64] = np.asarray(function(images, prompts), dtype=np.float64)
    if values.shape != (len(images),):
        shape = list(values.shape)
        raise UserError(f"the reward {label} returned {shape} for {len(images)} images; return one number for each")
    if not np.isfinite(values).all():
        prompt = prompts[int(np.argmin(np.isfinite(values)))]
        raise UserError(f"the reward {label} is not finite for the prompt {prompt!r}; return finite numbers")
    return values


def world_reward(images: Images, prompts: Sequence[str]) -> list[float]:
    """Return the share of a prompt's requirements that each image of the demo's world meets."""
    each = []
    for image, prompt in zip(images, prompts, strict=True):
        met = [value for value in vars(judge(image, _scene(prompt))).values() if value is not None]
        each.append(sum(met) / len(met))
    return each


@cache
def _scene(prompt: str) -> Scene:
    return parse_caption(prompt)


def _similarity(feature_model: FeatureModel, images: Images, prompts: Sequence[str]) -> Any:
    """Return the cosine of image and prompt."""
    return (feature_model.image_features(images) * feature_model.text_features(prompts)).sum(1).double().cpu().numpy()


def _installed(name: str) -> Reward:
    """Return the marked function ``package.module:function``."""
    require_marked(name)
    module, _, attribute = name.partition(":")
    try:
        value = getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise UserError(f"reward.score = {name!r}: {error}; install the package, or correct the name") from error
    if not any(value is marked for marked in _MARKED):
        raise UserError(f"reward.score = {name!r} is not marked as a reward; write @sd3_light.tasks.reward above it")
    function: Reward = value
    return function
