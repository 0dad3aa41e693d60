"""The community's SD3 single file, from a diffusers folder and back, bit for bit and with little memory."""

import json
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from diffusers import __version__ as diffusers_version
from torch import Tensor

from sd3_light import __version__
from sd3_light.config.faults import UserError
from sd3_light.export.diffusers_folder import FACTS_FILE, FROZEN, read_facts
from sd3_light.export.lora_layouts import Padding
from sd3_light.export.part_links import link_parts
from sd3_light.export.proof import ProofError
from sd3_light.export.real_text import add_pipeline
from sd3_light.export.single_names import deduced_config, padded_config
from sd3_light.export.single_notes import blocks_in_file, reader_notes, refuse_wrong_heads
from sd3_light.export.single_parts import (
    PREFIXES,
    PROJECTION,
    TEXT_ENCODERS,
    Config,
    Model,
    from_single_file,
    open_tensors,
    read_part,
    to_single_file,
    weights_stem,
    without_pads,
)
from sd3_light.files import new_file, new_folder, refuse_existing, write_errors
from sd3_light.model.pipeline_folder import missing_parts
from sd3_light.model.single_file_config import METADATA_KEY
from sd3_light.model.start import folder_size, read_json
from sd3_light.tensor_file import StoredTensor, same, write_tensor_file

"""The one metadata entry of our files, sorted JSON: see ``_about``."""

ENDING = ".safetensors"
_INDEX = "model_index.json"
_SCHEDULER = Path("scheduler", "scheduler_config.json")


class Contents(NamedTuple):
    """The last arguments of `write_single_file`."""

    vae: bool = True
    text_encoders: bool = False
    pad_blocks: bool = True


@dataclass(frozen=True)
class Written:
    """What was written, and sentences that its user should read."""

    path: Path
    notes: tuple[str, ...]


def is_single_file(path: Path) -> bool:
    """Whether a name is that of a single file and not of a folder."""
    return path.suffix == ENDING


# --- folder to file ---------------------------------------------------------------------------


def write_single_file(
    folder: Path, out: Path, vae: bool = True, text_encoders: bool = False, pad_blocks: bool = True
) -> Written:
    """Write ``folder``, a complete diffusers SD3, as the one file ``out``.

    It appears under its name when it has been read back and found to hold every bit of the folder. ``pad_blocks`` adds
    identity blocks where there are fewer blocks than heads, which readers want. Memory: a few chunks of 16 MiB.
    """
    refuse_existing(out)
    if not is_single_file(out):
        raise UserError(f"{out}: readers know a single file by its ending; give a name that ends in {ENDING}")
    folder_size(folder / "transformer")  # a fault where this is no SD3 denoiser
    parts = ("transformer", *(["vae"] if vae else []), *(_encoders_of(folder) if text_encoders else []))
    model = _read_parts(folder, parts)
    refuse_wrong_heads(model.configs["transformer"])
    blocks = blocks_in_file(model.configs["transformer"], pad_blocks)
    about = _about(folder, model, blocks)
    notes = tuple(reader_notes(model, blocks, about["scheduler"], about["facts"].get("text", {})))
    with write_errors(out), new_file(out) as temporary:
        write_tensor_file(temporary, to_single_file(model, blocks), {METADATA_KEY: json.dumps(about, sort_keys=True)})
        _require_same(_read_file(temporary, None, keep_pads=False).model, model, out)
    return Written(out, notes)


def _about(folder: Path, model: Model, blocks: int) -> dict[str, Any]:
    """What the file says about itself: with it, it is read back as the folder it came from."""
    scheduler = folder / _SCHEDULER
    return {
        "version": __version__,
        "config": model.configs["transformer"],
        "true_blocks": model.configs["transformer"]["num_layers"],
        "blocks_in_file": blocks,
        "other_configs": {part: config for part, config in model.configs.items() if part != "transformer"},
        "scheduler": read_json(scheduler) if scheduler.is_file() else {},
        "facts": read_facts(folder),  # sd3_light.json: text policy, which weights, steps, samples
    }


def _encoders_of(folder: Path) -> list[str]:
    found = [part for part in TEXT_ENCODERS if (folder / part).is_dir()]
    if not found:
        raise UserError(f"{folder} has no text encoders; leave them out of the single file")
    return found


# --- file to folder ---------------------------------------------------------------------------


