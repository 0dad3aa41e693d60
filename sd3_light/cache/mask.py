"""The mask stage: masks for the images of a dataset, found by a segmentation model of transformers.

A mask is a PNG with the name of its image in the folder that `mask_path` names, white where the model finds what the
prompts ask for.
"""

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModelForSemanticSegmentation,
    AutoModelForUniversalSegmentation,
    AutoProcessor,
    CLIPSegForImageSegmentation,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_SEMANTIC_SEGMENTATION_MAPPING_NAMES,
    MODEL_FOR_UNIVERSAL_SEGMENTATION_MAPPING_NAMES,
)

from sd3_light.cache.folder_images import OWN_FILES, model_folder, named_model
from sd3_light.cache.images_beside import FolderWork, Made, Written, save_examples, works_of
from sd3_light.config import DirectoryConfig, load_images
from sd3_light.config.faults import UserError
from sd3_light.engines import Launch
from sd3_light.model.part_configs import check_files
from sd3_light.pages import check_output_path

_EMPTY = "empty_mask: the mask would be black, and the image would not be used"
_BACKGROUND = "background"

Foreground = list[Tensor]
"""Per image, a bool [height, width]."""


@dataclass(frozen=True)
class MaskOptions:
    """What to find: texts, or classes of the model. ``threshold`` is the probability of a text from which it counts.

    Without prompts it is everything but the model's class `background`. ``invert`` exchanges black and white.
    """

    prompts: tuple[str, ...] = ()
    threshold: float = 0.5
    invert: bool = False
    batch: int = 8


@dataclass(frozen=True)
class Masked:
    """The masks of a folder, whether the dataset TOML names it, and the shares of images that new masks cover."""

    written: Written
    is_named: bool
    shares: Mapping[str, float]

    @property
    def covers(self) -> float | None:
        """The mean share of the images that got a mask."""
        shares = [share for share in self.shares.values() if share]
        return sum(shares) / len(shares) if shares else None

    @property
    def empty(self) -> list[str]:
        """The images in which nothing was found."""
        return [name for name, share in self.shares.items() if share == 0]

    @property
    def full(self) -> list[str]:
        """The images that a mask covers completely, so that it changes nothing."""
        return [name for name, share in self.shares.items() if share == 1]


def run(
    data: Path,
    model: str,
    options: MaskOptions,
    out: Path | None = None,
    overwrite: bool = False,
    page: Path | None = None,
) -> list[Masked]:
    """Write a mask for every image of a folder or dataset TOML; return what was written."""
    if page is not None:
        check_output_path(page)
    works = works_of(data, "mask", _folder_of, out, overwrite)
    named = {directory.mask_path for directory in load_images(data).directories}
    segmenter = Segmenter.load(model, options) if any(work.missing for work in works) else None
    masked = [_run(work, segmenter, options.batch, work.folder in named) for work in works]
    if page is not None:
        save_examples(page, data, "Masks", works, tints=True)
    return masked


def _folder_of(images: Path, sources: Sequence[DirectoryConfig]) -> Path:
    """Return the folder of the masks that a dataset TOML names, or the default one."""
    named = {source.mask_path for source in sources if source.mask_path is not None}
    if len(named) > 1:
        raise UserError(f"{images}: several folders of masks ({', '.join(map(str, named))}); use one mask_path")
    masks = next(iter(named), images.with_name(f"{images.name}-masks"))
    if isinstance(masks, str):
        raise UserError(f"mask_path: {masks}: masks are written to a folder on disk; name one, or pass --out")
    return masks


def _run(work: FolderWork, segmenter: "Segmenter | None", batch: int, is_named: bool) -> Masked:
    """Write the missing masks of a folder, and measure how much of their images they cover."""
    shares: dict[str, float] = {}

    def make(images: Mapping[str, Image.Image]) -> list[Made]:
        assert segmenter is not None
        masks = segmenter.masks(list(images.values()))
        shares.update(zip(images, map(_share, masks), strict=True))
        return [mask if shares[name] else _EMPTY for name, mask in zip(images, masks, strict=True)]

    return Masked(work.run(make, batch), is_named, shares)


def _share(mask: Image.Image) -> float:
    """Return the share of a mask that is white."""
    return mask.histogram()[255] / (mask.width * mask.height)


