"""The community's SD3 single file, from a diffusers folder and back, bit for bit and with little memory."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diffusers import __version__ as diffusers_version
from torch import Tensor

from sd3_light import __version__
from sd3_light.config.faults import UserError
from sd3_light.core.files import Contents, Conversion, Padding, SingleFiles, is_single_file
from sd3_light.core.registry import family_named
from sd3_light.export.diffusers_folder import add_pipeline, link_parts, read_facts
from sd3_light.export.export_spec import first_few
from sd3_light.export.proof import ProofError
from sd3_light.export.stored_parts import PartConfig
from sd3_light.families.sd3.file_metadata import model_metadata
from sd3_light.families.sd3.lora_names import reader_padding
from sd3_light.families.sd3.single_names import padded_config, unpad
from sd3_light.families.sd3.single_notes import blocks_in_file, reader_notes, refuse_wrong_heads
from sd3_light.families.sd3.single_parts import (
    PREFIXES,
    PROJECTION,
    Model,
    from_single_file,
    read_part,
    to_single_file,
    weights_stem,
)
from sd3_light.families.sd3.start import config_of_shapes, folder_size
from sd3_light.files import new_file, new_folder, refuse_existing, write_errors
from sd3_light.inputs import parse_json, read_limited
from sd3_light.model.folder import FROZEN, TEXT_ENCODER_FOLDERS, missing_parts
from sd3_light.model.part_configs import FACTS_FILE, read_config
from sd3_light.tensor_file import HASH_KEY, METADATA_KEY, StoredTensor, open_tensors, same, write_tensor_file

_INDEX = "model_index.json"
_VAE_LEVELS = (128, 256, 512, 512)  # of SD3
_SCHEDULER = Path("scheduler", "scheduler_config.json")


# --- folder to file ---------------------------------------------------------------------------


def write_single_file(
    folder: Path, out: Path, vae: bool = True, text_encoders: bool = False, pad_blocks: bool = True
) -> Conversion:
    """Write ``folder``, a complete diffusers SD3, as the single file ``out``.

    The file appears only after it was read back and matches the folder bit for bit. ``pad_blocks`` adds identity
    blocks if there are fewer blocks than heads, as readers expect. Memory: a few chunks of 16 MiB.
    """
    refuse_existing(out)
    if not is_single_file(out):
        raise UserError(f"{out}: readers find single files by their suffix; choose a name that ends in .safetensors")
    folder_size(folder / "transformer")  # reports a folder that is not an SD3 denoiser
    parts = ("transformer", *(["vae"] if vae else []), *(_encoders_of(folder) if text_encoders else []))
    model = _read_parts(folder, parts)
    refuse_wrong_heads(model.configs["transformer"])
    blocks = blocks_in_file(model.configs["transformer"], pad_blocks)
    metadata = _metadata(folder, model, blocks)
    notes = tuple(reader_notes(model, blocks, metadata["scheduler"], metadata["facts"].get("text", {})))
    with write_errors(out), new_file(out) as temporary:
        entries = {METADATA_KEY: json.dumps(metadata, sort_keys=True), **_shown_metadata(model, metadata["facts"])}
        write_tensor_file(temporary, to_single_file(model, blocks), entries, HASH_KEY)
        _require_same(_read_file(temporary, None, keep_pads=False).model, model, out)
    return Conversion(out, notes)


def _metadata(folder: Path, model: Model, blocks: int) -> dict[str, Any]:
    """Return the metadata with which the file is read back as the folder it came from."""
    scheduler = folder / _SCHEDULER
    return {
        "version": __version__,
        "config": model.configs["transformer"],
        "true_blocks": model.configs["transformer"]["num_layers"],
        "blocks_in_file": blocks,
        "other_configs": {part: config for part, config in model.configs.items() if part != "transformer"},
        "scheduler": read_config(scheduler.parent, "scheduler") if scheduler.is_file() else {},
        "facts": read_facts(folder),  # sd3_light.json: text policy, which weights, steps, samples
    }


def _shown_metadata(model: Model, facts: Mapping[str, Any]) -> dict[str, str]:
    """Return the metadata for programs that list models."""
    config = model.configs["transformer"]
    levels = model.configs.get("vae", {}).get("block_out_channels", _VAE_LEVELS)
    return model_metadata(config, config["sample_size"] * 2 ** (len(levels) - 1), facts)


def _encoders_of(folder: Path) -> list[str]:
    encoders = [part for part in TEXT_ENCODER_FOLDERS if (folder / part).is_dir()]
    if not encoders:
        raise UserError(f"{folder} has no text encoders; leave them out of the single file")
    return encoders


# --- file to folder ---------------------------------------------------------------------------


def read_single_file(path: Path, base: Path | None, out: Path, keep_pads: bool = False) -> Conversion:
    """Write the single file ``path`` as the diffusers folder ``out``.

    Parts that it lacks (always the tokenizers) come from ``base``, a diffusers folder, as links where possible. Without
    ``base`` the folder contains only the parts of the file: enough for `init`, not for a pipeline. Identity blocks are
    removed if the file's metadata marks them as padding, unless ``keep_pads``.
    """
    refuse_existing(out)
    if base is not None and not (base / _INDEX).is_file():
        raise UserError(f"{base} is not a diffusers folder (no {_INDEX}); pass a complete SD3 folder as base")
    content = _read_file(path, base, keep_pads)
    with write_errors(out), new_folder(out) as temporary:
        _write_folder(temporary, content, base)
        _require_same(_read_parts(temporary, content.model.tensors), content.model, out)
        if base is not None and (missing := missing_parts(temporary, transformer=True)):
            raise UserError(f"{base} lacks {first_few(missing)}, and so does the file; pass a complete folder")
    return Conversion(out, content.notes)


def transformer_from_single_file(path: Path, keep_pads: bool = False) -> tuple[PartConfig, dict[str, Tensor]]:
    """Load the denoiser of an SD3 single file of any program, with or without the usual prefix.

    Returns the arguments of `SD3Transformer2DModel` and its state dict in the file's dtypes. Other parts are ignored.
    """
    config, stock = open_denoiser(path, keep_pads)
    arguments = {name: value for name, value in config.items() if not name.startswith("_")}
    return arguments, {name: tensor.load() for name, tensor in stock.items()}


def open_denoiser(path: Path, keep_pads: bool = False) -> tuple[PartConfig, dict[str, StoredTensor]]:
    """Return the config of a single file's denoiser, and its tensors in diffusers' layout, unread."""
    tensors, metadata = open_tensors(path)
    return _denoiser(_parts(tensors)["transformer"], _own_metadata(metadata, path), path, keep_pads)


@dataclass(frozen=True)
class _FileContent:
    """A single file, converted to diffusers' layout."""

    model: Model
    metadata: Mapping[str, Any]
    notes: tuple[str, ...]


