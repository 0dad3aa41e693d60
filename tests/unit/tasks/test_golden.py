"""Losses of tasks, step by step, compared with tests/golden: of every kind of unit, loss and module.

After an intended change:  python tests/unit/tasks/test_golden.py --write
"""

import json
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from sd3_light.tasks import FlowMatchDPOLoss, FlowMatchSFTLoss
from tests.unit.tasks.test_custom_forward import Foreign, Own
from tests.unit.tasks.test_stacking import CASES, Items
from tests.unit.tasks.toy import Images, Toy, steps, train

GOLDEN = Path(__file__).parents[2] / "golden" / "tasks.json"
TOLERANCE = 1e-5

Make = Callable[[], tuple[Any, Any, dict[str, Any]]]
"""Returns dataset, model and settings."""


def stacked(case: str) -> tuple[Any, Any, dict[str, Any]]:
    make, model = CASES[case]
    evaluation = {"eval_dataset": Items(make)[:3], "eval_steps": 4, "eval_at_fixed_t": True}
    return Items(make), model(), {"batch_size": 2, "num_epochs": 2, **evaluation}


def toy(adapter: bool = False, loss: Any = None, **settings: Any) -> tuple[Any, Any, dict[str, Any]]:
    model = Toy(adapter, 0.3 if adapter else 0.0)
    model.loss = loss or model.loss
    return Images(8, mixed=not adapter), model, {"batch_size": 2, **settings}


def preferences() -> tuple[Any, Any, dict[str, Any]]:
    data = [{"image": item["image"], "rejected": -item["image"]} for item in map(Images(6).__getitem__, range(6))]
    model = Toy(adapter=True)
    model.loss = FlowMatchDPOLoss(beta=50.0)
    return data, model, {"batch_size": 2}


def own(kind: Any, **settings: Any) -> tuple[Any, Any, dict[str, Any]]:
    return Images(4), kind(), {"batch_size": 2, "eval_dataset": Images(3), "eval_steps": 2, **settings}


MAKES: dict[str, Make] = {
    **{case: partial(stacked, case) for case in CASES},
    "buckets and an average": partial(toy, ema_decay=0.9, gradient_accumulation_steps=2),
    "an adapter with dropout": partial(toy, adapter=True),
    "a shifted time": partial(toy, loss=FlowMatchSFTLoss(flux_shift=True, pseudo_huber_c=0.1), seed=3),
    "preferences": preferences,
    "a custom forward": partial(own, Own),
    "a module of another library": partial(own, Foreign, gradient_accumulation_steps=2),
}


def measure(make: Make, out: Path) -> list[Any]:
    """Train; return (loss, gradient norm, losses by time) per step and the losses of each evaluation."""
    torch.set_num_threads(1)
    data, model, settings = make()
    events = train(out, model, data, accelerator=None, engine="torch", **{"num_epochs": 2, **settings})
    evaluations = [event for event in events if event["event"] == "eval"]
    names = [[key for key in event if key[:4] in ("flow", "fixe") and not key.endswith("_se")] for event in evaluations]
    losses = [{key: event[key] for key in keys} for keys, event in zip(names, evaluations, strict=True)]
    return [*steps(events, "loss", "grad_norm", "band"), *losses]


@pytest.mark.parametrize("case", MAKES)
def test_a_task_has_its_recorded_losses(tmp_path: Path, case: str) -> None:
    expected = json.loads(GOLDEN.read_text(encoding="utf-8"))[case]
    measured = json.loads(json.dumps(measure(MAKES[case], tmp_path)))
    assert len(measured) == len(expected) > 2
    for row, recorded in zip(measured, expected, strict=True):
        pairs = [(row, recorded)] if isinstance(row, dict) else list(zip(row, recorded, strict=True))
        for value, known in pairs:
            assert value == pytest.approx(known, rel=TOLERANCE)


if __name__ == "__main__":
    assert sys.argv[1:] == ["--write"], __doc__
    with tempfile.TemporaryDirectory() as folder:
        rows = {case: measure(make, Path(folder, str(at))) for at, (case, make) in enumerate(MAKES.items())}
    GOLDEN.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
