"""The convert stage: a diffusers folder as the community's single file, and back."""

from pathlib import Path

from sd3_light.config.faults import UserError
from sd3_light.export.single_file import Contents, Written, is_single_file, read_single_file, write_single_file


def run(
    source: Path, out: Path, contents: Contents | None = None, base: Path | None = None, keep_pads: bool = False
) -> Written:
    """A folder becomes the file ``out``, a file the folder ``out``; each is compared bit for bit before it appears.

    ``contents`` is what of a folder goes into the file. ``base`` is the folder that a file's missing parts come from.
    """
    if source.is_dir():
        _refuse(base is not None, f"--base has no meaning here: {source} is a folder that has its parts")
        _refuse(keep_pads, f"--keep-pads has no meaning here: {source} is a folder, and only files are padded")
        return write_single_file(source, out, *(contents or Contents()))
    if not source.is_file():
        raise UserError(f"{source} does not exist; give a diffusers folder or a single .safetensors file")
    if is_single_file(out):
        raise UserError(f"{out}: {source} is a single file already; give the name of a folder to write")
    _refuse(
        contents not in (None, Contents()),
        f"--vae, --text-encoders and --pad-blocks choose what goes into a file; {source} is one, and all of it is read",
    )
    return read_single_file(source, base, out, keep_pads)


def _refuse(wrong: bool, words: str) -> None:
    if wrong:
        raise UserError(f"{words}; leave it out")
