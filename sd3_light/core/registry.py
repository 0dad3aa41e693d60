"""The known families by name; a family's code is imported when it is used."""

from functools import cache
from importlib import import_module

from sd3_light.config import ModelConfig
from sd3_light.core.family import Family
from sd3_light.core.start import WeightsStart

_FAMILIES = {"sd3": "sd3_light.families.sd3:SD3"}
"""`model.type` -> where its class is."""


def family_of(model: ModelConfig) -> Family:
    """Return the family of a [model] table."""
    return family_named(model.type)


@cache
def family_named(name: str) -> Family:
    """Return the family with this name."""
    module, _, kind = _FAMILIES[name].partition(":")
    family = getattr(import_module(module), kind)()
    assert isinstance(family, Family), family
    return family


def starting_weights(model: ModelConfig) -> WeightsStart:
    """Return where the denoiser's weights of a [model] table start. Raises UserError if there is no denoiser."""
    return family_of(model).weights.start(model)