def _read_file(path: Path, base: Path | None, keep_pads: bool) -> _FileContent:
    tensors, header_metadata = open_tensors(path)
    metadata = _own_metadata(header_metadata, path)
    parts = _parts(tensors)
    unknown = parts.pop("")
    notes = []
    transformer_config, stock = _denoiser(parts.pop("transformer"), metadata, path, keep_pads)
    model = Model({"transformer": transformer_config}, {"transformer": stock})
    for part, part_tensors in parts.items():
        config = _config_of(part, metadata, base)
        if config is None:
            notes.append(f"{part} is left out: {path} does not contain its config; pass a base folder that has one")
            continue
        if part == "text_encoder" and PROJECTION not in part_tensors:
            notes.append("CLIP-L's text_projection is not in the file: the identity is used, as in other readers")
        model.configs[part] = config
        model.tensors[part] = from_single_file(part, part_tensors, config, f"{path} ({part})")
    if unknown:
        notes.append(f"left out because they do not belong to SD3: {len(unknown)} tensors such as {min(unknown)}")
    if base is None:
        notes.append("without a base folder there are no tokenizers: use the folder to initialize training")
    return _FileContent(model, metadata, tuple(notes))


def _parts(tensors: Mapping[str, StoredTensor]) -> dict[str, dict[str, StoredTensor]]:
    """Group the tensors by part, without prefixes; "" are those of no part. A bare denoiser may have no prefix."""
    bare = not any(name.startswith(PREFIXES["transformer"]) for name in tensors)
    prefixes = {**PREFIXES, "transformer": ""} if bare and "x_embedder.proj.weight" in tensors else PREFIXES
    order = sorted(prefixes, key=lambda part: len(prefixes[part]), reverse=True)  # the empty prefix matches all: last
    parts: dict[str, dict[str, StoredTensor]] = {"transformer": {}, "": {}}
    for name, tensor in tensors.items():
        part = next((part for part in order if name.startswith(prefixes[part])), "")
        parts.setdefault(part, {})[name.removeprefix(prefixes.get(part, ""))] = tensor
    return parts


def _own_metadata(header_metadata: Mapping[str, str], path: Path) -> dict[str, Any]:
    """Return the metadata that `write_single_file` wrote, checked; empty for other programs' files."""
    if METADATA_KEY not in header_metadata:
        return {}
    try:
        metadata: dict[str, Any] = parse_json(header_metadata[METADATA_KEY])
        blocks = (metadata["config"]["num_layers"], metadata["true_blocks"], metadata["blocks_in_file"])
        consistent = blocks[0] == blocks[1] <= blocks[2] and {*map(type, blocks)} == {int}
        _require_tables(metadata)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{path}: its metadata {METADATA_KEY!r} is damaged ({error!r}); write the file again"
        ) from error
    if not consistent:
        raise UserError(
            f"{path}: its metadata {METADATA_KEY!r} has contradictory block counts: {blocks}; write the file again"
        )
    return metadata


