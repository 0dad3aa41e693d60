"""Measures how much of a scene a linear probe reads from the demo's text encoders, for pairs that training lacks.

    python scripts/demo_probe.py FOLDER

FOLDER has the tokenizers and text encoders of a diffusers folder. The probe learns from 3,000 scenes of training pairs
and is tested on 1,000 scenes of held-out pairs, each in English and Chinese. Prints, for each output that a denoiser
uses, the share of captions whose whole scene it predicts: background, kind, count, size, relation, colours and shapes.
"""

import argparse
import json
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import CLIPTextModelWithProjection, T5EncoderModel

from sd3_light.parts.text_encoders import encode
from sd3_light.parts.tokenizers import load_tokenizers
from sd3_light.randomness import stream
from sd3_light.world import draw_scene, scene_captions
from sd3_light.world.captions import LANGUAGES
from sd3_light.world.scene import BACKGROUNDS, COLOURS, OBJECT_SIZES, SCENE_KINDS, SHAPES, Scene, canonical_scene

SEED = 11
NONE = "none"
# The fields of a scene. Objects are ordered as in `canonical_scene`: the left or upper one comes first.
FIELDS: dict[str, tuple[str, ...]] = {
    "background": tuple(BACKGROUNDS),
    "kind": SCENE_KINDS,
    "count": ("1", "2", "3", "4"),
    "size": (*OBJECT_SIZES, NONE),
    "relation": ("left of", "above", NONE),
    "colour 1": tuple(COLOURS),
    "shape 1": SHAPES,
    "colour 2": (*COLOURS, NONE),
    "shape 2": (*SHAPES, NONE),
}
WIDTHS = [len(options) for options in FIELDS.values()]
ENCODERS = {
    "text_encoder": CLIPTextModelWithProjection,
    "text_encoder_2": CLIPTextModelWithProjection,
    "text_encoder_3": T5EncoderModel,
}


def labels(scene: Scene) -> list[int]:
    """Return the class of a scene in each of `FIELDS`."""
    scene = canonical_scene(scene)
    first, second = scene.items[0], scene.items[-1] if scene.kind == "pair" else None
    values = (
        scene.background, scene.kind, str(scene.count), first.size or NONE, scene.relation or NONE,
        first.colour, first.shape, second.colour if second else NONE, second.shape if second else NONE,
    )  # fmt: skip
    return [options.index(value) for options, value in zip(FIELDS.values(), values, strict=True)]


def draw(purpose: str, count: int, held_out: bool) -> tuple[list[str], Tensor]:
    """Return the captions of ``count`` scenes, the languages in turn, and the labels of each caption."""
    rng = stream(SEED, purpose, 0, 0, 0)
    scenes = [draw_scene(rng, held_out) for _ in range(count)]
    texts = [text for scene in scenes for text in scene_captions(scene).values()]
    return texts, torch.tensor([labels(scene) for scene in scenes]).repeat_interleave(len(LANGUAGES), 0)


@torch.no_grad()
def features(folder: Path, texts: list[str], device: torch.device) -> dict[str, Tensor]:
    """Return what a denoiser gets for the captions, one row per caption."""
    outputs = []
    for (name, kind), tokenizer in zip(ENCODERS.items(), load_tokenizers(folder).values(), strict=True):
        model = kind.from_pretrained(folder / name, dtype=torch.float32).to(device).eval()
        ids = tokenizer(texts, padding="max_length", truncation=True, return_tensors="pt").input_ids
        parts = [encode(model, rows.to(device)) for rows in ids.split(500)]
        outputs.append([torch.cat(values) for values in zip(*parts, strict=True) if values[0] is not None])
    (first, first_pooled), (second, second_pooled), (t5,) = outputs
    return {
        "pooled": torch.cat([first_pooled, second_pooled], -1),
        "clip tokens": torch.cat([first, second], -1).flatten(1),
        "t5 tokens": t5.flatten(1),
    }


def fit(x: Tensor, classes: Tensor, steps: int = 1000) -> nn.Linear:
    """Train a linear layer that predicts all fields."""
    torch.manual_seed(SEED)
    linear = nn.Linear(x.shape[1], sum(WIDTHS)).to(x.device)
    optimizer = torch.optim.AdamW(linear.parameters(), weight_decay=0.1)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 5e-3 * (1 - step / steps)
        rows = torch.randint(0, len(x), (256,)).to(x.device)
        logits = linear(x[rows]).split(WIDTHS, 1)
        loss = torch.stack([F.cross_entropy(field, classes[rows, i]) for i, field in enumerate(logits)]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return linear


def probe(folder: Path, device: torch.device) -> dict[str, float]:
    """Return the share of held-out captions whose whole scene is predicted, by output and language."""
    (texts, classes), (new_texts, new_classes) = draw("probe-train", 3000, False), draw("probe-test", 1000, True)
    known, new = features(folder, texts, device), features(folder, new_texts, device)
    shares = {}
    for name, x in known.items():
        mean, std = x.mean(0), x.std(0) + 1e-3
        linear = fit((x - mean) / std, classes.to(device))
        predicted = [field.argmax(1) for field in linear((new[name] - mean) / std).split(WIDTHS, 1)]
        right = (torch.stack(predicted, 1).cpu() == new_classes).all(1).float()
        for index, language in enumerate(LANGUAGES):
            shares[f"{name} {language}"] = round(right[index :: len(LANGUAGES)].mean().item(), 4)
    return shares


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    print(json.dumps(probe(args.folder, torch.device("cuda" if torch.cuda.is_available() else "cpu")), indent=1))


if __name__ == "__main__":
    main()
