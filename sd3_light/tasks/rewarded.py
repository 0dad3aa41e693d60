"""Train a config with [reward] towards a score that is a Python function."""

from collections.abc import Sequence
from pathlib import Path

from sd3_light.check import verb as check
from sd3_light.checkpoint.progress import Progress
from sd3_light.config.faults import UserError
from sd3_light.engines import Launch
from sd3_light.evaluate.rewards import Reward
from sd3_light.runlog import set_main_process
from sd3_light.train import verb as train


def launch_reward_task(
    config: Path | str, reward: Reward, overrides: Sequence[str] = (), resume: train.Resume | None = None
) -> Progress:
    """Train the config of a TOML with [reward], where ``reward`` scores the images; return the final progress.

    ``reward(images, prompts)`` gets uint8 images [N, H, W, 3] and returns a number for each. An image's score must not
    depend on the other images. The cache exists: `sd3-light cache CONFIG` builds it. Under torchrun all processes call
    it. ``overrides`` are texts ``KEY=VALUE``.
    """
    launch = Launch.detect()
    set_main_process(launch.is_main)
    loaded = check.load(Path(config), list(overrides))
    if loaded.train.reward is None:
        raise UserError(f"{config} has no [reward]; add one with its prompts, see docs/reference/rewards.md")
    if not callable(reward):
        raise UserError(f"the reward is a {type(reward).__name__}; give a function of images and prompts")
    return train.run(loaded, launch, resume, reward=reward)
