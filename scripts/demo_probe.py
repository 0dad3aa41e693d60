"""Measures the demo's text encoders: accuracy of a new linear probe, and the scale of their outputs."""

import torch
import torch.nn.functional as F
from demo_encoders import NAMES, Encoder
from demo_text_targets import SCENE_FIELDS, SEED, CaptionBatch, draw_batch
from torch import Tensor, nn

from sd3_light.world.captions import LANGUAGES


@torch.no_grad()
def features(encoders: list[Encoder], batch: CaptionBatch) -> dict[str, Tensor]:
    """Return the inputs of a diffusion model for the captions, one row per caption."""
    outputs = [encoder(encoder.ids(batch.texts)) for encoder in encoders]
    clip = torch.cat([tokens for tokens, pooled in outputs if pooled is not None], dim=-1)
    pooled = torch.cat([pooled for _, pooled in outputs if pooled is not None], dim=-1)
    t5 = next(tokens for tokens, pooled in outputs if pooled is None)
    return {"pooled": pooled, "clip tokens": clip.flatten(1), "t5 tokens": t5.flatten(1), "t5 mean": t5.mean(1)}


class Heads(nn.Module):
    """Linear heads with a shared input, one per field of the scene."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.sizes = [len(options) for options in SCENE_FIELDS.values()]
        self.linear = nn.Linear(width, sum(self.sizes))

    def forward(self, x: Tensor) -> list[Tensor]:
        return list(self.linear(x).split(self.sizes, dim=-1))

    def loss(self, x: Tensor, labels: Tensor) -> Tensor:
        """Return the mean cross-entropy over the fields."""
        return torch.stack([F.cross_entropy(logits, labels[:, i]) for i, logits in enumerate(self(x))]).mean()


def probe(x: Tensor, labels: Tensor, steps: int = 1000) -> tuple[Heads, Tensor, Tensor]:
    """Train a new linear probe for all fields of the scene; returns it with the mean and deviation of its input."""
    torch.manual_seed(SEED)
    mean, std = x.mean(0), x.std(0) + 1e-3
    heads = Heads(x.shape[1])
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
    """Return the accuracy on held-out captions by input and language: mean, worst field, and whole scene."""
    train_set = draw_batch("text-probe-train", 0, 3000, held_out=False, plain=True)
    test_set = draw_batch("text-probe-test", 0, 1000, held_out=True, plain=True)
    train_features, test_features = features(encoders, train_set), features(encoders, test_set)
    report: dict[str, dict[str, float]] = {}
    for name, x in train_features.items():
        heads, mean, std = probe(x, train_set.scenes)
        with torch.no_grad():
            logits = heads((test_features[name] - mean) / std)
        correct = torch.stack([logit.argmax(1) for logit in logits], 1) == test_set.scenes
        for index, language in enumerate(LANGUAGES):
            correct_rows = correct[index :: len(LANGUAGES)].float()
            worst = int(correct_rows.mean(0).argmin())
            report[f"{name} {language}"] = {
                "field": round(correct_rows.mean().item(), 4),
                f"worst ({list(SCENE_FIELDS)[worst]})": round(correct_rows.mean(0)[worst].item(), 4),
                "whole scene": round(correct_rows.all(1).float().mean().item(), 4),
            }
    return report


def language_distance(pooled: Tensor) -> Tensor:
    """Return the distance between the languages in units of the variance over scenes."""
    by_scene = pooled.unflatten(0, (-1, len(LANGUAGES)))
    distance: Tensor = (by_scene[:, 0] - by_scene[:, 1]).square().mean() / (pooled.var(0).mean() + 1e-6)
    return distance


@torch.no_grad()
def scale_report(encoders: list[Encoder]) -> dict[str, float]:
    """Return the scale of the outputs over held-out captions, and the distance of the languages in pooled space."""
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
            report[f"{name} pooled languages apart"] = language_distance(pooled).item()
    return {name: round(value, 3) for name, value in report.items()}
