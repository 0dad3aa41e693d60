"""Makes the demo's tokenizers and trains its three small text encoders on captions of the demo world.

    python scripts/demo_text.py OUT [--steps 700] [--random]

Writes tokenizer, tokenizer_2, tokenizer_3, text_encoder, text_encoder_2, text_encoder_3 and scheduler, as in a diffusers
folder of SD3. Each encoder learns to tell the scene from its caption in either language, by linear heads that are then
thrown away; no caption of a held-out pair of colour and shape is among those it learns from. Afterwards its outputs are
brought to about unit scale by folding a factor into the weights. `--random` writes encoders with random weights.
`made.json` holds what a fresh linear probe, trained on seen pairs, reads from captions of held-out pairs.
"""

import argparse
import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from demo_tokenizers import EOS, MAX_LENGTH, MEANINGS, clip_tokenizer, split_words, t5_tokenizer
from diffusers import FlowMatchEulerDiscreteScheduler
from torch import Tensor, nn
from transformers import (
    CLIPTextConfig,
    CLIPTextModelWithProjection,
    PreTrainedTokenizerBase,
    T5Config,
    T5EncoderModel,
)

from sd3_light.randomness import stream
from sd3_light.world import BACKGROUNDS, COLOURS, KINDS, LANGUAGES, SHAPES, SIZES, Scene, canonical, captions, draw_scene

SEED = 11
NONE = "none"
# What a scene is made of; first and second are those of `canonical`: the left one or the upper one comes first.
SCENE_FIELDS: dict[str, tuple[str, ...]] = {
    "background": tuple(BACKGROUNDS),
    "kind": KINDS,
    "count": ("1", "2", "3", "4"),
    "size": (*SIZES, NONE),
    "relation": ("left of", "above", NONE),
    "colour 1": tuple(COLOURS),
    "shape 1": SHAPES,
    "colour 2": (*COLOURS, NONE),
    "shape 2": (*SHAPES, NONE),
}
# What the object is that a word belongs to, and where it lies towards the other one.
OBJECT_FIELDS: dict[str, tuple[str, ...]] = {
    "colour": tuple(COLOURS),
    "shape": SHAPES,
    "place": ("left", "right", "above", "below", NONE),
    "background": tuple(BACKGROUNDS),
    "count": ("1", "2", "3", "4"),
    "size": (*SIZES, NONE),
}
_PLACES = {"left of": ("left", "right"), "right of": ("right", "left"), "above": ("above", "below"), "below": ("below", "above")}


@dataclass(frozen=True)
class Batch:
    """Captions with what they mean; rows of one scene are adjacent, one a language."""

    texts: list[str]
    scenes: Tensor  # [captions, scene fields]
    objects: Tensor  # [captions, 2, object fields], in the caption's order


def scene_labels(scene: Scene) -> list[int]:
    """The scene's class in each of `SCENE_FIELDS`."""
    scene = canonical(scene)
    first, second = scene.items[0], scene.items[-1] if scene.kind == "pair" else None
    values = (
        scene.background, scene.kind, str(scene.count), first.size or NONE, scene.relation or NONE,
        first.colour, first.shape, second.colour if second else NONE, second.shape if second else NONE,
    )  # fmt: skip
    return [options.index(value) for options, value in zip(SCENE_FIELDS.values(), values, strict=True)]


def object_labels(scene: Scene) -> list[list[int]]:
    """The classes of each named object in `OBJECT_FIELDS`; a single object is given twice."""
    places = _PLACES[scene.relation] if scene.relation else (NONE, NONE)
    rows = []
    for item, place in zip((scene.items[0], scene.items[-1]), places, strict=True):
        values = (item.colour, item.shape, place, scene.background, str(scene.count), item.size or NONE)
        rows.append([options.index(value) for options, value in zip(OBJECT_FIELDS.values(), values, strict=True)])
    return rows


