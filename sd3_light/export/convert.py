"""The convert verb: a diffusers folder to the community's single file, and back."""

from pathlib import Path

from sd3_light.config.faults import UserError
from sd3_light.core.files import Contents, Conversion, is_single_file
from sd3_light.core.registry import family_of_file, family_of_folder, single_files
from sd3_light.export.background_saves import CHECKPOINT, EXPORT, FOLDERS
from sd3_light.export.chosen import exports_of, refuse_script_run
from sd3_light.export.lora_stack import adapter_file


def run(
    source: Path, out: Path, contents: Contents | None = None, base: Path | None = None, keep_pads: bool = False
) -> Conversion:
    """Convert a folder to the file ``out``, or a file to the folder ``out``; compared bit for bit before it appears.

    ``contents`` selects what goes into the file. ``base`` is the folder that provides the parts that a file lacks.
    """
    if source.is_dir():
        _refuse(base is not None, f"--base does not apply: {source} is a folder that has its parts")
        _refuse(keep_pads, f"--keep-pads does not apply: {source} is a folder, and only files are padded")
        _require_model(source)
        return single_files(family_of_folder(source), source).write(source, out, contents or Contents())
    if not source.is_file():
        raise UserError(f"{source} does not exist; pass a diffusers folder or a single .safetensors file")
    if is_single_file(out):
        raise UserError(f"{out}: {source} is a single file already; pass the name of a folder to write")
    _refuse(
        contents not in (None, Contents()),
        f"--vae, --text-encoders and --pad-blocks select what goes into a file, but {source} is a file to read",
    )
    family = family_of_file() if base is None else family_of_folder(base)
    return single_files(family, source).read(source, base, out, keep_pads)


def _require_model(folder: Path) -> None:
    """Raise a UserError with a remedy if the folder is a run or an adapter's export instead of a model."""
    if (folder / "transformer" / "config.json").is_file():
        return
    if (folder / FOLDERS[EXPORT]).is_dir():
        export = exports_of(folder)[-1]
        raise UserError(f"{folder} is a run folder; pass an export of it, such as {export}")
    if (folder / FOLDERS[CHECKPOINT]).is_dir():
        refuse_script_run(folder)
        raise UserError(f"{folder} is a run folder without exports; write one with `sd3-light export {folder} OUT`")
    if file := adapter_file(folder):
        raise UserError(
            f"{folder} is an adapter, not a model; merge it first: sd3-light lora merge MODEL OUT {file}, or convert "
            "the file with `sd3-light lora convert`"
        )


def _refuse(condition: bool, message: str) -> None:
    if condition:
        raise UserError(f"{message}; leave the option out")
