"""How good the demo's text encoders are: what a fresh linear probe reads, and the scale of their outputs."""

import torch
import torch.nn.functional as F
from demo_encoders import NAMES, Encoder
from demo_lessons import SCENE_FIELDS, SEED, Batch, draw_batch
from torch import Tensor, nn

from sd3_light.world import LANGUAGES


@torch.no_grad()
def features(encoders: list[Encoder], batch: Batch) -> dict[str, Tensor]:
    """What a diffusion model gets of the captions, as one row each."""
    outputs = [encoder(encoder.ids(batch.texts)) for encoder in encoders]
    clip = torch.cat([tokens for tokens, pooled in outputs if pooled is not None], dim=-1)
    pooled = torch.cat([pooled for _, pooled in outputs if pooled is not None], dim=-1)
    t5 = next(tokens for tokens, pooled in outputs if pooled is None)
    return {"pooled": pooled, "clip tokens": clip.flatten(1), "t5 tokens": t5.flatten(1), "t5 mean": t5.mean(1)}


class Heads(nn.Module):
    """Linear heads, one a field of the scene, that share their input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.sizes = [len(options) for options in SCENE_FIELDS.values()]
        self.linear = nn.Linear(width, sum(self.sizes))

    def forward(self, x: Tensor) -> list[Tensor]:
        return list(self.linear(x).split(self.sizes, dim=-1))

    def loss(self, x: Tensor, labels: Tensor) -> Tensor:
        """Mean cross-entropy over the fields."""
        return torch.stack([F.cross_entropy(logits, labels[:, i]) for i, logits in enumerate(self(x))]).mean()


def probe(x: Tensor, labels: Tensor, steps: int = 1000) -> tuple[Heads, Tensor, Tensor]:
    """A fresh linear probe for all fields of the scene, with the mean and deviation that its input is brought by."""
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
    """Accuracy on captions of held-out pairs by input and language: of all fields at once, and of the worst field."""
    train_set = draw_batch("text-probe-train", 0, 3000, held_out=False, plain=True)
    test_set = draw_batch("text-probe-test", 0, 1000, held_out=True, plain=True)
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


def apart(whole: Tensor) -> Tensor:
    """How far the languages are apart, in units of the spread over scenes."""
    by_scene = whole.unflatten(0, (-1, len(LANGUAGES)))
    distance: Tensor = (by_scene[:, 0] - by_scene[:, 1]).square().mean() / (whole.var(0).mean() + 1e-6)
    return distance


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
