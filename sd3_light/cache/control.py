"""The control stage: control images for those of a dataset, which a model sees as references.

A control image is a PNG with the name of its image: its edges, or its depth by a model of transformers.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from sd3_light.cache.edges import draw_edges
from sd3_light.cache.images_beside import FolderWork, Made, Written, save_examples, works_of
from sd3_light.config import DirectoryConfig, load_images
from sd3_light.config.faults import UserError
from sd3_light.pages import check_output_path

EDGES = "edges"
DEPTH = "depth"
KINDS = (EDGES, DEPTH)
_POSE = "poses take a detector of people and a model of poses; draw them with another program, and name their folder"

Draw = Callable[[Sequence[Image.Image]], Sequence[Made]]


@dataclass(frozen=True)
class ControlOptions:
    """What to draw. ``resolution`` is the side of a square with the largest area; larger images are scaled down to it.

    ``threshold`` is the contrast from which an edge is drawn.
    """

    kind: str
    model: str | None = None
    threshold: float = 0.2
    resolution: int = 1024
    batch: int = 8


@dataclass(frozen=True)
class Controlled:
    """The control images of a folder, and whether the dataset TOML names it."""

    written: Written
    is_named: bool


def run(
    data: Path, options: ControlOptions, out: Path | None = None, overwrite: bool = False, page: Path | None = None
) -> list[Controlled]:
    """Write a control image for every image of a folder or dataset TOML; return what was written."""
    _require_model(options)
    if page is not None:
        check_output_path(page)

    def folder_of(images: Path, sources: Sequence[DirectoryConfig]) -> Path:
        return control_folder(images, options.kind)

    works = works_of(data, "control image", folder_of, out, overwrite)
    named = {folder for directory in load_images(data).directories for folder in directory.references}
    draw = _drawer(options) if any(work.missing for work in works) else None
    controlled = [Controlled(_run(work, draw, options), work.folder in named) for work in works]
    if page is not None:
        save_examples(page, data, f"Control images: {options.kind}", works)
    return controlled


def control_folder(images: Path, kind: str) -> Path:
    """Return the folder of the control images of a folder."""
    return images.with_name(f"{images.name}-{kind}")


def _require_model(options: ControlOptions) -> None:
    kind = options.kind
    if kind == "pose":
        raise UserError(f"pose: {_POSE} in references")
    if kind not in KINDS:
        raise UserError(f"{kind}: unknown kind of control image; the kinds are {', '.join(KINDS)}")
    if kind == DEPTH and options.model is None:
        raise UserError("--model is missing: depth needs a depth-estimation model, such as a Depth Anything")
    if kind == EDGES and options.model is not None:
        raise UserError("--model: edges are drawn without a model; remove it")


def _drawer(options: ControlOptions) -> Draw:
    if options.kind == EDGES:
        return lambda images: [draw_edges(image, options.threshold) for image in images]
    assert options.model is not None
    from sd3_light.cache.depth import DepthModel  # transformers takes seconds to import

    return DepthModel.load(options.model).draw


def _run(work: FolderWork, draw: Draw | None, options: ControlOptions) -> Written:
    def make(images: Mapping[str, Image.Image]) -> Sequence[Made]:
        assert draw is not None
        return draw([_scaled_down(image, options.resolution) for image in images.values()])

    return work.run(make, options.batch)


def _scaled_down(image: Image.Image, resolution: int) -> Image.Image:
    """Return an image of at most the area of a square."""
    scale = resolution / math.sqrt(image.width * image.height)
    if scale >= 1:
        return image
    size = (max(1, round(scale * image.width)), max(1, round(scale * image.height)))
    return image.resize(size, Image.Resampling.LANCZOS)
