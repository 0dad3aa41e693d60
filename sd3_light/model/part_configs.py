"""The parts of a model folder: configs are read with limits and checked, weights come from safetensors only."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError

from sd3_light.config.faults import UserError
from sd3_light.inputs import TEXT_BYTES, parse_json, read_json_file, require_regular
from sd3_light.tensor_file import METADATA_KEY, check_header, open_tensors

WEIGHTS_STEM = "diffusion_pytorch_model"
"""File name, without its ending, of the weights in a diffusers model folder."""

FACTS_FILE = "sd3_light.json"
"""The file in which an export describes its model."""

LOCAL_WEIGHTS = {"local_files_only": True, "use_safetensors": True}
"""Arguments of every `from_pretrained` of a model: nothing is downloaded, and pickles are never opened (law 8)."""

# what diffusers, transformers and safetensors raise for files that they do not expect
LOAD_ERRORS = (
    *(OSError, ValueError, TypeError, LookupError, AttributeError, RuntimeError),
    *(SafetensorError, StrictDataclassError),
)

_TEXT_SUFFIXES = (".jinja", ".json", ".model", ".txt")  # of files that libraries read as a whole
_WIDTH = 1 << 16
_LAYERS = 1000
_TABLE = 1 << 24
_CLIP = {
    "hidden_size": _WIDTH,
    "projection_dim": _WIDTH,
    "intermediate_size": 4 * _WIDTH,
    "num_hidden_layers": _LAYERS,
    "num_attention_heads": _WIDTH,
    "max_position_embeddings": _TABLE,
    "vocab_size": _TABLE,
}
_LARGEST: dict[str, dict[str, int]] = {  # part -> key -> largest value; the smallest is 1
    "transformer": {
        "num_layers": _LAYERS,
        "num_attention_heads": _WIDTH,
        "attention_head_dim": _WIDTH,
        "joint_attention_dim": _WIDTH,
        "caption_projection_dim": _WIDTH,
        "pooled_projection_dim": _WIDTH,
        "sample_size": _WIDTH,
        "pos_embed_max_size": 1 << 12,
        "patch_size": 64,
        "in_channels": _WIDTH,
        "out_channels": _WIDTH,
    },
    "vae": {
        "latent_channels": _WIDTH,
        "in_channels": 64,
        "out_channels": 64,
        "layers_per_block": 64,
        "norm_num_groups": _WIDTH,
    },
    "scheduler": {"base_image_seq_len": _TABLE, "max_image_seq_len": _TABLE},
    "text_encoder": _CLIP,
    "text_encoder_2": _CLIP,
    "text_encoder_3": {
        "d_model": _WIDTH,
        "d_kv": _WIDTH,
        "d_ff": 4 * _WIDTH,
        "num_layers": _LAYERS,
        "num_decoder_layers": _LAYERS,
        "num_heads": _WIDTH,
        "vocab_size": _TABLE,
        "relative_attention_num_buckets": _WIDTH,
        "relative_attention_max_distance": _WIDTH,
    },
}
_SD3 = "SD3Transformer2DModel"
_LAYER_KEYS = ("num_layers", "num_single_layers", "n_layers", "n_refiner_layers", "depth")
_MAY_BE_NULL = ("out_channels", "num_decoder_layers")
_MAX_LEVELS = 10  # of a VAE; each halves the sides
_MAX_FACTOR = 1e4
_FACTORS = {"vae": ("scaling_factor", "shift_factor"), "scheduler": ("shift", "flow_shift", "base_shift", "max_shift")}
_FLAGS = {"scheduler": ("use_dynamic_shifting", "use_karras_sigmas", "use_exponential_sigmas", "use_beta_sigmas")}


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; raises UserError if there is none."""
    try:
        value = read_json_file(path)
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); give a complete folder") from error
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON ({error}); download or write the folder again") from error
    if not isinstance(value, dict):
        raise UserError(f"{path} is not a JSON object; download or write the folder again")
    return value


def read_config(folder: Path, part: str) -> dict[str, Any]:
    """Return the checked config of a part (`transformer`, `vae`, `scheduler`, ...) in its own folder."""
    path = folder / ("scheduler_config.json" if part == "scheduler" else "config.json")
    config = read_json(path)
    check_config(config, part, str(path))
    return config


def check_config(config: Mapping[str, Any], part: str, where: str) -> None:
    """Raise a UserError that names the first value of a wrong type or beyond what a model of this part can have."""
    is_other = part == "transformer" and config.get("_class_name", _SD3) != _SD3
    for key, value in config.items():
        if problem := _other_problem(key, value) if is_other else _problem(part, key, value):
            raise UserError(f"{where} has {key} {value!r:.80}, which is {problem}; download or write the folder again")


