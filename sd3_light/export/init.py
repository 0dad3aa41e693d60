"""The init verb: write a pipeline folder with a randomly initialised denoiser, for a pretraining run to start from."""

import json
from dataclasses import replace
from pathlib import Path

from sd3_light.checkpoint.progress import Progress
from sd3_light.config import LoadedConfig
from sd3_light.core.registry import family_of, starting_weights
from sd3_light.core.start import MARKER
from sd3_light.export.diffusers_folder import write_folder
from sd3_light.export.of_run import export_spec, model_config
from sd3_light.files import refuse_existing, write_errors
from sd3_light.model.base_values import with_base_values


def run(loaded: LoadedConfig, out: Path) -> Path:
    """Write ``out``: encoders and VAE from `diffusers_path`, the denoiser from size and seed. Never overwrites."""
    refuse_existing(out)
    train = loaded.train.model_copy(update={"model": with_base_values(loaded.train.model)})
    start = starting_weights(train.model)
    transformer = family_of(train.model).weights.load(start, train.seed)
    spec = export_spec(train, model_config(transformer), start.sentence, Progress())
    marker = json.dumps({"seed": train.seed, "size": start.size.name}) + "\n"
    spec = replace(spec, files={**spec.files, MARKER: marker})
    with write_errors(out):
        return write_folder(out, transformer.state_dict(), spec, replace=False)
