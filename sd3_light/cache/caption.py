"""The caption stage: captions for the images of a dataset, by any image-text-to-text model of transformers.

The captions of a directory are written to `captions.json` in its folder, which the dataset reads before text files and
other tables. `.captions.jsonl` beside it has what is done, one image per line: the same command continues there.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import (
    AutoModelForImageTextToText,
    AutoProcessor,
    LogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from sd3_light.cache.folder_images import (
    OWN_FILES,
    decoded_batches,
    image_folder,
    listed_images,
    model_folder,
    named_model,
    read_image,
)
from sd3_light.config import DirectoryConfig, load_images
from sd3_light.config.faults import UserError
from sd3_light.engines import Launch
from sd3_light.files import write_atomically, write_errors
from sd3_light.inputs import lines_of, open_regular, parse_json, regular_handle
from sd3_light.model.part_configs import check_files
from sd3_light.pages import check_output_path, data_uri, render_template, save_page
from sd3_light.runlog import info, progress

TABLE = "captions.json"
DONE = ".captions.jsonl"
"""Hidden, so that no scan reads it as data."""

DTYPES = ("auto", "float32", "bfloat16", "float16")
PROMPT = "Describe this image in one sentence."
_EXAMPLES = 48


@dataclass(frozen=True)
class CaptionOptions:
    """How to caption. Each prompt gives ``captions`` captions: one is the likeliest text, several are drawn."""

    prompts: tuple[str, ...] = (PROMPT,)
    captions: int = 1
    max_tokens: int = 128
    temperature: float = 0.7
    seed: int = 0
    dtype: str = "auto"
    batch: int = 8


@dataclass(frozen=True)
class CaptionedImage:
    """An example on the page."""

    name: str
    uri: str
    size: tuple[int, int]
    captions: tuple[str, ...]


def run(data: Path, model: str, options: CaptionOptions, page: Path | None = None, restart: bool = False) -> list[Path]:
    """Caption every image of a folder or dataset TOML that has no caption of this model yet; return the tables."""
    if options.dtype not in DTYPES:
        raise UserError(f"--dtype {options.dtype}: use auto, float32, bfloat16 or float16")
    directories = load_images(data).directories
    if page is not None:
        check_output_path(page)
    by_folder: dict[Path, list[DirectoryConfig]] = {}
    for directory in directories:
        if len(directory.caption_columns) > 1:
            problem = "caption_column names several columns; remove it to use a list of captions"
            raise UserError(f"{directory.path}: {problem}")
        by_folder.setdefault(image_folder(directory, "captions").resolve(), []).append(directory)
    settings = {"model": model, **asdict(options)}
    del settings["batch"]  # it changes the last bits only
    settings = json.loads(json.dumps(settings))
    works = [_DirectoryWork.open(folder, sources, settings, restart) for folder, sources in by_folder.items()]
    if any(work.missing for work in works):
        captioner = Captioner.open(model, options)
        for work in works:
            _caption(work, captioner)
    tables = [work.write_table() for work in works if (work.folder / DONE).exists()]
    if page is not None:
        save_page(page, _render(data, model, options, works))
    return tables


@dataclass
class _DirectoryWork:
    """A folder of the dataset: the images of all its `[[directory]]` tables, and the captions by image."""

    folder: Path
    settings: dict[str, Any]
    images: list[str]
    captions: dict[str, list[str]]

    @property
    def missing(self) -> list[str]:
        return [name for name in self.images if name not in self.captions]

    @staticmethod
    def open(
        folder: Path, sources: Sequence[DirectoryConfig], settings: dict[str, Any], restart: bool
    ) -> "_DirectoryWork":
        if (folder / TABLE).exists() and not (folder / DONE).exists():
            raise UserError(
                f"{folder / TABLE} exists and is not by this command; rename it to metadata.json, or move it"
            )
        done = {} if restart else _read_done(folder / DONE, settings)
        images = listed_images(folder, sources)
        return _DirectoryWork(folder, settings, images, done)

    def write_table(self) -> Path:
        """Write the captions of the images that still exist."""
        table = {name: self.captions[name] for name in self.images if name in self.captions}
        text = json.dumps(table, ensure_ascii=False, indent=1)
        write_atomically(self.folder / TABLE, text.encode("utf-8", "backslashreplace"))
        return self.folder / TABLE


def _read_done(path: Path, settings: dict[str, Any]) -> dict[str, list[str]]:
    """Return the captions of an earlier run with the same settings; an incomplete last line is left out."""
    if not path.exists():
        return {}
    captions: dict[str, list[str]] = {}
    with _opened(path) as lines:
        for number, line in enumerate(lines):
            try:
                entry = parse_json(line)
                if number == 0 and entry != settings:
                    changed = ", ".join(key for key in settings if entry.get(key) != settings[key])
                    raise UserError(f"{path} has captions with another {changed}; use the same, or pass --restart")
                if number:
                    captions[str(entry["file"])] = [str(text) for text in entry["captions"]]
            except (ValueError, LookupError, TypeError, AttributeError):
                if not line.endswith(b"\n"):
                    break  # the process that wrote it was killed
                raise UserError(f"{path}: line {number + 1} is damaged; remove it, or pass --restart") from None
    return captions


@contextmanager
def _opened(path: Path) -> Iterator[Iterator[bytes]]:
    """Yield the lines of a file; raise UserError where they cannot be read."""
    try:
        with open_regular(path) as file:
            yield lines_of(file)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{path} cannot be read ({reason}); remove it, or pass --restart") from error


def _caption(work: _DirectoryWork, captioner: "Captioner") -> None:
    """Caption the missing images, and append each batch to the file of what is done."""
    path = work.folder / DONE
    missing = work.missing
    write_atomically(path, _json_lines([work.settings]) + _captions_as_lines(work.captions))
    size = captioner.options.batch
    rejected = 0
    with (
        write_errors(path),
        open(path, "ab", buffering=0, opener=regular_handle) as file,
        progress(f"caption {work.folder.name}", len(missing), "images") as bar,
    ):
        for decoded in decoded_batches(work.folder, missing, size):
            images = {name: image for name, image in decoded.items() if isinstance(image, Image.Image)}
            rejected += len(decoded) - len(images)
            texts = captioner.describe(images) if images else []
            new = dict(zip(images, texts, strict=True))
            work.captions |= new
            file.write(_captions_as_lines(new))
            bar.advance(len(decoded))
    if rejected:
        info(f"caption: {work.folder}: {rejected:,} images cannot be read; `sd3-light cache` lists them")


def _captions_as_lines(captions: Mapping[str, list[str]]) -> bytes:
    return _json_lines({"file": name, "captions": texts} for name, texts in captions.items())


def _json_lines(rows: Iterable[Any]) -> bytes:
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    return text.encode("utf-8", "backslashreplace")


class SeededDraws(LogitsProcessor):
    """Draws the next token of row i with ``numbers[i, step]`` in (0, 1], whatever other rows are in the batch.

    All other tokens become impossible, so `generate` takes the drawn one.
    """

    def __init__(self, numbers: torch.Tensor, warpers: Sequence[Callable[..., torch.Tensor]]) -> None:
        self._numbers = iter(numbers.unbind(1))
        self._warpers = warpers

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return scores with which only the drawn tokens are possible."""
        for warper in self._warpers:
            scores = warper(input_ids, scores)
        sums = scores.double().softmax(-1).cumsum(-1)
        tokens = (sums < next(self._numbers)[:, None] * sums[:, -1:]).sum(-1, keepdim=True)
        return torch.full_like(scores, -torch.inf).scatter(1, tokens, 0.0)