def _require_tables(metadata: Mapping[str, Any]) -> None:
    """Raise a TypeError if an entry that is used as a table or a list of numbers is not one."""
    others = metadata.get("other_configs", {})
    facts = metadata.get("facts", {})
    for table in (others, facts, metadata.get("scheduler", {}), *others.values(), facts.get("text", {})):
        if not isinstance(table, dict):
            raise TypeError(f"{table!r} is not a table")
    dual = metadata["config"].get("dual_attention_layers") or ()
    if not all(type(layer) is int for layer in dual):
        raise TypeError(f"dual_attention_layers {dual!r}")


def _denoiser(
    tensors: Mapping[str, StoredTensor], metadata: Mapping[str, Any], path: Path, keep_pads: bool
) -> tuple[PartConfig, dict[str, StoredTensor]]:
    """Return (config, tensors) in diffusers' layout. Without metadata, the shapes give the config; all blocks stay."""
    if not metadata:
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        header = {"_class_name": "SD3Transformer2DModel", "_diffusers_version": diffusers_version}
        config = {**config_of_shapes(shapes, str(path)), **header}
        return config, from_single_file("transformer", tensors, config, str(path))
    config = metadata["config"]
    blocks = metadata["blocks_in_file"]
    padded = padded_config(config, blocks) if blocks > config["num_layers"] else config
    stock = from_single_file("transformer", tensors, padded, str(path))
    return (padded, stock) if keep_pads else (config, unpad(stock, config["num_layers"], blocks, str(path)))


def _config_of(part: str, metadata: Mapping[str, Any], base: Path | None) -> PartConfig | None:
    config: PartConfig | None = metadata.get("other_configs", {}).get(part)
    if config is None and base is not None and (base / part / "config.json").is_file():
        return read_config(base / part, part)
    return config


def _read_parts(folder: Path, parts: Iterable[str]) -> Model:
    contents = {part: read_part(folder / part, part) for part in parts}
    configs = {part: config for part, (config, _) in contents.items()}
    return Model(configs, {part: tensors for part, (_, tensors) in contents.items()})


def _write_folder(folder: Path, content: _FileContent, base: Path | None) -> None:
    for part, tensors in content.model.tensors.items():
        (folder / part).mkdir()
        _write_part(folder / part, part, content.model.configs[part], tensors)
    if content.metadata.get("facts"):
        _write_config(folder / FACTS_FILE, content.metadata["facts"])
    if content.metadata.get("scheduler"):
        (folder / _SCHEDULER.parent).mkdir()
        _write_config(folder / _SCHEDULER, content.metadata["scheduler"])
    if base is not None:
        (folder / _INDEX).write_bytes(read_limited(base / _INDEX))
        parts = (*FROZEN, str(_SCHEDULER.parent))
        missing = [part for part in parts if (base / part).is_dir() and not (folder / part).exists()]
        link_parts(base, folder, missing, series=folder.parent)
        add_pipeline(folder, family_named("sd3"), dict(content.metadata.get("facts") or {}).get("text", {}))


def _write_part(folder: Path, part: str, config: PartConfig, tensors: Mapping[str, StoredTensor]) -> None:
    _write_config(folder / "config.json", config)
    write_tensor_file(folder / f"{weights_stem(part)}.safetensors", tensors, {"format": "pt"})


def _write_config(path: Path, data: Mapping[str, Any]) -> None:
    """Write JSON as diffusers and transformers write their configs, so that equal configs are equal bytes."""
    path.write_text(json.dumps(data, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _require_same(written: Model, source: Model, out: Path) -> None:
    """Raise a ProofError unless both have the same parts, names, dtypes, shapes and bits."""
    for part, tensors in source.tensors.items():
        copies = written.tensors.get(part, {})
        wrong = sorted(copies.keys() ^ tensors.keys())
        wrong += [name for name in tensors if name in copies and not same(copies[name], tensors[name])]
        if wrong:
            raise ProofError(f"{out} was not written: read back, {part} differs in {', '.join(wrong[:5])}")


class SD3SingleFiles(SingleFiles):
    """See `SingleFiles`."""

    def write(self, folder: Path, out: Path, contents: Contents) -> Conversion:
        """See `SingleFiles.write`."""
        return write_single_file(folder, out, *contents)

    def read(self, path: Path, base: Path | None, out: Path, keep_pads: bool = False) -> Conversion:
        """See `SingleFiles.read`."""
        return read_single_file(path, base, out, keep_pads)

    def write_denoiser(self, path: Path, folder: Path) -> Path:
        """See `SingleFiles.write_denoiser`. Weights keep their dtypes. Memory: a few chunks of 16 MiB."""
        config, stock = open_denoiser(path)
        folder.mkdir()
        _write_part(folder, "transformer", config, stock)
        return folder

    def padding_of(self, path: Path) -> Padding | None:
        """See `SingleFiles.padding_of`."""
        metadata = _own_metadata(open_tensors(path)[1], path)
        padding = Padding(metadata.get("true_blocks", 0), metadata.get("blocks_in_file", 0))
        return padding if padding.num_layers < padding.num_blocks else None

    def needed_padding(self, config: Mapping[str, Any]) -> Padding | None:
        """See `SingleFiles.needed_padding`."""
        return reader_padding(config)
