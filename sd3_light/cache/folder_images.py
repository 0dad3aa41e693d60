"""Images of a dataset's folders as models of transformers read them, and the folders of these models."""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from PIL import Image

from sd3_light.config import DirectoryConfig
from sd3_light.config.faults import UserError
from sd3_light.config.hub_ids import SCHEME, parse_hub_id
from sd3_light.downloads import download
from sd3_light.runlog import info, progress
from sd3_light.sources.access import exists
from sd3_light.sources.preprocess import Reject
from sd3_light.sources.records import FileBytes, Rejected
from sd3_light.sources.scan import scan
from sd3_light.sources.video import open_still

_NOT_WEIGHTS = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.gguf", "*.onnx", "*.msgpack", "*.h5")
_INCOMPLETE = (
    *("no_caption", "empty_caption", "bad_caption", "caption_not_utf8", "caption_too_long"),
    *("no_rejected", "no_reference"),
)
"""Reasons why an image cannot be trained on, though it can be read."""
OWN_FILES = {"local_files_only": True, "trust_remote_code": False}
"""Arguments of `from_pretrained`: nothing is downloaded, and no code of the folder runs."""
_DECODERS = 4  # threads that decode the next batch


def image_folder(directory: DirectoryConfig, made: str) -> Path:
    """Return the folder of a directory; ``made`` is what is written for its images, and cannot be for others."""
    if isinstance(directory.path, str):
        raise UserError(f"{directory.path}: {made} are written for folders on disk; copy the images to one")
    if not directory.path.is_dir():
        raise UserError(f"{directory.path}: {made} are written for folders of images; unpack it, or remove it")
    return directory.path


def listed_images(folder: Path, sources: Sequence[DirectoryConfig]) -> list[str]:
    """Return the names of the image files of a folder, with or without a caption and companions."""
    is_file: dict[str, bool] = {}
    existing = map(_without_missing_folders, sources)
    with progress("listing", None, "images") as bar:
        for item in (item for directory in existing for item in scan(directory, 0)):
            if isinstance(item, Rejected) and item.reason not in _INCOMPLETE:
                continue
            is_file[item.key.partition("/")[2]] = isinstance(item.image, FileBytes)
            bar.advance()
    images = [name for name, is_own in is_file.items() if is_own]
    if others := len(is_file) - len(images):
        info(f"{folder}: {others:,} images in tars and Parquet files are left out; unpack them")
    return images


def _without_missing_folders(directory: DirectoryConfig) -> DirectoryConfig:
    """Return a directory without masks, worse images and references that do not exist: they may be written next."""
    keys = ("mask_path", "default_mask_file", "rejected")
    missing = {key: None for key in keys if (path := getattr(directory, key)) is not None and not exists(path)}
    references = tuple(filter(exists, directory.references))
    return directory.model_copy(update={**missing, "references": references})


def read_image(path: Path) -> Image.Image | Reject:
    """Return an image, or the first frame of a video; or why it cannot be read."""
    try:
        return open_still(FileBytes(str(path))).convert("RGB")
    except Reject as reject:
        return reject


def decoded_batches(folder: Path, names: Sequence[str], size: int) -> Iterator[Mapping[str, Image.Image | Reject]]:
    """Yield batches of images by name, the next batch decoded while one is used."""
    batches = [names[start : start + size] for start in range(0, len(names), size)]
    with ThreadPoolExecutor(_DECODERS) as pool:
        following = [pool.submit(read_image, folder / name) for name in batches[0]] if batches else []
        for number, batch in enumerate(batches):
            current = following
            following = []
            if number + 1 < len(batches):
                following = [pool.submit(read_image, folder / name) for name in batches[number + 1]]
            yield {name: job.result() for name, job in zip(batch, current, strict=True)}


@contextmanager
def named_model(model: str, kind: str) -> Iterator[None]:
    """Turn errors of transformers while a model is loaded into one line."""
    try:
        yield
    except (UserError, OSError, ValueError, LookupError, TypeError, RuntimeError, ImportError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(f"--model {model}: not a usable {kind}: {reason}") from error


def model_folder(model: str) -> Path:
    """Return the folder of a path or of an id on the Hugging Face hub, which is downloaded."""
    hub_id = None if Path(model).exists() else parse_hub_id(model if model.startswith(SCHEME) else SCHEME + model)
    folder = Path(model) if hub_id is None else download(hub_id, without=_NOT_WEIGHTS)
    if not (folder / "config.json").is_file():
        raise UserError(f"--model {model}: {folder} has no config.json; give a model folder, or OWNER/NAME on the hub")
    if not any(folder.glob("*.safetensors")):
        raise UserError(f"--model {model}: {folder} has no .safetensors file; other formats are not read")
    return folder