def check_files(*folders: Path) -> None:
    """Raise a UserError for files that libraries must not open: pipes, devices, sockets, huge configs or vocabularies,
    and weights without a header. Links to regular files are allowed, as in a hub cache.

    Called before every `from_pretrained`.
    """
    for folder in folders:
        for path in sorted(folder.iterdir()) if folder.is_dir() else ():
            if path.name.startswith(".") or path.is_dir() or not path.exists():
                continue
            try:
                require_regular(path, TEXT_BYTES if path.suffix in _TEXT_SUFFIXES else None)
                if path.suffix == ".safetensors":
                    check_header(path)
            except (OSError, ValueError) as error:
                reason = getattr(error, "strerror", None) or error
                raise UserError(f"{path} cannot be read ({reason}); download or export it again") from error


def load_part(model_class: Any, folder: Path, **options: Any) -> Any:
    """Load a transformers model from its own folder; missing weights are a UserError: they would be random."""
    check_files(folder)
    try:
        model, loading = model_class.from_pretrained(folder, output_loading_info=True, **LOCAL_WEIGHTS, **options)
    except LOAD_ERRORS as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"{folder} cannot be loaded: {reason:.300}; download or export it again") from error
    wrong = [*loading["missing_keys"], *loading["mismatched_keys"], *loading.get("error_msgs", ())]
    if wrong:
        raise UserError(
            f"the weights in {folder} do not match its config.json: {wrong[0]!s:.200}; download or export it again"
        )
    return model


def _problem(part: str, key: str, value: Any) -> str | None:
    largest = _LARGEST.get(part, {}).get(key)
    if key == "patch_size" and isinstance(value, list):  # of frames, rows and columns
        return None if _is_counts(value, 3, 64) else "not a list of up to 3 integers from 1 to 64"
    if largest is not None and not (value is None and key in _MAY_BE_NULL) and not _is_count(value, largest):
        return f"not an integer from 1 to {largest}"
    if key in _FACTORS.get(part, ()) and not (value is None and key == "shift_factor") and not _is_factor(value, key):
        return f"not a number up to {_MAX_FACTOR:g}"
    if part == "scheduler" and key == "shift_terminal" and not (value is None or _is_time(value)):
        return "not a number from 0 to 1"
    if key in _FLAGS.get(part, ()) and not (value is None or isinstance(value, bool)):
        return "neither true nor false"
    if part == "vae" and key == "block_out_channels" and not _is_counts(value, _MAX_LEVELS, _WIDTH):
        return f"not a list of 1 to {_MAX_LEVELS} widths"
    if part == "transformer" and key == "dual_attention_layers" and not _is_layers(value):
        return "not a list of layer numbers"
    if part == "transformer" and key == "qk_norm" and value not in (None, "rms_norm", "rms_norm_across_heads"):
        return 'neither null nor "rms_norm"'
    if key == "_class_name" and not isinstance(value, str):
        return "not a name"
    return None


def _other_problem(key: str, value: Any) -> str | None:
    """Return what is wrong with an entry of the config of a denoiser other than SD3's."""
    if key == "_class_name" and not isinstance(value, str):
        return "not a name"
    largest = _LAYERS if key in _LAYER_KEYS else _TABLE
    if key in _LAYER_KEYS and not _is_count(value, largest):
        return f"not an integer from 1 to {largest}"
    return f"more than {largest}" if type(value) is int and value > largest else None


def _is_count(value: Any, largest: int) -> bool:
    return type(value) is int and 1 <= value <= largest


def _is_counts(value: Any, longest: int, largest: int) -> bool:
    return isinstance(value, list) and 1 <= len(value) <= longest and all(_is_count(item, largest) for item in value)


def _is_layers(value: Any) -> bool:
    return value is None or (
        isinstance(value, list | tuple) and all(type(item) is int and 0 <= item < _LAYERS for item in value)
    )


def _is_factor(value: Any, key: str) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return is_number and abs(value) <= _MAX_FACTOR and (value > 0 or key == "shift_factor")


def _is_time(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1


def single_file_metadata(path: Path) -> dict[str, Any]:
    """Return what sd3-light stored about the model in a single file that it wrote; empty for other files."""
    _, metadata = open_tensors(path)
    if METADATA_KEY not in metadata:
        return {}
    try:
        stored: dict[str, Any] = dict(parse_json(metadata[METADATA_KEY]))
        dict(stored["config"])
    except (ValueError, LookupError, TypeError) as error:
        raise UserError(f"{path}: its metadata is damaged ({error!r}); write the file again") from error
    return stored
