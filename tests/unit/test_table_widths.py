"""Every table of the package, at widths from 20 to 200 columns: no number is cut, folded or left out."""

import io
import json
import re
from collections import Counter
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from rich.console import Console, RenderableType

from sd3_light import journeys
from sd3_light.cache.freshness import CacheState, render_state
from sd3_light.check import verb as check
from sd3_light.check.conclusion import Target, conclude
from sd3_light.cli import model_verbs
from sd3_light.cli.families_verb import families
from sd3_light.data.manifest import Manifest, ShardEntry
from sd3_light.evaluate.against import COLUMNS, Measured
from sd3_light.evaluate.comparison import Estimate, Scores
from sd3_light.evaluate.composition import DEMANDS, CompositionScore
from sd3_light.evaluate.distances import METRICS
from sd3_light.export.hub import UploadFile
from sd3_light.formats import byte_size
from sd3_light.report import verb as report
from sd3_light.report.inspect import verb as inspect
from sd3_light.report.inspect.cache_stats import Inspection, ShardStats
from sd3_light.runlog import print_table, show
from tests.fake_project import PRETRAIN

WIDTHS = (20, 27, 40, 60, 72, 80, 100, 120, 200)
NUMBER = re.compile(r"\d(?:[\d.,]*\d)?")
PACKAGE = Path(__file__).parents[2] / "sd3_light"


def evaluation() -> RenderableType:
    """The table of `evaluate --against`, with the values that were cut at 80 columns."""
    values = (Estimate(0.0118, 0.00815, 0.0155), Estimate(0.0465, 0.0416, 0.0514), Estimate(123.456, 9.87, 1250))
    run = "runs/a_long_name_of_a_run/exports/step-012345"
    names = ("true images", "training image, nearest caption, same folder", run)
    scores = [Scores(tuple(range(1000)), dict.fromkeys((*METRICS, *COLUMNS), value)) for value in values]
    return Measured(cast(Any, range(1000)), 100, dict(zip(names, scores, strict=True))).table()


def state() -> RenderableType:
    folder = Path("/data/projects/2026-01/icons_data.cache")
    table = CacheState(folder, [], 1_234_567, 395, 1_000, 2_049, [Path("a")] * 12, 98_765_432_109, ["shard-00017"])
    table.causes.update({"the caption changed": 277, "unchanged, but its shard has other samples or settings": 118})
    return render_state(table)


def composition() -> RenderableType:
    rates = {demand: 0.01 * number for number, demand in enumerate(DEMANDS, 87)}
    score = SimpleNamespace(num_prompts=1_096, rates=rates, by_kind={"single": {"colour": 0.935}})
    pretrained = "pretrained here from random weights: 1,234,567 samples"
    names = ("untrained: random weights", pretrained, "runs/b/step-000451")
    return journeys.score_table({name: cast(CompositionScore, score) for name in names})


def validation(monkeypatch: pytest.MonkeyPatch) -> RenderableType:
    losses = {f"held_out_{number}": {"flow": 0.51234 + number, "flow@0.25": 12.34567} for number in range(3)}
    monkeypatch.setattr(journeys, "check", SimpleNamespace(require=lambda *_: None))
    monkeypatch.setattr(journeys, "cache", SimpleNamespace(run=lambda *_: None))
    stage = SimpleNamespace(require_eval_sets=lambda *_: None, validation_losses=lambda *_: losses)
    monkeypatch.setattr(journeys, "evaluate", stage)
    return journeys.cache_then_validate(cast(Any, None), Path("runs/a/exports/step-000451"), cast(Any, None))


def run_report(tmp_path: Path) -> RenderableType:
    begin = {"event": "begin", "time": 1.8e9, "trains": "all 123,456,789 weights"}
    step = {"event": "step", "skipped": 17, "samples_per_second": 1234.56, "data_wait": 0.12, "mfu": 0.4321}
    steps = [{**step, "time": 1.8e9 + n, "step": n, "samples": 64_000 * n, "loss": 0.5 + 1 / n} for n in range(1, 99)]
    path = "/data/projects/2026-01/runs/a/checkpoints/step-000098"
    events = [begin, *steps, {"event": "checkpoint", "time": 1.8e9 + 99, "step": 98, "file": path}]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return report.render(report.run(tmp_path))