class Captioner:
    """An image-text-to-text model with its processor."""

    def __init__(self, model: Any, processor: Any, options: CaptionOptions, device: torch.device) -> None:
        self.model = model.to(device).eval()
        self.processor = processor
        self.options = options
        self.device = device
        tokenizer = getattr(processor, "tokenizer", processor)
        tokenizer.padding_side = "left"  # a decoder continues at the end of each row
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token

    @staticmethod
    def open(model: str, options: CaptionOptions) -> "Captioner":
        """Load a folder or a model of the Hugging Face hub; weights are read from safetensors only."""
        folder = model_folder(model)
        device = Launch().device()
        dtype = options.dtype if options.dtype != "auto" else "bfloat16" if device.type == "cuda" else "float32"
        with named_model(model, "image-text-to-text model"):
            check_files(folder)
            processor = AutoProcessor.from_pretrained(folder, **OWN_FILES)
            loaded = AutoModelForImageTextToText.from_pretrained(
                folder, use_safetensors=True, dtype=getattr(torch, dtype), **OWN_FILES
            )
        return Captioner(loaded, processor, options, device)

    @torch.no_grad()
    def describe(self, images: Mapping[str, Image.Image]) -> list[list[str]]:
        """Return the captions of each named image: all of the first prompt, then of the next."""
        texts: list[list[str]] = [[] for _ in images]
        for prompt in self.options.prompts:
            for own, new in zip(texts, self._describe(images, prompt), strict=True):
                own += new
        return texts

    def _describe(self, images: Mapping[str, Image.Image], prompt: str) -> list[list[str]]:
        inputs = self._inputs(list(images.values()), prompt)
        count = self.options.captions
        how = self._drawn(images, prompt) if count > 1 else {"do_sample": False}
        tokens = self.model.generate(**inputs, max_new_tokens=self.options.max_tokens, **how)
        prompt_tokens = inputs.get("input_ids")
        if prompt_tokens is not None:  # decoders return the prompt too, encoder-decoders do not
            repeated = prompt_tokens.repeat_interleave(count, 0)
            length = prompt_tokens.shape[1]
            if tokens.shape[1] >= length and torch.equal(tokens[:, :length], repeated):
                tokens = tokens[:, length:]
        texts = [" ".join(text.split()) for text in self.processor.batch_decode(tokens, skip_special_tokens=True)]
        return [texts[start : start + count] for start in range(0, len(texts), count)]

    def _drawn(self, names: Iterable[str], prompt: str) -> dict[str, Any]:
        """Return the arguments of `generate` for several captions per image, which depend on the image's name only."""
        config = self.model.generation_config
        options = self.options
        warpers = [TemperatureLogitsWarper(options.temperature)]
        if top_k := 50 if config.top_k is None else config.top_k:  # 50 is the default of transformers
            warpers.append(TopKLogitsWarper(top_k))
        if config.top_p is not None and config.top_p < 1:
            warpers.append(TopPLogitsWarper(config.top_p))
        numbers = []
        for name in names:
            digest = hashlib.sha256(json.dumps([options.seed, name, prompt]).encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:8]) >> 1)
            shape = options.captions, options.max_tokens
            numbers.append(1 - torch.rand(shape, generator=generator, dtype=torch.float64))
        draws = SeededDraws(torch.cat(numbers).to(self.device), warpers)
        return {
            "do_sample": True,
            "num_beams": 1,
            "num_return_sequences": options.captions,
            "logits_processor": [draws],
        }

    def _inputs(self, images: Sequence[Image.Image], prompt: str) -> Any:
        """Return the inputs of the model; a model without a chat template gets the prompt as it is, or none."""
        text = prompt
        if getattr(self.processor, "chat_template", None):
            content = [{"type": "image"}, {"type": "text", "text": prompt}]
            text = self.processor.apply_chat_template(
                [{"role": "user", "content": content}], add_generation_prompt=True
            )
        nested = [[image] for image in images]
        texts = {"text": [text] * len(images)} if text else {}
        batch = self.processor(
            images=nested if text != prompt else list(images), **texts, padding=True, return_tensors="pt"
        )
        return batch.to(self.device, dtype=self.model.dtype)


def _render(data: Path, model: str, options: CaptionOptions, works: Sequence[_DirectoryWork]) -> str:
    """Return a page with some images of every directory and their captions."""
    examples: list[CaptionedImage] = []
    for work in works:
        names = [name for name in work.images if name in work.captions]
        most = max(1, _EXAMPLES // len(works))
        for name in names[:: max(1, len(names) // most)][:most]:
            if isinstance(image := read_image(work.folder / name), Image.Image):
                examples.append(CaptionedImage(name, data_uri(image, 384), image.size, tuple(work.captions[name])))
    return render_template(
        "captions.html",
        folder=data,
        model=model,
        prompts=options.prompts,
        examples=examples,
        total=sum(len(work.captions) for work in works),
        notes=[],
    )
