"""Warnings about data that is cut, cropped or reconstructed badly."""

from collections.abc import Iterator

from sd3_light.config import ModelConfig
from sd3_light.data.building.cache_plan import CachePlan, Unit
from sd3_light.encoders.caption_lengths import MAX_CAPTIONS, count_cut_captions
from sd3_light.runlog import info


def warn_of_cut_captions(title: str, plan: CachePlan, model: ModelConfig) -> None:
    """Print how many captions are longer than the text encoders read; of a large dataset, units are picked evenly."""
    captions = (caption for unit in spread(plan, MAX_CAPTIONS) for m in plan.members(unit) for caption in m.captions)
    cut = count_cut_captions(dict.fromkeys(captions), model.diffusers_path, model.t5_max_length)
    if cut is not None and (sentence := cut.sentence()):
        info(f"{title}: warning: {sentence}")


def spread(plan: CachePlan, most: int) -> Iterator[Unit]:
    """Yield every n-th unit, so that they hold about ``most`` samples or all."""
    total = sum(unit.count for unit in plan.units)
    return iter(plan.units[:: max(1, round(total / most))])
