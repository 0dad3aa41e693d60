"""Makes the demo's tokenizers and its three small text encoders from captions of the demo world.

    python scripts/demo_text.py OUT [--steps 600] [--random | --hard]

Writes tokenizer, tokenizer_2, tokenizer_3, text_encoder, text_encoder_2, text_encoder_3 and scheduler, as in a
diffusers folder of SD3. The CLIP encoders learn the scene of a caption in either language (`demo_text_targets.py`).
Their training captions contain no held-out pair of colour and shape. The T5 keeps random weights, as do all encoders
with `--random`. Outputs are then scaled to about unit scale by folding a factor into the weights. `made.json` records
the accuracy of a new linear probe, trained on training pairs, on captions of held-out pairs. `--hard` makes random
encoders for the longer captions of the harder scenes of the benchmarks, in a few seconds.
"""

import argparse
import json
import math
import time
from pathlib import Path

import torch
from demo_encoders import NAMES, Encoder, build_encoders, load_encoders
from demo_probe import probe_all, scale_report
from demo_text_targets import SEED, TextTargets, draw_batch
from demo_tokenizers import (
    DEMO_VOCABULARY,
    HARD_VOCABULARY,
    Vocabulary,
    make_tokenizers,
    split_words,
)
from diffusers import FlowMatchEulerDiscreteScheduler
from torch import nn
from transformers import T5EncoderModel

from sd3_light.parts.text_encoders import scale_outputs
from sd3_light.parts.tokenizers import save_tokenizers
from sd3_light.randomness import stream
from sd3_light.world.hard.captions import hard_captions
from sd3_light.world.hard.scene import draw_hard_scene


def train(encoder: Encoder, steps: int, scenes: int, lr: float) -> float:
    """Train the encoder with warm-up and a cosine schedule; returns the mean of the last losses."""
    targets = TextTargets(encoder, encoder.model.config.hidden_size)
    generator = torch.Generator().manual_seed(SEED)
    optimizer = torch.optim.AdamW(encoder.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.0)
    losses = []
    start = time.monotonic()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1.0, (step + 1) / 50) * 0.5 * (1 + math.cos(math.pi * step / steps))
        loss = targets.loss(draw_batch("text-train", step, scenes, held_out=False), generator)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(encoder.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        if (step + 1) % 100 == 0:
            correct = targets.score(draw_batch("text-score", 0, 128, held_out=True))
            mean = sum(losses[-50:]) / 50
            print(f"step {step + 1} loss {mean:.4f} correct {correct:.3f} {time.monotonic() - start:.0f} s", flush=True)
    return sum(losses[-50:]) / 50 if losses else math.nan


@torch.no_grad()
def fold_scale(encoder: Encoder, texts: list[str]) -> None:
    """Scale the outputs for these texts to unit scale by changing the weights."""
    tokens, pooled = encoder(encoder.ids(texts))
    scale_outputs(encoder.model, tokens, pooled)


def captions(hard: bool, count: int) -> list[str]:
    """Return captions of ``count`` scenes in both languages."""
    if not hard:
        return draw_batch("text-scale", 0, count, held_out=False).texts
    rng = stream(SEED, "text-scale", 0, 0, 0)
    return [text for _ in range(count) for text in hard_captions(draw_hard_scene(rng, held_out=False)).values()]


def make_encoders(args: argparse.Namespace) -> dict[str, float]:
    """Train and write the encoders; returns the losses of the trained ones."""
    losses = {}
    vocabulary = HARD_VOCABULARY if args.hard else DEMO_VOCABULARY
    for name, encoder in build_encoders(SEED, vocabulary).items():
        if not args.random and not args.hard and not isinstance(encoder.model, T5EncoderModel):
            losses[name] = round(train(encoder, args.steps, args.scenes, args.lr), 4)
        fold_scale(encoder, captions(args.hard, 512))
        encoder.model.half().save_pretrained(args.out / name)
    return losses


def check_tokenizers(encoders: list[Encoder], vocabulary: Vocabulary, texts: list[str]) -> int:
    """Check that every caption fits with one token per word, before and after saving; returns the longest."""
    longest = 0
    for index, (encoder, original) in enumerate(zip(encoders, make_tokenizers(vocabulary).values(), strict=True)):
        ids = encoder.tokenizer(texts).input_ids
        assert ids == original(texts).input_ids, NAMES[index]
        longest = max(longest, *(len(row) for row in ids))
        for text, row in zip(texts, ids, strict=True):
            marks = 2 if index < 2 else 1 + (not text.isascii())  # T5 has a piece for the space before Chinese
            assert len(row) == len(split_words(text, vocabulary)) + marks, (text, row)
    assert longest <= vocabulary.max_length, longest
    return longest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--scenes", type=int, default=64, help="scenes per step, each in both languages")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--random", action="store_true", help="leave all weights random")
    parser.add_argument("--hard", action="store_true", help="random encoders for captions of harder scenes")
    args = parser.parse_args()
    torch.set_num_threads(1)  # more threads change the order of sums, and thereby the weights slightly
    start = time.monotonic()
    vocabulary = HARD_VOCABULARY if args.hard else DEMO_VOCABULARY
    save_tokenizers(make_tokenizers(vocabulary), args.out)
    FlowMatchEulerDiscreteScheduler(shift=1.0).save_pretrained(args.out / "scheduler")
    losses = make_encoders(args)
    seconds = round(time.monotonic() - start)
    encoders = load_encoders(args.out)  # measure the weights as shipped
    options = f"--steps {args.steps} --scenes {args.scenes} --lr {args.lr:g}"
    options = "--hard" if args.hard else "--random" if args.random else options
    note = {
        "command": f"python scripts/demo_text.py OUT {options}", "seed": SEED, "device": "cpu, 1 thread",
        "seconds": seconds, "losses": losses,
    }  # fmt: skip
    if args.hard:
        note["longest_caption"] = check_tokenizers(encoders, vocabulary, captions(True, 3000))
    else:
        held_out = draw_batch("text-length", 1, 500, True).texts
        texts = draw_batch("text-length", 0, 3000, held_out=False).texts + held_out
        note["longest_caption"] = check_tokenizers(encoders, vocabulary, texts)
        note |= {"scale": scale_report(encoders), "probe_on_held_out_pairs": probe_all(encoders)}
    text = json.dumps(note, indent=1) + "\n"
    print(text)
    for name in NAMES:
        (args.out / name / "made.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