def cache_content() -> RenderableType:
    sides = [(f"s{n}", f"{64 * n}x{2048 - 64 * n}", (64, 64), "images-0", 123_456 * n) for n in range(1, 20)]
    shards = tuple(ShardEntry(*values, 987_654_321, "0", "f") for values in sides)
    counts = {"used": 1_234_567, "cropped": 98_765, "rejected: truncated": 12_345, "rejected: no_caption": 1}
    places = {"diffusers_path": "/models/sd3.5/medium", "directory:images-0": "/data/2026-01/images"}
    manifest = Manifest({"text_tokens": "real", "t5_max_length": 256}, shards, shards[0], counts, places)
    tokens = {"clip_l": Counter({9: 12_345, 12: 1}), "t5": Counter({9: 12_345, 123: 4})}
    stats = ShardStats(Counter({7: 12_345, 77: 12}), tokens, Counter({1: 12_345}), Counter({"images": 9}))
    stats.examples += [
        "1,234 small stars and 3.14159 moons",
        "三只红色的猫坐在一张很长很长的木头长凳上看着月亮，12 颗星星",
    ]
    return inspect.render(Inspection(Path("/data/projects/2026-01/icons_data.cache"), manifest, stats))


def estimate(files: Any) -> RenderableType:
    for number in range(5):
        files.image(f"square{number}.png", 80, 80)
    files.image("wide_12345.png", 40, 20)
    files.image("wide_without_caption.png", 40, 20, caption=None)
    loaded = files.load(model=PRETRAIN, top="max_steps = 1234567")
    estimated = check.run(loaded)
    return check.render(estimated, conclude(loaded.train, estimated, Target(on_cpu=False)), explain=True)


def upload() -> RenderableType:
    files = [
        UploadFile("transformer/diffusion_pytorch_model-00001-of-00002.safetensors", 12_345_678_901, change="new"),
        UploadFile("README.md", 4321, change="changed"),
        UploadFile("samples/step-00012345.png", 98_765, change="new"),
    ]
    rows = [(file.name, byte_size(file.size), file.change) for file in files]
    return model_verbs._table("files", ("file", "size", "on the hub"), rows)


TABLES = (evaluation, state, composition, validation, run_report, cache_content, estimate, upload)


@pytest.fixture(params=TABLES, ids=lambda make: make.__name__)
def table(request: pytest.FixtureRequest) -> RenderableType:
    make = request.param
    return cast(RenderableType, make(*map(request.getfixturevalue, signature(make).parameters)))


def printed(table: RenderableType, width: int, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> str:
    """Print the table as the commands do, into a pipe."""
    monkeypatch.setenv("COLUMNS", str(width))
    print_table(table)
    return str(capsys.readouterr().out)


def test_every_number_is_whole_at_every_width(table: RenderableType, monkeypatch: Any, capsys: Any) -> None:
    whole = Counter(NUMBER.findall(printed(table, 1000, monkeypatch, capsys)))
    assert len(whole) > 5
    for width in WIDTHS:
        text = printed(table, width, monkeypatch, capsys)
        numbers = Counter(NUMBER.findall(text))
        assert set(numbers) == set(whole), width
        assert numbers >= whole, width
        assert "…" not in text
        # a title may have a word that is longer than the terminal; `check` starts with a line to copy
        lines = [line for line in text.splitlines() if len(line) > width and len(line.split()) > 1]
        assert all("no faults" in line for line in lines), width


def test_the_table_of_an_evaluation_is_a_table_at_80_columns(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    lines = printed(evaluation(), 80, monkeypatch, capsys).splitlines()
    rows = [line.split() for line in lines]
    assert ["true", "images", *["0.0118"] * 6] in rows
    assert [*["[0.00815,"] * 6] in rows
    assert [*["0.0155]"] * 6] in rows
    assert all(len(line) <= 80 for line in lines)


def test_tables_on_stderr_are_not_cut(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    screen = io.StringIO()
    monkeypatch.setattr("sd3_light.runlog.console.console", Console(file=screen, width=20))
    monkeypatch.setattr("sd3_light.runlog.console._main_process", True)
    show(state())
    assert "1,234,567" in screen.getvalue()
    assert "98.765 GB" in " ".join(screen.getvalue().split())
    # it has words in place of numbers.
    for width in (1000, *WIDTHS):
        monkeypatch.setenv("COLUMNS", str(width))
        families(as_json=False)
        text = capsys.readouterr().out
        assert "…" not in text
        assert "Flux" in text


def test_no_module_prints_a_table_of_rich() -> None:
    """rich cuts cells that do not fit: every table is a `ResultTable`, which the tests above print."""
    tables = [
        file.relative_to(PACKAGE)
        for file in PACKAGE.rglob("*.py")
        if re.search(r"from rich\.table import .*\bTable\b|rich\.table\.Table", file.read_text(encoding="utf-8"))
    ]
    assert tables == [Path("runlog/tables.py")]
    makers = re.findall(r"ResultTable\(", "".join(file.read_text("utf-8") for file in PACKAGE.rglob("*.py")))
    assert len(makers) == 11, "a new table: add it to TABLES"