class Segmenter:
    """A segmentation model of transformers: one that takes texts (CLIPSeg), or one with classes."""

    def __init__(self, find: Callable[[Sequence[Image.Image]], Foreground], invert: bool) -> None:
        self._find = find
        self._invert = invert

    @staticmethod
    def load(model: str, options: MaskOptions) -> "Segmenter":
        """Load a folder or a model of the Hugging Face hub; weights are read from safetensors only."""
        folder = model_folder(model)
        device = Launch().device()
        with named_model(model, "segmentation model"):
            check_files(folder)
            kind = AutoConfig.from_pretrained(folder, **OWN_FILES).model_type
            if kind not in ("clipseg", *_WITH_CLASSES):
                raise UserError(f"a {kind}; use a CLIPSeg, or a model with classes such as SegFormer or Mask2Former")
            processor_class: Any = AutoProcessor if kind == "clipseg" else AutoImageProcessor
            processor = processor_class.from_pretrained(folder, **OWN_FILES)
            model_class = CLIPSegForImageSegmentation if kind == "clipseg" else _WITH_CLASSES[kind]
            loaded = model_class.from_pretrained(folder, use_safetensors=True, dtype=torch.float32, **OWN_FILES)
        loaded = loaded.to(device).eval()
        if kind == "clipseg":
            return Segmenter(_TextFinder(loaded, processor, device, options), options.invert)
        chosen = _chosen_classes(loaded.config.id2label, options.prompts, model)
        return Segmenter(_ClassFinder(loaded, processor, device, chosen), options.invert)

    @torch.no_grad()
    def masks(self, images: Sequence[Image.Image]) -> list[Image.Image]:
        """Return the mask of each image, of its size, black and white."""
        return [Image.fromarray((plane.cpu() ^ self._invert).numpy()).convert("L") for plane in self._find(images)]


_OTHER_INPUTS = ("oneformer", "videomt")  # a text that names the task; frames
_WITH_CLASSES: dict[str, Any] = {
    kind: model_class
    for kinds, model_class in (
        (MODEL_FOR_UNIVERSAL_SEGMENTATION_MAPPING_NAMES, AutoModelForUniversalSegmentation),
        (MODEL_FOR_SEMANTIC_SEGMENTATION_MAPPING_NAMES, AutoModelForSemanticSegmentation),
    )
    for kind in kinds
    if kind not in _OTHER_INPUTS
}


class _TextFinder:
    """Finds where one of several texts is likely."""

    def __init__(self, model: Any, processor: Any, device: torch.device, options: MaskOptions) -> None:
        if not options.prompts:
            raise UserError('--model: a CLIPSeg finds what a text names; pass --prompt "a dog"')
        self._model = model
        self._processor = processor
        self._device = device
        self._options = options

    def __call__(self, images: Sequence[Image.Image]) -> Foreground:
        """Return where each image shows what a prompt names."""
        by_prompt = [self._found(images, prompt) for prompt in self._options.prompts]
        return [torch.stack(planes).any(0) for planes in zip(*by_prompt, strict=True)]

    def _found(self, images: Sequence[Image.Image], prompt: str) -> Foreground:
        planes = []
        for image, logits in zip(images, self._logits(images, prompt), strict=True):
            size = (image.height, image.width)
            likely = functional.interpolate(logits[None, None].sigmoid(), size=size, mode="bilinear")[0, 0]
            planes.append(likely >= self._options.threshold)
        return planes

    def _logits(self, images: Sequence[Image.Image], prompt: str) -> Tensor:
        """Return [images, height, width] of the model's own size."""
        inputs = self._processor(text=[prompt] * len(images), images=list(images), padding=True, return_tensors="pt")
        logits: Tensor = self._model(**inputs.to(self._device)).logits
        return logits.view(len(images), *logits.shape[-2:])  # of one image the model drops the first dimension


class _ClassFinder:
    """Finds the pixels of some classes."""

    def __init__(self, model: Any, processor: Any, device: torch.device, classes: Sequence[int]) -> None:
        self._model = model
        self._processor = processor
        self._device = device
        self._classes = torch.tensor(classes, device=device)

    def __call__(self, images: Sequence[Image.Image]) -> Foreground:
        """Return the pixels of each image that are of one of the classes."""
        inputs = self._processor(images=list(images), return_tensors="pt").to(self._device)
        outputs = self._model(**inputs)
        sizes = [(image.height, image.width) for image in images]
        maps = self._processor.post_process_semantic_segmentation(outputs, target_sizes=sizes)
        return [torch.isin(classes, self._classes) for classes in maps]


def _chosen_classes(names: Mapping[int, str], prompts: Sequence[str], model: str) -> list[int]:
    """Return the classes that prompts name, or all but the background."""
    by_name: dict[str, list[int]] = {}
    for number, name in names.items():
        for synonym in name.lower().split(","):  # "person, individual, someone"
            by_name.setdefault(synonym.strip(), []).append(int(number))
    if not prompts:
        if _BACKGROUND not in by_name:
            raise UserError(
                f"--model {model}: it has no class `background`; pass --prompt with classes such as {_some(by_name)}"
            )
        return [int(number) for number in names if int(number) not in by_name[_BACKGROUND]]
    chosen: list[int] = []
    for prompt in prompts:
        if prompt.lower() not in by_name:
            close = difflib.get_close_matches(prompt.lower(), by_name, n=3) or list(by_name)
            raise UserError(f"--prompt {prompt!r}: {model} has no such class; it has {_some(close)}")
        chosen += by_name[prompt.lower()]
    return chosen


def _some(names: Sequence[str] | Mapping[str, Any]) -> str:
    return ", ".join(list(names)[:8])
