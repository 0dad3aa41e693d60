"""The lora verb: convert LoRA files between layouts, merge them into a model, extract them from two models."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch

from sd3_light.config.faults import UserError
from sd3_light.core.drawing import drawing_facts
from sd3_light.core.family import Family
from sd3_light.core.files import AdapterNames, Padding, is_single_file
from sd3_light.core.registry import family_of_file, family_of_folder, single_files
from sd3_light.export.diffusers_folder import read_facts, write_folder
from sd3_light.export.export_spec import DYNAMIC, ExportError, ExportSpec, first_few
from sd3_light.export.lora_file import LoraLayout, check_new_lora, names_of_file, write_lora
from sd3_light.export.lora_merge import (
    Extraction,
    denoiser_state,
    drawing_of_adapters,
    extract_lora,
    merged_on_demand,
    merged_settings,
)
from sd3_light.export.lora_stack import Lora
from sd3_light.export.lycoris_file import read_any_adapter, write_lycoris
from sd3_light.export.proof import ProofError
from sd3_light.export.stored_parts import read_denoiser
from sd3_light.files import refuse_existing, write_errors
from sd3_light.model.adapter_layers import LycorisModule
from sd3_light.model.part_configs import read_config
from sd3_light.system import release_freed_memory
from sd3_light.tensor_file import DTYPES

LORA_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class LoraFormat:
    """How an adapter is written: its layout, its dtype, and the padded single file that it is for.

    LoKr and LoHa have one layout, LyCORIS'.
    """

    layout: str | None = None
    dtype: str = "float32"
    padded_for: Path | None = None

    def write(self, path: Path, modules: Any, facts: dict[str, Any], names: AdapterNames) -> Path:
        """Write the updates of a LoRA, LoKr or LoHa to a new file."""
        layout, dtype, padding = self.checked(path)
        options: dict[str, Any] = {"save_dtype": dtype, "padding": padding, "facts": facts, "names": names}
        if not any(isinstance(module, LycorisModule) for module in modules.values()):
            return write_lora(path, modules, layout=layout, **options)
        if self.layout is not None:
            raise UserError(
                f"--layout {self.layout}: a LoKr or LoHa is not a LoRA; leave the option out, or merge it into a model "
                "and extract a LoRA"
            )
        return write_lycoris(path, modules, **options)

    def checked(self, path: Path) -> tuple[LoraLayout, torch.dtype, Padding | None]:
        """Return (layout, dtype, padding); an invalid option or output path is reported before any work."""
        check_new_lora(path)
        layouts: tuple[LoraLayout, ...] = get_args(LoraLayout)
        layout = next((name for name in layouts if name == (self.layout or layouts[0])), None)
        if layout is None:
            raise UserError(f"--layout {self.layout}: unknown layout; choose one of {', '.join(layouts)}")
        return layout, _dtype(self.dtype), None if self.padded_for is None else _padding(self.padded_for)


def convert(source: Path, out: Path, form: LoraFormat, trained_on: Path | None = None) -> Path:
    """Write an adapter in another format. ``trained_on``: the padded single file that another program trained it on."""
    form.checked(out)
    names = names_of_file(source)
    lora = read_any_adapter(source, None if trained_on is None else _padding(trained_on), names)
    return form.write(out, lora.modules, lora.facts, names)


def merge(model: Path, loras: Sequence[Lora], out: Path, dtype: str | None = None) -> Path:
    """Write the folder ``model`` with the LoRAs added as a verified folder, by default in the model's dtype.

    Its text settings are those that `sample` uses with these LoRAs.
    """
    refuse_existing(out)
    if model.is_file():
        convert = f"of an SD3 file `sd3-light convert {model} FOLDER --base FOLDER` writes one"
        raise UserError(f"{model} is a file; pass a complete diffusers folder: {convert}")
    family = family_of_folder(model)
    if is_single_file(out):
        then = " and convert it with `sd3-light convert`" if family.has_single_file else ""
        raise UserError(f"{out}: merging writes a folder; pass a folder name{then}")
    if missing := family.files.missing(model, denoiser=True):
        raise UserError(f"{model} lacks {first_few(missing)}; pass a complete diffusers folder")
    config, stored = read_denoiser(model / "transformer", family)
    save_dtype = DTYPES[next(iter(stored.values())).dtype].torch if dtype is None else _dtype(dtype)
    spec = _spec(model, family, config, save_dtype, loras)
    updates = [(read_any_adapter(lora.file, names=family.files.adapters).modules, lora.strength) for lora in loras]
    state = merged_on_demand(model, updates)
    release_freed_memory()
    try:
        with write_errors(out):
            return write_folder(out, state, spec, replace=False, owned=True)
    except (ExportError, ProofError) as error:
        raise UserError(f"{model} with {', '.join(str(lora.file) for lora in loras)}: {error}") from error


def extract(
    base: Path, tuned: Path, out: Path, rank: int, targets: Sequence[str] | None, form: LoraFormat
) -> Extraction:
    """Write the LoRA of this rank that is nearest to the difference of two folders' denoisers."""
    form.checked(out)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    names = family_of_folder(base).files.adapters
    extraction = extract_lora(denoiser_state(base), denoiser_state(tuned), rank, targets, device, names)
    form.write(out, extraction.modules, {"extracted": {"rank": rank, "share": extraction.share}}, names)
    return extraction


def _spec(model: Path, family: Family, config: dict[str, Any], dtype: torch.dtype, loras: Sequence[Lora]) -> ExportSpec:
    """Describe a folder with the texts of the LoRAs, which its facts name, and their shift if it is not ``model``'s."""
    facts = {key: value for key, value in read_facts(model).items() if key not in ("sd3_light", "text")}
    scheduler = read_config(model / "scheduler", "scheduler")
    shift = scheduler.get("shift", scheduler.get("flow_shift", 1.0))
    if not isinstance(shift, int | float):
        raise UserError(f"{model}: its scheduler's shift is {shift!r}, not a number; download or export it again")
    added = [{"file": lora.file.name, "strength": lora.strength} for lora in loras]
    text, own_shift = merged_settings(model, loras)
    is_dynamic = bool(scheduler.get("use_dynamic_shifting")) if own_shift is None else own_shift == DYNAMIC
    drawing, last_time = drawing_of_adapters(loras)
    names = " and ".join(f"{lora.file.name} at {lora.strength:g}" for lora in loras)
    weights = f"{facts.get('weights', model.name)} with {names}"
    return ExportSpec(
        family=family,
        base=model,
        transformer_config={key: value for key, value in config.items() if not key.startswith("_")},
        save_dtype=dtype,
        shift=float(own_shift) if isinstance(own_shift, int | float) else shift,
        flux_shift=is_dynamic,
        last_time=scheduler.get("shift_terminal") if last_time is None else last_time,
        text=text,
        facts={**facts, **drawing_facts(drawing), "weights": weights, "loras": added},
    )


def _padding(file: Path) -> Padding:
    padding = single_files(family_of_file(), file).padding_of(file)
    if padding is None:
        raise UserError(f"{file} is not padded, or was not written by sd3-light; leave the option out")
    return padding


def _dtype(name: str) -> torch.dtype:
    if name not in LORA_DTYPES:
        raise UserError(f"--dtype {name}: unknown dtype; choose one of {', '.join(LORA_DTYPES)}")
    return LORA_DTYPES[name]
