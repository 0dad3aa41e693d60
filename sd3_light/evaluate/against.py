"""Measure models against true images: draw every caption with each model, and compare by features.

The table has a row per model and rows to compare with: the true images, true images of other captions and, if the
training images are given, those that `nearest` chooses as answers to the captions.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from rich.box import SIMPLE
from rich.text import Text

from sd3_light import __version__
from sd3_light.config.faults import UserError
from sd3_light.engines import Launch
from sd3_light.evaluate.comparison import DIFFERENCES, Comparison, Scores, image_features, text_features
from sd3_light.evaluate.composition import USUAL_STEPS
from sd3_light.evaluate.distances import METRICS
from sd3_light.evaluate.feature_model import FeatureModel, load_feature_model, shares_captions
from sd3_light.evaluate.nearest import training_answers
from sd3_light.evaluate.pixels import PIXEL_METRICS
from sd3_light.evaluate.truths import Truth, load_truths
from sd3_light.export.chosen import ChosenModel, choose_model
from sd3_light.export.export_spec import write_json
from sd3_light.export.lora_stack import Lora
from sd3_light.export.open_pipeline import open_policy
from sd3_light.files import new_folder, refuse_existing
from sd3_light.pages import check_output_path, data_uri, render_template, save_page
from sd3_light.runlog import ResultTable, info, progress
from sd3_light.sample.generate import ImageRequest, choose_drawing, generate
from sd3_light.sample.phases import open_with_adapters
from sd3_light.sources.preprocess import Pixels

TRUE = "true images"
SHUFFLED = "true images, captions shuffled"
COLUMNS = (*DIFFERENCES.values(), "retrieval", "distance", *PIXEL_METRICS)
"""The metrics of the table; JSON and page have those of `METRICS` too."""
TITLES = {
    "frechet": "Frechet distance", "kid": "KID", "precision": "precision", "recall": "recall",
    "frechet_difference": "Frechet - true", "kid_difference": "KID - true",
    "retrieval": "retrieval", "distance": "distance to truth", "psnr": "PSNR", "edges": "edges",
}  # fmt: skip
IMAGES_FILE = "images.json"
_ALL = tuple(dict.fromkeys((*METRICS, *COLUMNS)))
_MOST_SHOWN = 100  # samples on the page


@dataclass(frozen=True)
class AgainstOptions:
    """How many captions to draw, and how. ``training`` is the dataset TOML of the training images, for the rows of
    those that answer the captions."""

    count: int = 1000
    steps: int | None = None
    guidance: float | None = None
    seed: int = 0
    batch: int = 16
    training: Path | None = None
    loras: tuple[Lora, ...] = ()


@dataclass
class Measured:
    """The scores by row of the table, and the images that are kept, by number of the truth."""

    truths: Sequence[Truth]
    among: int
    scores: dict[str, Scores] = field(default_factory=dict)
    images: dict[str, Mapping[int, Pixels]] = field(default_factory=dict)

    def table(self) -> ResultTable:
        """Return the scores as a table with 95% intervals."""
        table = ResultTable("", title=self.title(), box=SIMPLE, padding=(0, 1, 0, 0), pad_edge=False)
        for metric in COLUMNS:
            table.add_column(TITLES[metric], justify="right")
        for name, scores in self.scores.items():
            table.add_row(Text(name), *(Text("\n".join(_texts(scores, metric))) for metric in COLUMNS))
        return table

    def title(self) -> str:
        """Return how many captions there are, and the distances of two halves of the true images."""
        title = f"{len(self.truths):,} captions; retrieval among {self.among}"
        halves = self.scores[TRUE].estimates
        values = [(TITLES[metric], halves.get(metric)) for metric in DIFFERENCES]
        texts = [f"{name} {value.texts[0]}" for name, value in values if value is not None]
        return f"{title}; two halves of the true images: {', '.join(texts)}" if texts else title


def run(
    models: Sequence[Path],
    data: Path,
    features: Path,
    options: AgainstOptions | None = None,
    out: Path | None = None,
    page: Path | None = None,
    save: Path | None = None,
) -> Measured:
    """Measure the models and the baselines; write the scores as JSON, a page with images, and all images as PNG, if
    requested."""
    options = options or AgainstOptions()
    if page is not None:
        check_output_path(page)
    if save is not None:
        refuse_existing(save)
    chosen = {str(model): _choose(model) for model in models}
    steps, guidance = _drawing(chosen, options)
    device = Launch().device()
    feature_model = load_feature_model(features, device)
    options = replace(options, steps=steps, guidance=guidance)
    if shares_captions(features):
        info(f"note: {features} and the model's text encoders learned from the same captions; `parts --judge-share`")
    truths = load_truths(data, options.count)
    kept = len(truths) if save is not None else 0 if page is None else _MOST_SHOWN
    measured = _measure(chosen, truths, feature_model, options, kept)
    facts = {"against": str(data), "features": str(features), "version": __version__, **_drawn_with(options)}
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        rows = {name: {**scores.as_dict(), "each": _each(scores)} for name, scores in measured.scores.items()}
        write_json(out, {**facts, "captions": len(truths), "among": measured.among, "rows": rows})
    if page is not None:
        save_page(page, render_template("evaluation.html", **_page_values(measured, facts)))
    if save is not None:
        save_images(measured, save)
    return measured


def _choose(model: Path) -> ChosenModel:
    chosen = choose_model(model)
    if not (chosen.folder / "model_index.json").is_file():
        raise UserError(f"{model} is not a diffusers folder (no model_index.json); pass an export or a model folder")
    return chosen


def _drawing(chosen: Mapping[str, ChosenModel], options: AgainstOptions) -> tuple[int, float]:
    """Return the steps and the guidance of all models; a UserError if these are not given and differ."""
    policies = {name: open_policy(model.folder, model.text_facts)[1] for name, model in chosen.items()}
    given = (options.steps, options.guidance)
    drawings = {name: policy.drawing(*given, USUAL_STEPS) for name, policy in policies.items()}
    if len(set(drawings.values())) > 1:
        own = ", ".join(f"{name} with {steps} and {guidance:g}" for name, (steps, guidance) in drawings.items())
        raise UserError(f"the models are drawn with different steps and guidance: {own}; pass --steps and --guidance")
    return choose_drawing(next(iter(policies.values())), *given, USUAL_STEPS)


def _drawn_with(options: AgainstOptions) -> dict[str, Any]:
    loras = [{"file": str(lora.file), "strength": lora.strength} for lora in options.loras]
    training = None if options.training is None else str(options.training)
    return {"training": training, "steps": options.steps, "guidance": options.guidance, "seed": options.seed,
            "loras": loras}  # fmt: skip


def _measure(
    chosen: Mapping[str, ChosenModel],
    truths: Sequence[Truth],
    feature_model: FeatureModel,
    options: AgainstOptions,
    kept: int,
) -> Measured:
    captions = [truth.caption for truth in truths]
    embed = partial(image_features, feature_model)
    comparison = Comparison(
        embed([truth.pixels for truth in truths]),
        text_features(feature_model, captions) if feature_model.reads_text else None,
        captions,
        options.seed,
        [truth.pixels for truth in truths],
    )
    measured = Measured(truths, comparison.among)
    measured.scores[TRUE] = comparison.of_truths()
    measured.images[TRUE] = {row: truth.pixels for row, truth in enumerate(truths[:kept])}
    measured.scores[SHUFFLED] = comparison.of_shuffled_truths()
    if options.training is not None:
        for name, answers in training_answers(options.training, truths, comparison.truths, embed).items():
            images = list(answers.values())
            measured.scores[name] = comparison.of_images(embed(images), list(answers), images)
            measured.images[name] = {row: pixels for row, pixels in answers.items() if row < kept}
    for name, model in chosen.items():
        images = draw(model, truths, feature_model.device, options)
        measured.scores[name] = comparison.of_images(embed(images), images=images)
        measured.images[name] = dict(enumerate(images[:kept]))
    return measured


def draw(chosen: ChosenModel, truths: Sequence[Truth], device: torch.device, options: AgainstOptions) -> list[Pixels]:
    """Return one image per truth: its caption at its size, image i with the seed `seed + i`."""
    pipe, policy = open_with_adapters(chosen, options.loras, device)
    requests = [
        ImageRequest(truth.caption, options.seed + row, *truth.size, references=truth.references)
        for row, truth in enumerate(truths)
    ]
    drawing = policy.drawing(options.steps, options.guidance, USUAL_STEPS)
    info(f"drawing {len(requests):,} captions with {chosen.text_facts}")
    with progress("draw", len(requests), "images") as bar:
        images = generate(pipe, requests, policy, drawing, options.batch, bar.set_done, exact=device.type == "cpu")
    return [np.asarray(image.convert("RGB")) for image in images]


# --- output --------------------------------------------------------------------------------------


def save_images(measured: Measured, folder: Path) -> None:
    """Write the images of every row as PNG, and `images.json`: the captions, the folder of each row, and its scores.

    The image of caption i is `i.png`; a row may lack some. ``each`` has the scores of single images by metric, in the
    order of the captions in ``rows``.
    """
    with new_folder(folder) as temporary:
        folders = {name: f"{number:02}" for number, name in enumerate(measured.images)}
        for name, images in measured.images.items():
            (temporary / folders[name]).mkdir()
            for row, pixels in images.items():
                Image.fromarray(pixels).save(temporary / folders[name] / f"{row}.png")
        captions = [truth.caption for truth in measured.truths]
        each = {name: _each(scores) for name, scores in measured.scores.items() if name in folders}
        write_json(temporary / IMAGES_FILE, {"captions": captions, "rows": folders, "true": TRUE, "each": each})


def _each(scores: Scores) -> dict[str, list[Any]]:
    """Return the values of single images, and the captions that have an image."""
    values = {name: [round(value, 6) for value in tensor.tolist()] for name, tensor in scores.each.items()}
    return {"rows": list(scores.rows), **values}


def _texts(scores: Scores, metric: str) -> tuple[str, str]:
    estimate = scores.estimates.get(metric)
    return ("-", "") if estimate is None else estimate.texts


def _page_values(measured: Measured, facts: Mapping[str, Any]) -> dict[str, Any]:
    shown = range(min(_MOST_SHOWN, len(measured.truths)))
    return {
        "name": Path(facts["against"]).name,
        "folder": facts["against"],
        "notes": [],
        "titles": [TITLES[metric] for metric in _ALL],
        "rows": [
            (name, scores.count, [_texts(scores, metric) for metric in _ALL])
            for name, scores in measured.scores.items()
        ],
        "among": measured.among,
        "facts": [(key, str(value), "") for key, value in facts.items()],
        "total": len(measured.truths),
        "samples": [_card(measured, row) for row in shown],
    }


def _card(measured: Measured, row: int) -> dict[str, Any]:
    truth = measured.truths[row]
    figures = [
        (data_uri(Image.fromarray(images[row])), name + _judged(measured.scores[name], list(images).index(row)))
        for name, images in measured.images.items()
        if row in images
    ]
    return {"size": truth.size, "caption": truth.caption, "figures": figures}


def _judged(scores: Scores, index: int) -> str:
    """Return what was measured of one image."""
    each = {metric: values[index].item() for metric, values in scores.each.items()}
    texts = []
    if "retrieval" in each:
        texts.append("finds its caption" if each["retrieval"] else "finds another caption")
    texts += [f"{name} {each[name]:.3f}" for name in ("distance", "edges") if name in each]
    return "".join(f"; {text}" for text in texts)
