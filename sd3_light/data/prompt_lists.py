"""The texts that a run draws images of."""

from pathlib import Path

from sd3_light.config import TrainConfig, UserError
from sd3_light.core.registry import family_of
from sd3_light.inputs import read_limited


def prompts_to_encode(config: TrainConfig) -> tuple[str, ...]:
    """Return the different texts that a run draws: those of [sampling] and the prompts of [reward].

    None are encoded ahead for a family whose texts are encoded with references.
    """
    if family_of(config.model).texts_see_references:
        return ()
    rewarded = () if config.reward is None else read_prompts(config.reward.prompts)
    return tuple(dict.fromkeys((*config.sampling.texts, *rewarded)))


def read_prompts(path: Path) -> tuple[str, ...]:
    """Return the different lines of a text file that are not empty."""
    try:
        text = read_limited(path).decode("utf-8-sig")
    except OSError as error:
        raise UserError(
            f"{path} cannot be read: {error.strerror}; give a text file with one prompt per line"
        ) from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 (byte {error.start}); save it as UTF-8") from None
    prompts = tuple(dict.fromkeys(line.strip() for line in text.splitlines() if line.strip()))
    if not prompts:
        raise UserError(f"{path} has no prompt; write one per line")
    return prompts
