"""A complete diffusers folder from the denoiser's weights and the frozen parts it was trained with."""

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from diffusers import SD3Transformer2DModel
from torch import Tensor

from sd3_light import __version__
from sd3_light.export.card import model_card
from sd3_light.export.verify import prove
from sd3_light.sampling.scheduler import flow_scheduler

FACTS = "sd3_light.json"
FROZEN = ("vae", "text_encoder", "text_encoder_2", "text_encoder_3", "tokenizer", "tokenizer_2", "tokenizer_3")
MAX_SHARD = "10GB"


class ExportError(Exception):
    """The weights are not the model that the config promises; the text names the keys."""


@dataclass(frozen=True)
class ExportSpec:
    """What the folder must be: where frozen parts come from, the denoiser's config, type, shift and text policy."""

    base: Path
    transformer_config: Mapping[str, Any]
    save_dtype: torch.dtype = torch.bfloat16
    shift: float = 1.0
    flux_shift: bool = False
    text: Mapping[str, Any] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    max_shard_size: str = MAX_SHARD


def write_folder(out: Path, state: Mapping[str, Tensor], spec: ExportSpec) -> Path:
    """Write, prove, rename: ``out`` appears only when stock diffusers has loaded it and agreed. Live weights are only
    read. An existing ``out`` is replaced, and stays if anything fails."""
    weights = checked_copy(state, spec)
    temporary = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        _write_parts(temporary, weights, spec)
        proof = prove(temporary, spec.transformer_config, weights)
        (temporary / "proof.json").write_text(json.dumps(proof, indent=1) + "\n", encoding="utf-8")
        _replace(temporary, out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return out


def _replace(new: Path, out: Path) -> None:
    """Put ``new`` in the place of ``out``; a folder cannot be renamed over another, so the old one steps aside."""
    aside = out.with_name(f".{out.name}.{os.getpid()}.old")
    if out.exists():
        os.replace(out, aside)
    try:
        os.replace(new, out)
    except OSError:
        if aside.exists():
            os.replace(aside, out)
        raise
    shutil.rmtree(aside, ignore_errors=True)


def checked_copy(state: Mapping[str, Tensor], spec: ExportSpec) -> dict[str, Tensor]:
    """The weights and buffers on the CPU in ``save_dtype``, after comparing names and shapes with the config's."""
    with torch.device("meta"):
        expected = SD3Transformer2DModel(**spec.transformer_config).state_dict()
    problems = [f"missing {name}" for name in expected if name not in state]
    problems += [f"unexpected {name}" for name in state if name not in expected]
    for name, tensor in state.items():
        if name in expected and tensor.shape != expected[name].shape:
            problems.append(f"{name} has shape {list(tensor.shape)}, not {list(expected[name].shape)}")
        if tensor.is_meta:
            problems.append(f"{name} holds no data (meta tensor)")
    if problems:
        more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise ExportError(f"nothing was saved: {'; '.join(problems[:5])}{more}")
    # buffers (the position table) stay in float32 only if the whole folder does: stock loading casts them alike
    return {name: state[name].detach().to("cpu", spec.save_dtype, copy=True).contiguous() for name in expected}


def _write_parts(folder: Path, weights: Mapping[str, Tensor], spec: ExportSpec) -> None:
    for part in FROZEN:
        _link_tree(spec.base / part, folder / part)
    with torch.device("meta"):
        denoiser = SD3Transformer2DModel(**spec.transformer_config)
    denoiser.load_state_dict(dict(weights), strict=True, assign=True)
    denoiser.save_pretrained(folder / "transformer", safe_serialization=True, max_shard_size=spec.max_shard_size)
    flow_scheduler(spec.shift, spec.flux_shift).save_pretrained(folder / "scheduler")
    index = json.loads((spec.base / "model_index.json").read_text(encoding="utf-8"))
    index["transformer"] = ["diffusers", "SD3Transformer2DModel"]
    index["scheduler"] = ["diffusers", "FlowMatchEulerDiscreteScheduler"]
    _write_json(folder / "model_index.json", index)
    facts = {"sd3_light": __version__, "text": dict(spec.text), **spec.facts}
    _write_json(folder / FACTS, facts)
    (folder / "README.md").write_text(model_card(spec.transformer_config, facts), encoding="utf-8")


def _write_json(path: Path, data: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _link_tree(source: Path, target: Path) -> None:
    """Frozen parts are hard-linked, or copied where the file system cannot link."""
    target.mkdir()
    for path in sorted(source.iterdir()):
        if not path.is_file():
            continue
        try:
            os.link(path.resolve(), target / path.name)
        except OSError:
            shutil.copyfile(path, target / path.name)


def read_facts(folder: Path) -> dict[str, Any]:
    """What an export says about itself; empty for folders that other programs wrote."""
    path = folder / FACTS
    facts: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return facts
