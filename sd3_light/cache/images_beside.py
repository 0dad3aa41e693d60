"""Images written beside those of a dataset: a mask or a control image of the same name, in a separate folder.

Files that exist are kept, so the same command continues after an interruption.
"""

import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np
from PIL import Image

from sd3_light.cache.folder_images import decoded_batches, image_folder, listed_images, read_image
from sd3_light.config import DirectoryConfig, load_images
from sd3_light.config.faults import UserError
from sd3_light.files import write_atomically
from sd3_light.pages import data_uri, render_template, save_page, tint_masked
from sd3_light.runlog import progress
from sd3_light.sources.listing import is_image_name
from sd3_light.sources.preprocess import Reject

REJECTS = "rejects.jsonl"
"""The images that got none, in the folder that is written."""
_EXAMPLES = 48
_SIDE = 384

Made = Image.Image | str
"""What is written for an image, or why it gets none."""
Make = Callable[[Mapping[str, Image.Image]], Sequence[Made]]
"""Images by name -> what is written for each."""


@dataclass(frozen=True)
class Written:
    """A folder: how many images this run wrote, how many were there, and which images got none, with reasons."""

    folder: Path
    written: int
    kept: int
    rejects: Mapping[str, str]


@dataclass(frozen=True)
class FolderWork:
    """A folder of images, the folder that gets an image for each, and the names of those that have none yet."""

    what: str
    images: Path
    folder: Path
    names: Sequence[str]
    missing: Sequence[str]

    @staticmethod
    def of(what: str, images: Path, sources: Sequence[DirectoryConfig], folder: Path, overwrite: bool) -> "FolderWork":
        """List the images; the folder that is written may be below them, and its files are no images of theirs."""
        if folder.resolve() == images.resolve():
            raise UserError(f"--out: {folder} is the folder of the images; name another one")
        folder.mkdir(parents=True, exist_ok=True)
        apart = [source.model_copy(update={"references": (*source.references, folder)}) for source in sources]
        # images that differ in their suffix share a file
        listed = reversed(listed_images(images, apart))
        by_stem = {str(PurePosixPath(name).with_suffix("")): name for name in listed}
        existing = set() if overwrite else _stems(folder)
        names = list(reversed(by_stem.values()))
        missing = [name for stem, name in reversed(by_stem.items()) if stem not in existing]
        return FolderWork(what, images, folder, names, missing)

    def run(self, make: Make, batch: int) -> Written:
        """Write the missing images, and the list of those that get none."""
        rejects: dict[str, str] = {}
        with progress(f"{self.what} {self.images.name}", len(self.missing), "images") as bar:
            for decoded in decoded_batches(self.images, self.missing, batch):
                images = {name: image for name, image in decoded.items() if isinstance(image, Image.Image)}
                rejects |= {name: str(image) for name, image in decoded.items() if isinstance(image, Reject)}
                for name, made in zip(images, make(images) if images else [], strict=True):
                    path = self._path(name)
                    if isinstance(made, str):
                        rejects[name] = made
                        path.unlink(missing_ok=True)  # with --overwrite
                    else:
                        _write(path, made)
                bar.advance(len(decoded))
        self._list_rejects(rejects)
        kept = len(self.names) - len(self.missing)
        return Written(self.folder, len(self.missing) - len(rejects), kept, rejects)

    def _path(self, name: str) -> Path:
        return self.folder / PurePosixPath(name).with_suffix(".png")

    def _list_rejects(self, rejects: Mapping[str, str]) -> None:
        path = self.folder / REJECTS
        if not rejects:
            path.unlink(missing_ok=True)
            return
        lines = (json.dumps({"file": name, "reason": reason}) + "\n" for name, reason in rejects.items())
        write_atomically(path, "".join(lines).encode())

    def examples(self, most: int, tints: bool) -> "Iterator[Example]":
        """Yield some images with what is in the folder for them, evenly spaced by name."""
        stems = _stems(self.folder)
        files = {name: stems[stem] for name in self.names if (stem := _stem(name)) in stems}
        names = list(files)
        for name in names[:: max(1, len(names) // most)][:most]:
            image = read_image(self.images / name)
            made = read_image(self.folder / files[name])
            if isinstance(image, Image.Image) and isinstance(made, Image.Image):
                yield Example.of(name, image, made, tints)


@dataclass(frozen=True)
class Example:
    """An image on the page, and what was written for it."""

    name: str
    size: tuple[int, int]
    original: str
    made: str

    @staticmethod
    def of(name: str, image: Image.Image, made: Image.Image, tints: bool) -> "Example":
        """Return the example as data URIs; with ``tints`` the image is shown through the mask."""
        image.thumbnail((_SIDE, _SIDE))
        shown = tint_masked(np.asarray(image), np.asarray(made.convert("L"))) if tints else made
        return Example(name, image.size, data_uri(image, _SIDE), data_uri(shown, _SIDE))


def works_of(
    data: Path,
    what: str,
    folder_of: Callable[[Path, Sequence[DirectoryConfig]], Path],
    out: Path | None,
    overwrite: bool,
) -> list[FolderWork]:
    """Return the work for each folder of a folder or dataset TOML; ``folder_of`` names what is written for it."""
    by_folder: dict[Path, list[DirectoryConfig]] = {}
    for directory in load_images(data).directories:
        by_folder.setdefault(image_folder(directory, f"{what}s").resolve(), []).append(directory)
    if out is not None and len(by_folder) > 1:
        raise UserError(f"--out: {data} has {len(by_folder)} folders of images; remove it")
    return [
        FolderWork.of(what, images, sources, out or folder_of(images, sources), overwrite)
        for images, sources in by_folder.items()
    ]


def save_examples(page: Path, data: Path, title: str, works: Sequence[FolderWork], tints: bool = False) -> None:
    """Write a page with some images of every folder beside what was written for them."""
    examples = [example for work in works for example in work.examples(max(1, _EXAMPLES // len(works)), tints)]
    total = sum(len(work.names) for work in works)
    values = {"folder": data, "notes": [], "title": title, "examples": examples, "total": total}
    made = "tinted: excluded from training" if tints else title.lower()
    save_page(page, render_template("images_beside.html", made=made, **values))


def _stem(name: str) -> str:
    return str(PurePosixPath(name).with_suffix(""))


def _stems(folder: Path) -> dict[str, Path]:
    """Return the image files of a folder by their names without suffix."""
    files = (path.relative_to(folder) for path in sorted(folder.rglob("*")) if is_image_name(path.name))
    return {file.with_suffix("").as_posix(): file for file in files}


def _write(path: Path, image: Image.Image) -> None:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, buffer.getvalue())
