"""Cache the [sampling] prompts while the encoders are loaded; `prompt_features` defines their files."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sd3_light.cache.freshness import CacheState
from sd3_light.cache.shard_builder import wait_for_main
from sd3_light.data.prompt_features import PROMPTS_FOLDER, PromptFeatures, prompt_file, read_prompt, write_prompt
from sd3_light.files import sweep_files
from sd3_light.formats import plural
from sd3_light.runlog import info


def missing_prompts(cache: Path, prompts: Sequence[str], recipe: Mapping[str, Any]) -> list[str]:
    """Return the distinct prompts that are missing or damaged in the cache."""
    return [prompt for prompt in dict.fromkeys(prompts) if read_prompt(cache, prompt, recipe) is None]


def add_orphans(state: CacheState, prompts: Sequence[str], recipe: Mapping[str, Any]) -> None:
    """Add the files of prompts that this config does not use, or encodes differently, to the orphans."""
    used = {prompt_file(prompt, recipe) for prompt in prompts}
    for path in sorted((state.folder / PROMPTS_FOLDER).glob("*.safetensors")):
        if path.name not in used:
            state.orphans.append(path)
            state.orphan_bytes += path.stat().st_size


def cache_prompts(
    cache: Path,
    prompts: Sequence[str],
    recipe: Mapping[str, Any],
    encode: Callable[[Sequence[str]], list[PromptFeatures]],
    title: str,
) -> None:
    """Encode prompts into the cache. Called in the main process only, because they are few."""
    if prompts:
        info(f"{title}: encoding {plural(len(prompts), 'prompt')} of [sampling]")
        for prompt, features in zip(prompts, encode(prompts), strict=True):
            write_prompt(cache, prompt, recipe, features)
        sweep_files(cache / PROMPTS_FOLDER)


def wait_for_prompts(cache: Path, prompts: Sequence[str], recipe: Mapping[str, Any], timeout: float) -> None:
    """Wait until the main process has encoded all prompts."""

    def task() -> str | None:
        missing = missing_prompts(cache, prompts, recipe)
        return f"encode the prompt {missing[0]!r}" if missing else None

    wait_for_main(task, timeout)
