"""The prompts of [sampling], encoded while the encoders are at hand; `sampling.prompts` says how they are kept."""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sd3_light.config.faults import UserError
from sd3_light.encoders.frozen_parts import FrozenParts
from sd3_light.files import sweep_files
from sd3_light.runlog import info
from sd3_light.sampling.prompt_features import PROMPTS_FOLDER, encode_prompts, prompt_file, read_prompt, write_prompt
from sd3_light.stages.cache.freshness import CacheState

_POLL_SECONDS = 0.2


def missing_prompts(cache: Path, prompts: Sequence[str], recipe: Mapping[str, Any]) -> list[str]:
    """Those that are not in the cache, or damaged there; each once."""
    return [prompt for prompt in dict.fromkeys(prompts) if read_prompt(cache, prompt, recipe) is None]


def name_orphans(state: CacheState, prompts: Sequence[str], recipe: Mapping[str, Any]) -> None:
    """Add the files of prompts that this config does not have, or that were encoded otherwise."""
    wanted = {prompt_file(prompt, recipe) for prompt in prompts}
    for path in sorted((state.folder / PROMPTS_FOLDER).glob("*.safetensors")):
        if path.name not in wanted:
            state.orphans.append(path)
            state.orphan_bytes += path.stat().st_size


def may_write(cache: Path) -> bool:
    """Whether prompts can be put into a cache that is taken as it is."""
    return os.access(cache, os.W_OK)


def cache_prompts(
    cache: Path, prompts: Sequence[str], recipe: Mapping[str, Any], parts: Callable[[], FrozenParts], title: str
) -> None:
    """Encode prompts into the cache: the main process's work, as there are few of them."""
    if prompts:
        info(f"{title}: encoding {len(prompts)} prompt(s) of [sampling]")
        for prompt, features in zip(prompts, encode_prompts(parts(), prompts), strict=True):
            write_prompt(cache, prompt, recipe, features)
        sweep_files(cache / PROMPTS_FOLDER)


def await_prompts(cache: Path, prompts: Sequence[str], recipe: Mapping[str, Any], patience: float) -> None:
    """Return when the main process has encoded all prompts."""
    deadline = time.monotonic() + patience
    while missing := missing_prompts(cache, prompts, recipe):
        if time.monotonic() > deadline:
            raise UserError(
                f"gave up waiting for the main process to encode the prompt {missing[0]!r}; see its output, or raise "
                "sd3_manifest_timeout_sec"
            )
        time.sleep(_POLL_SECONDS)