def read_single_file(path: Path, base: Path | None, out: Path, keep_pads: bool = False) -> Written:
    """Write the single file ``path`` as the diffusers folder ``out``.

    What it does not hold (tokenizers, always) comes from ``base``, a diffusers folder, as links where the disk allows
    it. Without ``base`` the folder holds only the parts of the file: enough for `init`, not for a pipeline. Identity
    blocks are left out where the file's own metadata says that they are padding, unless ``keep_pads``.
    """
    refuse_existing(out)
    if base is not None and not (base / _INDEX).is_file():
        raise UserError(f"{base} is no diffusers folder (no {_INDEX}); give a complete SD3 folder as base")
    read = _read_file(path, base, keep_pads)
    with write_errors(out), new_folder(out) as temporary:
        _write_folder(temporary, read, base)
        _require_same(_read_parts(temporary, read.model.tensors), read.model, out)
        if base is not None:
            _require_complete(temporary, base)
    return Written(out, read.notes)


def transformer_from_single_file(path: Path, keep_pads: bool = False) -> tuple[Config, dict[str, Tensor]]:
    """The denoiser of an SD3 single file, ours or another's, with or without the usual prefix: the arguments of
    `SD3Transformer2DModel` and its state dict, in the file's types. Other parts of the file are not looked at."""
    tensors, metadata = open_tensors(path)
    config, stock = _denoiser(_parts(tensors)["transformer"], _said(metadata, path), path, keep_pads)
    arguments = {name: value for name, value in config.items() if not name.startswith("_")}
    return arguments, {name: tensor.load() for name, tensor in stock.items()}


def padding_of(path: Path) -> Padding | None:
    """How a single file of ours is padded; None where it is not."""
    about = _said(open_tensors(path)[1], path)
    found = Padding(about.get("true_blocks", 0), about.get("blocks_in_file", 0))
    return found if found.num_layers < found.num_blocks else None


@dataclass(frozen=True)
class _File:
    """A single file, read as a folder."""

    model: Model
    about: Mapping[str, Any]
    notes: tuple[str, ...]


def _read_file(path: Path, base: Path | None, keep_pads: bool) -> _File:
    tensors, metadata = open_tensors(path)
    about, parts = _said(metadata, path), _parts(tensors)
    strange, notes = parts.pop(""), []
    config, stock = _denoiser(parts.pop("transformer"), about, path, keep_pads)
    model = Model({"transformer": config}, {"transformer": stock})
    for part, found in parts.items():
        config_of = _config_of(part, about, base)
        if config_of is None:
            notes.append(f"{part} is left out: {path} does not tell its config; give a base folder that has one")
            continue
        if part == "text_encoder" and PROJECTION not in found:
            notes.append("CLIP-L's text_projection is not in the file: it is the identity, as readers take it")
        model.configs[part] = config_of
        model.tensors[part] = from_single_file(part, found, config_of, f"{path} ({part})")
    if strange:
        notes.append(f"left out, as no part of SD3: {len(strange)} tensors such as {min(strange)}")
    if base is None:
        notes.append("without a base folder there are no tokenizers: this is a denoiser to start from, no pipeline")
    return _File(model, about, tuple(notes))


def _parts(tensors: Mapping[str, StoredTensor]) -> dict[str, dict[str, StoredTensor]]:
    """The tensors of each part that is there without its prefix; "" are those of none. A file that is a denoiser alone
    may have no prefix at all."""
    bare = not any(name.startswith(PREFIXES["transformer"]) for name in tensors)
    prefixes = {**PREFIXES, "transformer": ""} if bare and "x_embedder.proj.weight" in tensors else PREFIXES
    order = sorted(prefixes, key=lambda part: len(prefixes[part]), reverse=True)  # the empty prefix fits all: last
    found: dict[str, dict[str, StoredTensor]] = {"transformer": {}, "": {}}
    for name, tensor in tensors.items():
        part = next((part for part in order if name.startswith(prefixes[part])), "")
        found.setdefault(part, {})[name.removeprefix(prefixes.get(part, ""))] = tensor
    return found


def _said(metadata: Mapping[str, str], path: Path) -> dict[str, Any]:
    """What a file of ours says about itself; empty for others'."""
    if METADATA_KEY not in metadata:
        return {}
    try:
        about: dict[str, Any] = json.loads(metadata[METADATA_KEY])
        blocks = (about["config"]["num_layers"], about["true_blocks"], about["blocks_in_file"])
        sound = blocks[0] == blocks[1] <= blocks[2] and {*map(type, blocks)} == {int}
        _require_tables(about)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: its metadata {METADATA_KEY!r} is damaged ({error!r}); write the file anew") from error
    if not sound:
        raise UserError(
            f"{path}: its metadata {METADATA_KEY!r} contradicts itself about blocks: {blocks}; write the file anew"
        )
    return about