def draw_batch(purpose: str, index: int, count: int, held_out: bool, plain: bool = False) -> Batch:
    """`count` scenes in every language; unless `plain`, some captions begin with a capital or end with a full stop."""
    rng = stream(SEED, purpose, 0, 0, index)
    texts, scenes, objects = [], [], []
    for _ in range(count):
        scene = draw_scene(rng, held_out)
        for language, text in captions(scene).items():
            if not plain and rng.random() < 0.15:
                text = text[0].upper() + text[1:]
            if not plain and rng.random() < 0.15:
                text += "。" if language == "zh" else "."
            texts.append(text)
            scenes.append(scene_labels(scene))
            objects.append(object_labels(scene))
    return Batch(texts, torch.tensor(scenes), torch.tensor(objects))


class Encoder(nn.Module):
    """A text encoder with its tokenizer, seen as SD3 sees it: ids -> (tokens, pooled or None)."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, model: nn.Module) -> None:
        super().__init__()
        self.tokenizer, self.model = tokenizer, model

    def ids(self, texts: list[str]) -> Tensor:
        """Padded ids [captions, MAX_LENGTH]."""
        padded = self.tokenizer(texts, padding="max_length", max_length=MAX_LENGTH, truncation=True, return_tensors="pt")
        ids: Tensor = padded.input_ids
        return ids

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor | None]:
        if isinstance(self.model, T5EncoderModel):
            return self.model(ids)[0], None
        output = self.model(ids, output_hidden_states=True)
        return output.hidden_states[-2], output.text_embeds


def build_clip(pad: str, width: int, heads: int, activation: str) -> Encoder:
    """A CLIP text encoder of three layers, the last of which serves the pooled output only."""
    tokenizer = clip_tokenizer(pad)
    config = CLIPTextConfig(
        vocab_size=len(tokenizer), hidden_size=width, intermediate_size=4 * width, projection_dim=width,
        num_hidden_layers=3, num_attention_heads=heads, max_position_embeddings=MAX_LENGTH, hidden_act=activation,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    model = CLIPTextModelWithProjection(config)
    init_weights(model)
    return Encoder(tokenizer, model.eval())


def build_t5(width: int) -> Encoder:
    """A T5 encoder of two layers, with T5-v1.1's gated GELU."""
    tokenizer = t5_tokenizer()
    config = T5Config(
        vocab_size=len(tokenizer), d_model=width, d_kv=64, num_heads=4, d_ff=384, num_layers=2,
        feed_forward_proj="gated-gelu", relative_attention_num_buckets=32, relative_attention_max_distance=128,
        pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id, tie_word_embeddings=False,
        dropout_rate=0.0, use_cache=False, is_encoder_decoder=False,
    )  # fmt: skip
    model = T5EncoderModel(config)
    init_weights(model)
    return Encoder(tokenizer, model.eval())


