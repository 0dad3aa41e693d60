"""A complete diffusers folder, made of the denoiser's weights and the frozen parts it was trained with."""

import filecmp
import inspect
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sd3_light import __version__
from sd3_light.config.faults import UserError
from sd3_light.core.family import Family
from sd3_light.export.card import model_card
from sd3_light.export.export_spec import ExportError, ExportSpec, first_few, write_json, write_texts
from sd3_light.export.licence import licence_file
from sd3_light.export.proof import PIPELINE_FILE, expectation, prove
from sd3_light.files import apply_umask, new_folder
from sd3_light.flow.scheduler import folder_scheduler, shift_of
from sd3_light.inputs import require_regular
from sd3_light.model.folder import components
from sd3_light.model.loading import kept_in_float32
from sd3_light.model.part_configs import FACTS_FILE, read_json
from sd3_light.system import release_freed_memory


class WeightsOnDemand(Mapping[str, Tensor]):
    """Weights by name that are read each time they are asked for: an export holds one of them beside its copies."""

    def __init__(self, readers: Mapping[str, Callable[[], Tensor]]) -> None:
        self._readers = readers

    def __getitem__(self, name: str) -> Tensor:
        return self._readers[name]()

    def __contains__(self, name: object) -> bool:  # the inherited one reads
        return name in self._readers

    def __iter__(self) -> Iterator[str]:
        return iter(self._readers)

    def __len__(self) -> int:
        return len(self._readers)


def write_folder(
    out: Path, state: Mapping[str, Tensor], spec: ExportSpec, replace: bool = True, owned: bool = False
) -> Path:
    """Write and verify ``out``: it appears only after stock diffusers has loaded it with equal results.

    Live weights are only read; those that are ``owned`` change no more, are not copied without need, and leave a dict,
    so that they are freed before the clean process starts. An existing ``out`` is replaced (an error without
    ``replace``), and kept on failure.
    """
    weights = checked_copy(state, spec, owned)
    if owned and isinstance(state, dict):
        state.clear()
    missing = spec.family.files.missing(spec.base, denoiser=False)
    if spec.family.files.writes_scheduler:
        missing = tuple(name for name in missing if not name.startswith("scheduler/"))
    if missing:
        raise UserError(
            f"{spec.base} lacks {first_few(missing)}; the VAE, text encoders and tokenizers of an export come from it"
        )
    with new_folder(out, replace) as temporary:
        _write_parts(temporary, out, weights, spec)
        expected = expectation(temporary, spec, weights)
        del weights  # the clean process needs memory, too
        release_freed_memory()
        write_json(temporary / "proof.json", prove(temporary, spec, expected))
    return out


def checked_copy(state: Mapping[str, Tensor], spec: ExportSpec, owned: bool = False) -> dict[str, Tensor]:
    """Copy weights, checked, to the CPU in ``save_dtype``; they must be float32 or ``save_dtype``, and finite.

    Those that stock diffusers always loads in float32 stay in it. Weights that are ``owned`` and need no cast are
    returned as they are. Each one is asked for once.
    """
    model: Any = spec.family.weights.empty(spec.transformer_config)
    expected = model.state_dict()
    whole = kept_in_float32(model)
    wrong = [f"missing {name}" for name in expected if name not in state]
    wrong += [f"unexpected {name}" for name in state if name not in expected]
    not_finite: list[str] = []
    copies: dict[str, Tensor] = {}
    for name in [name for name in expected if name in state]:
        tensor = state[name]
        wrong += _mismatches(name, tensor, expected[name], spec.save_dtype)
        if not wrong:
            # buffers (the position table) stay in float32 only if the whole folder does: stock loading casts them too
            dtype = torch.float32 if whole(name) else spec.save_dtype
            copies[name] = tensor.detach().to("cpu", dtype, copy=not owned).contiguous()
            not_finite += _not_finite(name, tensor, copies[name])
        del tensor  # before the next one is read
    if messages := wrong or not_finite:
        raise ExportError(f"nothing was saved: {first_few(messages, 5, '; ')}")
    return copies


def _mismatches(name: str, tensor: Tensor, expected: Tensor, dtype: torch.dtype) -> Iterator[str]:
    """Yield the differences between a weight and that of the model of the config."""
    if tensor.shape != expected.shape:
        yield f"{name} has shape {list(tensor.shape)}, not {list(expected.shape)}"
    if tensor.dtype not in (torch.float32, dtype):
        yield f"{name} has type {_dtype_name(tensor.dtype)}, not float32 (or {_dtype_name(dtype)}, the saved type)"
    if tensor.is_meta:
        yield f"{name} holds no data (meta tensor)"


