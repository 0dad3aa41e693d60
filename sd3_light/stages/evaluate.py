"""The evaluate stage: how well a finished model draws what the demo world's prompts ask for."""

import json
from pathlib import Path

from sd3_light.engines import Launch
from sd3_light.export.open import open_pipeline
from sd3_light.metrics.composition import CompositionScore, score
from sd3_light.runlog import progress
from sd3_light.world import prompts


def run(
    model: Path,
    count: int = 96,
    held_out: bool = True,
    language: str = "mixed",
    steps: int = 20,
    guidance: float = 3.0,
    seed: int = 0,
    batch: int = 16,
    out: Path | None = None,
) -> CompositionScore:
    """Score ``count`` prompts of the demo world, by default of combinations that training never saw."""
    pipe, policy = open_pipeline(model, Launch().device())
    asked = prompts(count, seed, held_out, language=language)
    with progress("score", count, "images") as bar:
        result = score(pipe, asked, policy, steps, guidance, seed, batch, on_progress=bar.reach)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(result.as_dict(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return result
