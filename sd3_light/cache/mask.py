"""The mask stage: masks for the images of a dataset, found by a segmentation model of transformers.

A mask is a PNG with the name of its image in the folder that `mask_path` names, white where the model finds what the
prompts ask for. Files that exist are kept, so the same command continues after an interruption.
"""

import difflib
import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
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

from sd3_light.cache.folder_images import decoded_batches, image_folder, listed_images, model_folder
from sd3_light.config import DirectoryConfig, load_images
from sd3_light.config.faults import UserError
from sd3_light.engines import Launch
from sd3_light.files import write_atomically
from sd3_light.model.part_configs import check_files
from sd3_light.runlog import progress
from sd3_light.sources.access import exists
from sd3_light.sources.listing import is_image_name
from sd3_light.sources.preprocess import Reject

REJECTS = "rejects.jsonl"
"""The images without a mask, in the folder of masks."""
_BACKGROUND = "background"
_OWN = {"local_files_only": True, "trust_remote_code": False}

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
class MaskedFolder:
    """A folder of masks: how many this run wrote, how many were there, and the images that got none, with reasons."""

    masks: Path
    written: int
    kept: int
    rejects: Mapping[str, str]
    is_named: bool


def run(
    data: Path, model: str, options: MaskOptions, out: Path | None = None, overwrite: bool = False
) -> list[MaskedFolder]:
    """Write a mask for every image of a folder or dataset TOML; return what was written."""
    by_folder: dict[Path, list[DirectoryConfig]] = {}
    for directory in load_images(data).directories:
        by_folder.setdefault(image_folder(directory, "masks").resolve(), []).append(directory)
    if out is not None and len(by_folder) > 1:
        raise UserError(f"--out: {data} has {len(by_folder)} folders of images; write mask_path for each, or remove it")
    works = [_Work.of(folder, sources, out, overwrite) for folder, sources in by_folder.items()]
    segmenter = Segmenter.load(model, options) if any(work.missing for work in works) else None
    return [work.run(segmenter, options) for work in works]


@dataclass(frozen=True)
class _Work:
    """A folder of images, its folder of masks, and the images without a mask."""

    folder: Path
    masks: Path
    is_named: bool
    total: int
    missing: Sequence[str]

    @staticmethod
    def of(folder: Path, sources: Sequence[DirectoryConfig], out: Path | None, overwrite: bool) -> "_Work":
        named = {source.mask_path for source in sources if source.mask_path is not None}
        if len(named) > 1:
            raise UserError(f"{folder}: several folders of masks ({', '.join(map(str, named))}); use one mask_path")
        masks = out or next(iter(named), folder.with_name(f"{folder.name}-masks"))
        if isinstance(masks, str):
            raise UserError(f"mask_path: {masks}: masks are written to a folder on disk; name one, or pass --out")
        masks.mkdir(parents=True, exist_ok=True)
        if not all(map(exists, named)):  # a scan needs the folder that mask_path names
            sources = [source.model_copy(update={"mask_path": masks}) for source in sources]
        # images that differ in their suffix share a mask
        images = {str(PurePosixPath(name).with_suffix("")): name for name in reversed(listed_images(folder, sources))}
        existing = set() if overwrite else _stems(masks)
        missing = [name for stem, name in reversed(images.items()) if stem not in existing]
        return _Work(folder, masks, masks in named, len(images), missing)

    def run(self, segmenter: "Segmenter | None", options: MaskOptions) -> MaskedFolder:
        """Write the missing masks, and the list of images that got none."""
        rejects: dict[str, str] = {}
        with progress(f"mask {self.folder.name}", len(self.missing), "images") as bar:
            for decoded in decoded_batches(self.folder, self.missing, options.batch):
                assert segmenter is not None
                images = {name: image for name, image in decoded.items() if isinstance(image, Image.Image)}
                rejects |= {name: str(image) for name, image in decoded.items() if isinstance(image, Reject)}
                for name, mask in zip(images, segmenter.masks(list(images.values())) if images else [], strict=True):
                    path = self.masks / PurePosixPath(name).with_suffix(".png")
                    if mask.getbbox() is None:
                        rejects[name] = "empty_mask: the mask would be black, and the image would not be used"
                        path.unlink(missing_ok=True)  # with --overwrite
                    else:
                        _write(path, mask)
                bar.advance(len(decoded))
        self._list_rejects(rejects)
        kept = self.total - len(self.missing)
        return MaskedFolder(self.masks, len(self.missing) - len(rejects), kept, rejects, self.is_named)

    def _list_rejects(self, rejects: Mapping[str, str]) -> None:
        path = self.masks / REJECTS
        if not rejects:
            path.unlink(missing_ok=True)
            return
        lines = (json.dumps({"file": name, "reason": reason}) + "\n" for name, reason in rejects.items())
        write_atomically(path, "".join(lines).encode())


def _stems(masks: Path) -> set[str]:
    """Return the names of the files in a folder of masks, without suffixes."""
    files = (path.relative_to(masks) for path in masks.rglob("*") if is_image_name(path.name))
    return {file.with_suffix("").as_posix() for file in files}


def _write(path: Path, mask: Image.Image) -> None:
    buffer = io.BytesIO()
    mask.save(buffer, "PNG")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, buffer.getvalue())


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
        try:
            check_files(folder)
            kind = AutoConfig.from_pretrained(folder, **_OWN).model_type
            if kind not in ("clipseg", *_WITH_CLASSES):
                raise UserError(f"a {kind}; use a CLIPSeg, or a model with classes such as SegFormer or Mask2Former")
            processor_class: Any = AutoProcessor if kind == "clipseg" else AutoImageProcessor
            processor = processor_class.from_pretrained(folder, **_OWN)
            model_class = CLIPSegForImageSegmentation if kind == "clipseg" else _WITH_CLASSES[kind]
            loaded = model_class.from_pretrained(folder, use_safetensors=True, dtype=torch.float32, **_OWN)
        except (UserError, OSError, ValueError, LookupError, TypeError, RuntimeError, ImportError) as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise UserError(f"--model {model}: not a usable segmentation model: {reason}") from error
        loaded = loaded.to(device).eval()
        if kind == "clipseg":
            return Segmenter(_TextFinder(loaded, processor, device, options), options.invert)
        chosen = _chosen_classes(loaded.config.id2label, options.prompts, model)
        return Segmenter(_ClassFinder(loaded, processor, device, chosen), options.invert)

    @torch.no_grad()
    def masks(self, images: Sequence[Image.Image]) -> list[Image.Image]:
        """Return the mask of each image, of its size, black and white."""
        return [Image.fromarray((plane.cpu() ^ self._invert).numpy()).convert("L") for plane in self._find(images)]


_WITH_CLASSES: dict[str, Any] = {
    **dict.fromkeys(MODEL_FOR_UNIVERSAL_SEGMENTATION_MAPPING_NAMES, AutoModelForUniversalSegmentation),
    **dict.fromkeys(MODEL_FOR_SEMANTIC_SEGMENTATION_MAPPING_NAMES, AutoModelForSemanticSegmentation),
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