@torch.no_grad()
def init_weights(model: nn.Module) -> None:
    """Embeddings of unit scale (0.02, the usual, would drown the words); layers that add about as much again."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding):
            module.weight.normal_(std=0.5 if "position" in name else 1.0)
        elif isinstance(module, nn.Linear):
            adds = name.endswith((".out_proj", ".fc2", ".o", ".wo"))
            module.weight.normal_(std=(0.5 if adds else 1.0) * module.in_features**-0.5)
            if name.endswith(".q") and isinstance(model, T5EncoderModel):
                module.weight.mul_(64**-0.5)  # T5 does not divide by the root of the head's width
            if module.bias is not None:
                module.bias.zero_()


class Heads(nn.Module):
    """Linear heads, one a field, that share their input."""

    def __init__(self, width: int, fields: dict[str, tuple[str, ...]]) -> None:
        super().__init__()
        self.sizes = [len(options) for options in fields.values()]
        self.linear = nn.Linear(width, sum(self.sizes))

    def forward(self, x: Tensor) -> list[Tensor]:
        return list(self.linear(x).split(self.sizes, dim=-1))

    def loss(self, x: Tensor, labels: Tensor, fields: range | None = None) -> Tensor:
        """Mean cross-entropy over the fields; `fields` picks some of them."""
        logits = self(x)
        losses = [F.cross_entropy(logits[i], labels[:, i]) for i in fields or range(len(self.sizes))]
        return torch.stack(losses).mean()


class Lessons(nn.Module):
    """What an encoder is trained for: the sum of the losses of a batch."""

    def __init__(self, encoder: Encoder, width: int) -> None:
        super().__init__()
        self.encoder = encoder
        self.causal = not isinstance(encoder.model, T5EncoderModel)
        self.scene, self.summary = Heads(width, SCENE_FIELDS), Heads(width, SCENE_FIELDS)
        self.object = Heads(width, OBJECT_FIELDS)
        self.word = Heads(width, {"word": tuple(MEANINGS)})
        words = {word: index for index, words in enumerate(MEANINGS.values()) for word in words}
        names = [encoder.tokenizer.decode([index]).strip().lower() for index in range(len(encoder.tokenizer))]
        self.meaning = torch.tensor([words.get(name, -1) for name in names])
        shapes = [list(MEANINGS).index(shape) for shape in SHAPES]
        colours = [list(MEANINGS).index(colour) for colour in COLOURS]
        self.is_shape = torch.isin(self.meaning, torch.tensor(shapes))
        self.is_colour = torch.isin(self.meaning, torch.tensor(colours))

    def forward(self, batch: Batch) -> Tensor:
        ids = self.encoder.ids(batch.texts)
        tokens, pooled = self.encoder(ids)
        whole = tokens.mean(1) if pooled is None else pooled
        meaning = self.meaning[ids]
        known = meaning >= 0
        loss = self.scene.loss(whole, batch.scenes) + self.word.loss(tokens[known], meaning[known][:, None])
        loss = loss + self.object_loss(tokens, ids, batch.objects)
        # the marks after the caption have heard all of it
        rows, places = (self.after(ids)).nonzero(as_tuple=True)
        loss = loss + self.summary.loss(tokens[rows, places], batch.scenes[rows])
        return loss + 0.5 * apart(whole) + 0.1 * off_centre(whole) + 0.05 * unscaled(tokens)

    def object_loss(self, tokens: Tensor, ids: Tensor, objects: Tensor) -> Tensor:
        """At the words of an object: what it is. In CLIP only a shape's word has heard both, and no place is known."""
        which = (self.is_shape[ids].cumsum(1) - self.is_shape[ids].long()).clamp(max=1)
        chosen = self.is_shape[ids] if self.causal else self.is_shape[ids] | self.is_colour[ids]
        rows, places = chosen.nonzero(as_tuple=True)
        labels = objects[rows, which[rows, places]]
        return self.object.loss(tokens[rows, places], labels, range(2) if self.causal else None)

    def after(self, ids: Tensor) -> Tensor:
        """Where the end mark and the padding are."""
        return (ids == self.encoder.tokenizer.eos_token_id).long().cumsum(1) > 0


def apart(whole: Tensor) -> Tensor:
    """How far the languages are apart, in units of the spread over scenes."""
    by_scene = whole.unflatten(0, (-1, len(LANGUAGES)))
    return (by_scene[:, 0] - by_scene[:, 1]).square().mean() / (whole.var(0).mean() + 1e-6)


def off_centre(whole: Tensor) -> Tensor:
    """How much of the outputs is the same for every caption, in units of the spread over captions."""
    return whole.mean(0).square().mean() / (whole.var(0).mean() + 1e-6)


def unscaled(tokens: Tensor) -> Tensor:
    """How far the channels are from unit scale."""
    return tokens.flatten(0, 1).square().mean(0).log().square().mean()