def _require_tables(about: Mapping[str, Any]) -> None:
    """A TypeError where an entry that others look into is no table, or no list of numbers."""
    others = about.get("other_configs", {})
    facts = about.get("facts", {})
    for table in (others, facts, about.get("scheduler", {}), *others.values(), facts.get("text", {})):
        if not isinstance(table, dict):
            raise TypeError(f"{table!r} is no table")
    dual = about["config"].get("dual_attention_layers") or ()
    if not all(type(layer) is int for layer in dual):
        raise TypeError(f"dual_attention_layers {dual!r}")


def _denoiser(
    found: Mapping[str, StoredTensor], about: Mapping[str, Any], path: Path, keep_pads: bool
) -> tuple[Config, dict[str, StoredTensor]]:
    """(config, tensors) as diffusers has them. Without metadata the tensors tell the config, and all blocks stay."""
    if not about:
        said = {"_class_name": "SD3Transformer2DModel", "_diffusers_version": diffusers_version}
        config = {**deduced_config(found, str(path)), **said}
        return config, from_single_file("transformer", found, config, str(path))
    config, blocks = about["config"], about["blocks_in_file"]
    wide = padded_config(config, blocks) if blocks > config["num_layers"] else config
    stock = from_single_file("transformer", found, wide, str(path))
    return (wide, stock) if keep_pads else (config, without_pads(stock, config, blocks, str(path)))


def _config_of(part: str, about: Mapping[str, Any], base: Path | None) -> Config | None:
    said: Config | None = about.get("other_configs", {}).get(part)
    if said is None and base is not None and (base / part / "config.json").is_file():
        return read_json(base / part / "config.json")
    return said


# --- folders ----------------------------------------------------------------------------------


def _read_parts(folder: Path, parts: Iterable[str]) -> Model:
    read = {part: read_part(folder, part) for part in parts}
    return Model({part: found[0] for part, found in read.items()}, {part: found[1] for part, found in read.items()})


def _write_folder(folder: Path, read: _File, base: Path | None) -> None:
    for part, tensors in read.model.tensors.items():
        (folder / part).mkdir()
        _write_json(folder / part / "config.json", read.model.configs[part])
        write_tensor_file(folder / part / f"{weights_stem(part)}.safetensors", tensors, {"format": "pt"})
    if read.about.get("facts"):
        _write_json(folder / FACTS_FILE, read.about["facts"])
    if read.about.get("scheduler"):
        (folder / _SCHEDULER.parent).mkdir()
        _write_json(folder / _SCHEDULER, read.about["scheduler"])
    if base is not None:
        _complete(folder, base)
        add_pipeline(folder, dict(read.about.get("facts") or {}).get("text", {}))


def _complete(folder: Path, base: Path) -> None:
    """Take from ``base`` what a pipeline wants and the file did not hold."""
    shutil.copyfile(base / _INDEX, folder / _INDEX)
    wanted = (*FROZEN, str(_SCHEDULER.parent))
    missing = [part for part in wanted if (base / part).is_dir() and not (folder / part).exists()]
    link_parts(base, folder, missing, series=folder.parent)


def _write_json(path: Path, data: Mapping[str, Any]) -> None:
    """As diffusers and transformers write their configs, so that these are equal byte for byte."""
    path.write_text(json.dumps(data, indent=2, sort_keys=True) + "\n", encoding="utf-8")


# --- checks -----------------------------------------------------------------------------------


def _require_complete(folder: Path, base: Path) -> None:
    """What the file did not hold and ``base`` has not is a fault, not a pipeline that nobody can load."""
    missing = missing_parts(folder, transformer=True)
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise UserError(
            f"{base} lacks {', '.join(missing[:3])}{more}, which the file lacks too; give a complete folder"
        )


def _require_same(written: Model, given: Model, out: Path) -> None:
    """What was written is what was given: the same parts, names, types, shapes and bits."""
    for part, tensors in given.tensors.items():
        found = written.tensors.get(part, {})
        wrong = sorted(found.keys() ^ tensors.keys())
        wrong += [name for name in tensors if name in found and not same(found[name], tensors[name])]
        if wrong:
            raise ProofError(f"{out} was not written: read back, {part} differs in {', '.join(wrong[:5])}")