def _not_finite(name: str, tensor: Tensor, copy: Tensor) -> Iterator[str]:
    """Yield what is wrong with a tensor with NaN, infinity, or a value that the saved dtype cannot hold."""
    if is_finite(copy):
        return
    if is_finite(tensor):
        yield f"{name} has values beyond {_dtype_name(copy.dtype)}, choose another save_dtype"
    else:
        yield f"{name} contains NaN or infinity"


def host_copy(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a copy in host memory: in ``dtype``, or in float32 if that cannot hold its values."""
    cast = tensor.to(dtype)
    kept = cast if is_finite(cast) else tensor.float()  # an export then reports the values
    return kept.to("cpu", copy=kept is tensor)


def is_finite(tensor: Tensor) -> bool:
    """Return whether a tensor has no NaN and no infinity."""
    # NaN spreads to both ends; twenty times as fast as isfinite().all() in bfloat16 on a CPU
    return all(math.isfinite(end.item()) for end in torch.aminmax(tensor))


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _write_parts(folder: Path, out: Path, weights: Mapping[str, Tensor], spec: ExportSpec) -> None:
    written = {"transformer": ["diffusers", spec.family.denoiser]}
    scheduler = spec.make_scheduler()
    if spec.family.files.writes_scheduler or shift_of(scheduler) != shift_of(folder_scheduler(spec.base)):
        written["scheduler"] = ["diffusers", type(scheduler).__name__]
        scheduler.save_pretrained(folder / "scheduler")
    frozen = [part for part in components(spec.base) if part not in written]
    link_parts(spec.base, folder, frozen, series=out.parent)
    denoiser: Any = spec.family.weights.from_state(spec.transformer_config, weights)
    denoiser.save_pretrained(folder / "transformer", safe_serialization=True, max_shard_size=spec.max_shard_size)
    for path in (folder / "transformer").iterdir():
        apply_umask(path)
    write_json(folder / "model_index.json", {**read_json(spec.base / "model_index.json"), **written})
    add_pipeline(folder, spec.family, spec.text)
    facts = {"sd3_light": __version__, "text": dict(spec.text), **spec.facts}
    about = {**spec.about, "parameters": denoiser.num_parameters(), "save_dtype": _dtype_name(spec.save_dtype)}
    card = {"README.md": model_card(spec, facts, about)}
    write_texts(folder, spec, facts, licence_file(spec.base) | card)


def add_pipeline(folder: Path, family: Family, text: Mapping[str, Any]) -> None:
    """Add or remove a folder's own pipeline, for users without this package, according to its text policy.

    A family's custom pipeline becomes `pipeline.py` (this package never runs that copy), its settings entries of
    `model_index.json`; without one, the base's settings are removed.
    """
    path = folder / "model_index.json"
    index = {key: value for key, value in read_json(path).items() if key not in family.files.pipeline_settings}
    custom = family.files.custom_pipeline(text)
    if custom is not None:
        (folder / PIPELINE_FILE).write_bytes(Path(inspect.getfile(custom.kind)).read_bytes())
        index |= custom.settings
    # stock diffusers refuses to open a folder that names a custom class
    index["_class_name"] = family.pipeline
    write_json(path, index)


def read_facts(folder: Path) -> dict[str, Any]:
    """Return the facts that an export contains about itself; empty for folders of other programs."""
    path = folder / FACTS_FILE
    facts = read_json(path) if path.is_file() else {}
    if not isinstance(facts.get("text", {}), dict):
        raise UserError(f"{path}: its entry `text` is not a JSON object; export the folder again")
    return facts


def link_parts(base: Path, folder: Path, parts: Iterable[str], series: Path) -> None:
    """Put parts of ``base`` into ``folder`` as hard links, or as copies that later folders of ``series`` link to."""
    for part in parts:
        (folder / part).mkdir()
        for path in sorted((base / part).iterdir()):
            if path.is_file():
                _link_or_copy(path, folder / part / path.name, series)


def _link_or_copy(source: Path, target: Path, series: Path) -> None:
    source = source.resolve()  # a hub cache contains symbolic links
    if _link(source, target):
        return
    for earlier in sorted(series.glob(f"*/{target.parent.name}/{target.name}")):
        copy = earlier.stat()
        original = source.stat()
        is_copy = (copy.st_size, copy.st_mtime_ns) == (original.st_size, original.st_mtime_ns)
        if is_copy and _link(earlier, target):
            return
    require_regular(source)
    shutil.copy2(source, target)  # keeps the modification time, which identifies the copy later
    if not filecmp.cmp(source, target, shallow=False):
        raise OSError(f"{target} differs from {source} after copying")


def _link(source: Path, target: Path) -> bool:
    try:
        os.link(source, target)
    except OSError:
        return False
    return True