def train(encoder: Encoder, width: int, steps: int, scenes: int, lr: float) -> float:
    """Trains the encoder for its lessons; returns the last losses' mean. The rate warms up and falls by a cosine."""
    lessons = Lessons(encoder, width)
    optimizer = torch.optim.AdamW(lessons.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.0)
    losses = []
    start = time.monotonic()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1.0, (step + 1) / 50) * 0.5 * (1 + math.cos(math.pi * step / steps))
        loss = lessons(draw_batch("text-train", step, scenes, held_out=False))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(lessons.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        if (step + 1) % 100 == 0:
            print(f"step {step + 1} loss {sum(losses[-50:]) / 50:.4f} {time.monotonic() - start:.0f} s", flush=True)
    return sum(losses[-50:]) / 50 if losses else math.nan


@torch.no_grad()
def fold_scale(encoder: Encoder) -> None:
    """Brings the outputs to unit scale without changing what they say."""
    batch = draw_batch("text-scale", 0, 512, held_out=False)
    tokens, pooled = encoder(encoder.ids(batch.texts))
    if isinstance(encoder.model, T5EncoderModel):
        encoder.model.encoder.final_layer_norm.weight.div_(tokens.flatten(0, 1).square().mean(0).sqrt())
        return
    gain = tokens.square().mean().rsqrt()
    for name, parameter in encoder.model.named_parameters():
        # all that is added to the stream; layers read it through a norm, which takes the factor out again
        if "embedding" in name or ".out_proj." in name or ".fc2." in name:
            parameter.mul_(gain)
    assert pooled is not None
    encoder.model.text_projection.weight.div_(pooled.square().mean(0).sqrt()[:, None])


@torch.no_grad()
def features(encoders: list[Encoder], batch: Batch) -> dict[str, Tensor]:
    """What a diffusion model gets of the captions, as one row each."""
    outputs = [encoder(encoder.ids(batch.texts)) for encoder in encoders]
    clip = torch.cat([tokens for tokens, pooled in outputs if pooled is not None], dim=-1)
    pooled = torch.cat([pooled for _, pooled in outputs if pooled is not None], dim=-1)
    t5 = next(tokens for tokens, pooled in outputs if pooled is None)
    return {"pooled": pooled, "clip tokens": clip.flatten(1), "t5 tokens": t5.flatten(1), "t5 mean": t5.mean(1)}


def probe(x: Tensor, labels: Tensor, steps: int = 1500) -> tuple[Heads, Tensor, Tensor]:
    """A fresh linear probe for all fields of the scene, with the mean and deviation that its input is brought by."""
    torch.manual_seed(SEED)
    mean, std = x.mean(0), x.std(0) + 1e-3
    heads = Heads(x.shape[1], SCENE_FIELDS)
    optimizer = torch.optim.AdamW(heads.parameters(), lr=1e-2, weight_decay=0.1)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 5e-3 * (1 - step / steps)
        rows = torch.randint(0, len(x), (256,))
        loss = heads.loss((x[rows] - mean) / std, labels[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return heads, mean, std


def probe_all(encoders: list[Encoder]) -> dict[str, dict[str, float]]:
    """Accuracy on captions of held-out pairs by input and language: of all fields at once, and of the worst field."""
    train_set = draw_batch("text-probe-train", 0, 4000, held_out=False, plain=True)
    test_set = draw_batch("text-probe-test", 0, 1500, held_out=True, plain=True)
    seen, unseen = features(encoders, train_set), features(encoders, test_set)
    report: dict[str, dict[str, float]] = {}
    for name, x in seen.items():
        heads, mean, std = probe(x, train_set.scenes)
        with torch.no_grad():
            logits = heads((unseen[name] - mean) / std)
        right = torch.stack([logit.argmax(1) for logit in logits], 1) == test_set.scenes
        for index, language in enumerate(LANGUAGES):
            mine = right[index :: len(LANGUAGES)].float()
            worst = int(mine.mean(0).argmin())
            report[f"{name} {language}"] = {
                "field": round(mine.mean().item(), 4),
                f"worst ({list(SCENE_FIELDS)[worst]})": round(mine.mean(0)[worst].item(), 4),
                "whole scene": round(mine.all(1).float().mean().item(), 4),
            }
    return report


@torch.no_grad()
def scale_report(encoders: list[Encoder]) -> dict[str, float]:
    """The scale of the outputs over held-out captions, and how near the languages are in pooled space."""
    batch = draw_batch("text-scale", 1, 500, held_out=True, plain=True)
    report: dict[str, float] = {}
    for name, encoder in zip(NAMES, encoders, strict=True):
        tokens, pooled = encoder(encoder.ids(batch.texts))
        assert tokens.isfinite().all() and (pooled is None or pooled.isfinite().all()), name
        by_channel = tokens.flatten(0, 1).square().mean(0).sqrt()
        report[f"{name} tokens rms"] = by_channel.square().mean().sqrt().item()
        report[f"{name} tokens rms least"] = by_channel.min().item()
        report[f"{name} tokens rms most"] = by_channel.max().item()
        report[f"{name} tokens largest"] = tokens.abs().max().item()
        if pooled is not None:
            report[f"{name} pooled rms"] = pooled.square().mean().sqrt().item()
            report[f"{name} pooled mean"] = pooled.mean(0).abs().mean().item()
            report[f"{name} pooled languages apart"] = apart(pooled).item()
    return {name: round(value, 3) for name, value in report.items()}


NAMES = ("text_encoder", "text_encoder_2", "text_encoder_3")


def build_encoders() -> list[Encoder]:
    """The three encoders with random weights."""
    torch.manual_seed(SEED)
    return [build_clip(EOS, 96, 3, "quick_gelu"), build_clip("!", 128, 4, "gelu"), build_t5(256)]


def check_tokenizers(encoders: list[Encoder], out: Path) -> int:
    """Every caption fits, and has one token a word; returns the longest. Loaded tokenizers give the same ids."""
    longest = 0
    texts = draw_batch("text-length", 0, 3000, held_out=False).texts + draw_batch("text-length", 1, 500, True).texts
    for index, encoder in enumerate(encoders):
        ids = encoder.tokenizer(texts).input_ids
        longest = max(longest, *(len(row) for row in ids))
        marks = 2 if index < 2 else 1
        for text, row in zip(texts, ids, strict=True):
            space = index == 2 and not text.isascii()
            assert len(row) == len(split_words(text)) + marks + space, (text, row)
        folder = out / f"tokenizer{f'_{index + 1}' if index else ''}"
        encoder.tokenizer.save_pretrained(folder)
        assert type(encoder.tokenizer).from_pretrained(folder)(texts).input_ids == ids, folder
    assert longest <= MAX_LENGTH, longest
    return longest


def encoder_steps(steps: int) -> Iterator[tuple[str, int, int, float]]:
    """Name, width, steps and rate of each encoder's training."""
    for name, width, rate in zip(NAMES, (96, 128, 256), (3e-3, 2e-3, 1e-3), strict=True):
        yield name, width, steps, rate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=700)
    parser.add_argument("--scenes", type=int, default=64, help="scenes a step, each in both languages")
    parser.add_argument("--random", action="store_true", help="leave the weights random")
    args = parser.parse_args()
    torch.set_num_threads(2)
    start = time.monotonic()
    encoders = build_encoders()
    longest = check_tokenizers(encoders, args.out)
    losses = {}
    for encoder, (name, width, steps, rate) in zip(encoders, encoder_steps(args.steps), strict=True):
        if not args.random:
            losses[name] = round(train(encoder, width, steps, args.scenes, rate), 4)
        fold_scale(encoder)
        encoder.half().float()  # what is shipped is what is judged
    seconds = time.monotonic() - start
    note = {
        "command": f"python scripts/demo_text.py OUT --steps {args.steps} --scenes {args.scenes}" + " --random" * args.random,
        "seed": SEED, "longest_caption": longest, "seconds": round(seconds), "losses": losses,
        "scale": scale_report(encoders), "probe_on_held_out_pairs": probe_all(encoders),
    }  # fmt: skip
    print(json.dumps(note, indent=1))
    for name, encoder in zip(NAMES, encoders, strict=True):
        encoder.model.half().save_pretrained(args.out / name)
        (args.out / name / "made.json").write_text(json.dumps(note, indent=1) + "\n")
    FlowMatchEulerDiscreteScheduler(shift=1.0).save_pretrained(args.out / "scheduler")


if __name__ == "__main__":
    main()
