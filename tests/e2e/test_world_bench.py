"""The ablation bench and the speedrun at toy size: prepared once, cut and resumed, scored and tabulated."""

import importlib
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sd3_light.checkpoint.store import checkpoint_name
from sd3_light.config import UserError
from sd3_light.config.faults import Stopped
from sd3_light.families.sd3.start import configured_size
from sd3_light.runlog import read_log

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
TABLE = """
[rows.base]
about = "as it is"
[rows.shift]
about = "another shift"
set = ["model.shift=1.0"]
"""
TOY = [
    *("model.size=tiny2", "max_steps=4", "micro_batch_size_per_gpu=4", "warmup_steps=1", "eval_every_n_steps=4"),
    *("sampling.every_n_steps=2", "sampling.steps=1", "num_dataloader_workers=0", "logging_steps=1"),
]


@pytest.fixture(scope="module")
def scripts() -> Iterator[SimpleNamespace]:
    """The bench's modules."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        names = ("world_prepare", "ablate", "common.world")
        yield SimpleNamespace(**{name.removeprefix("common."): importlib.import_module(name) for name in names})


@pytest.fixture(scope="module")
def bench(scripts: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """The bench's modules, and a prepared folder of a few images of the demo's scenes."""
    folder = tmp_path_factory.mktemp("bench")
    options = ["--scenes", "simple", "--side", "64", "--images", "8", "--prompts", "3", "--report", "4"]
    call(scripts.world_prepare, folder, *options, "--processes", "1", "--check", "2")
    (folder / "table.toml").write_text(TABLE, encoding="utf-8")
    return SimpleNamespace(folder=folder, **vars(scripts))


def call(module: Any, *arguments: object) -> None:
    """Run a script's main with arguments."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [module.__file__, *map(str, arguments)])
        module.main()


def _ablate(bench: SimpleNamespace, *arguments: object) -> None:
    toy = [word for change in TOY for word in ("--set", change)]
    call(bench.ablate, bench.folder, "--table", bench.folder / "table.toml", *toy, *arguments)


def _results(bench: SimpleNamespace) -> list[dict[str, Any]]:
    lines = (bench.folder / "results.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.slow
def test_a_prepared_folder_reports_its_vae(bench: SimpleNamespace) -> None:
    quality = json.loads((bench.folder / "vae.json").read_text(encoding="utf-8"))
    assert quality["judged_right"] == 1.0
    assert quality["psnr_db"] > 30
    encoders = bench.world.text_encoders(bench.folder)
    assert "predict the fields of the scene (sha256" in encoders["text_encoder"]
    assert "random weights" in encoders["text_encoder_3"]
    assert {path.name for path in bench.folder.glob("cache*")} >= {"cache", "cache-real", "cache-eval-held_out"}


@pytest.mark.slow
def test_hard_scenes_get_parts_from_the_stage(scripts: SimpleNamespace, tmp_path: Path) -> None:
    options = ["--scenes", "hard", "--side", "64", "--images", "16", "--prompts", "3", "--vae-seconds", "0.1"]
    options += ["--processes", "1", "--check", "2", "--caches", "padded"]
    call(scripts.world_prepare, tmp_path / "first", *options)
    made = json.loads((tmp_path / "first" / "model" / "text_encoder" / "made.json").read_text(encoding="utf-8"))
    assert made["random"] is True
    encoders = scripts.world.text_encoders(tmp_path / "first")
    assert len(encoders) == 3
    assert all("random weights, not trained (sha256" in stated for stated in encoders.values())
    assert (tmp_path / "first" / "cache").is_dir()
    call(scripts.world_prepare, tmp_path / "second", *options, "--parts", tmp_path / "first" / "model")
    vae = Path("vae") / "diffusion_pytorch_model.safetensors"
    first, second = (tmp_path / name / "model" for name in ("first", "second"))
    assert (first / vae).read_bytes() == (second / vae).read_bytes()
    assert not (second / "training").exists()


@pytest.mark.slow
def test_a_table_is_filled_over_several_commands(bench: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    original, scored = bench.world.ScoredRun._score, []

    def score_and_cut(self: Any, progress: Any, *rest: Any) -> None:
        original(self, progress, *rest)
        scored.append((self.folder.name, progress.step))
        if len(scored) == 1:
            self._stop()  # as the timer of --minutes does

    monkeypatch.setattr(bench.world.ScoredRun, "_score", score_and_cut)
    monkeypatch.setattr("sd3_light.checkpoint.requests.FILE_CHECK_SECONDS", 0.0)
    _ablate(bench, "--rows", "base", "--seeds", 1)
    (cut,) = (bench.folder / "runs").glob("base-1-*/checkpoints")
    assert not (bench.folder / "results.jsonl").exists()
    first_step = json.loads((cut.parent / "scores.jsonl").read_text().splitlines()[0])["step"]
    assert first_step == 2

    _ablate(bench)
    results = _results(bench)
    assert [(entry["row"], entry["seed"]) for entry in results] == [
        ("base", 1),
        ("shift", 1),
        ("base", 2),
        ("shift", 2),
    ]
    for entry in results:
        assert [samples for samples, _ in entry["scores"]] == [8, 16]
        assert entry["samples"] == 16
        assert set(entry["fixed"]) == {"raw", "ema"}
        assert set(entry["right"]) == {"average"}
        assert len(entry["right"]["average"]) == 4
    resumed = [event for event in read_log(cut.parent / "log.jsonl") if event["event"] == "resume"]
    assert len(resumed) == 1
    assert resumed[0]["step"] in (2, 3)
    assert not cut.exists()  # deleted once the result is written
    assert not (cut.parent / "exports").exists()
    assert len({entry["fixed"]["ema"] for entry in results}) == 4  # rows and seeds differ

    before = len(scored)
    _ablate(bench)
    assert len(scored) == before  # all rows are done
    assert _results(bench) == results


@pytest.mark.slow
def test_a_trained_row_is_drawn_with_other_weights(bench: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    ablate = bench.ablate
    row = ablate.read_table(BENCHMARKS / "ablations.toml").rows["averages"]
    assert {"raw", "short", "medium", "sampler-shift-1"} <= set(dict(row.draws))
    draws = (*row.draws, ("length 0.04", ablate.Draw(ema_length=0.04)))
    ablation = ablate.Ablation(bench.folder, replace(row, draws=draws), 1, tuple(TOY))
    toy = replace(ablation, row=replace(ablation.row, overrides=(*row.overrides, *TOY)))
    drawn = []

    def draw(pipe: Any, requests: Any, *rest: Any) -> Any:
        weight = next(pipe.transformer.parameters()).detach().flatten()[:64].clone()
        drawn.append((pipe.scheduler.config.shift, weight, [request.seed for request in requests]))
        return original(pipe, requests, *rest)

    original = ablate.generate
    monkeypatch.setattr(ablate, "generate", draw)
    result = toy.run(None, keep=True)
    assert set(result["fixed"]) == {"raw", "ema", "short", "medium"}
    assert set(result["right"]) == {"average", *dict(draws)}
    shifts = dict(zip(result["right"], (shift for shift, _, _ in drawn), strict=True))
    assert shifts == {**dict.fromkeys(result["right"], 3.0), "sampler-shift-1": 1.0, "sampler-shift-6": 6.0}
    weights = dict(zip(result["right"], (weight for _, weight, _ in drawn), strict=True))
    assert weights["average"].equal(weights["sampler-shift-6"])
    others = [weights[name] for name in ("raw", "short", "medium", "length 0.04")]
    assert not any(weights["average"].equal(other) for other in others)
    assert all(seeds == [0, 1, 2, 3] for _, _, seeds in drawn)
    assert (toy.final / "model_index.json").is_file()
    assert not (toy.run_folder / "drawn").exists()
    again = toy.run(None)  # a command that was ended while it drew
    assert again["right"] == result["right"]
    assert again["samples"] == 16


@pytest.mark.slow
def test_lanes_share_the_rows_and_the_table(bench: SimpleNamespace, tmp_path: Path) -> None:
    results = tmp_path / "out" / "results.jsonl"
    _ablate(bench, "--seeds", 7, 8, "--rows", "shift", "--lanes", 2, "--minutes", 8, "--results", results)
    lines = [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]
    names = ("base", "shift")
    assert sorted((entry["row"], entry["seed"]) for entry in lines) == [(n, s) for n in names for s in (7, 8)]
    assert "| shift | another shift | 7, 8 |" in (tmp_path / "out" / "table.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(("side", "batch"), [(64, 512), (128, 512), (256, 128), (512, 32)])
def test_the_caching_batch_fits_the_side(
    scripts: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, side: int, batch: int
) -> None:
    prepare, loaded = scripts.world_prepare, []
    bench = scripts.world.Bench(hard=False, side=side, num_prompts=1)
    (tmp_path / "bench.json").write_text(json.dumps(vars(bench)), encoding="utf-8")
    prepare.draw_images(tmp_path, bench, 1, 1)
    prepare.make_parts(tmp_path, bench, None, 0)
    monkeypatch.setattr(prepare.cache, "run", loaded.append)
    prepare.build_cache(tmp_path, (), 1)
    assert [config.train.caching_batch_size for config in loaded] == [batch]
    assert configured_size(loaded[0].train.model).width == 256


@pytest.mark.slow
def test_the_shipped_table_is_valid(bench: SimpleNamespace) -> None:
    rows = bench.ablate.read_table(BENCHMARKS / "ablations.toml").rows
    configs = {name: bench.world.load(bench.folder, row.overrides).train for name, row in rows.items()}
    samples: dict[int | None, set[int]] = {}
    recipes = set()
    for name, config in configs.items():
        row = rows[name]
        samples.setdefault(row.side, set()).add(config.max_steps * config.micro_batch_size_per_gpu)
        assert config.sampling.every_n_steps * config.micro_batch_size_per_gpu <= 50_000, name
        assert config.max_steps % config.eval_every_n_steps == 0
        recipes.add((config.model_dump_json(), row.side, row.init))
        assert row.init is None or config.model.shape == configs[row.init].model.shape
    assert all(len(counts) == 1 for counts in samples.values())
    assert len(recipes) == len(rows)
    rates = [name for name in rows if name == "base" or name.startswith("rate-")]
    settings = {(c.optimizer.type, c.optimizer.lr, c.lr_scheduler) for c in map(configs.__getitem__, rates)}
    assert len(settings) == len(rates) == 12


@pytest.mark.slow
def test_unknown_rows_and_folders_are_one_line(bench: SimpleNamespace, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"error: .* has no row nothing; it has base, shift"):
        _ablate(bench, "--rows", "nothing")
    with pytest.raises(SystemExit, match=r"was prepared as Bench\(hard=False, side=64, num_prompts=3, num_report=4\)"):
        call(bench.world_prepare, bench.folder, "--scenes", "hard", "--processes", "1")
    with pytest.raises(UserError, match="prepare it with"):
        bench.world.Bench.read(tmp_path)


@pytest.mark.slow
def test_a_signal_keeps_the_time_so_far(bench: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: Any, **__: Any) -> None:
        time.sleep(0.02)
        raise Stopped("SIGTERM")

    loaded = bench.world.load(bench.folder, [*TOY, 'output_dir="runs/signal"'])
    loaded.train.output_dir.mkdir(parents=True)
    monkeypatch.setattr(bench.world.train, "run", stop)
    monkeypatch.setattr(bench.world, "newest_usable", lambda folder, remedy: folder / checkpoint_name(7))
    times = []
    for _ in range(2):
        run = bench.world.ScoredRun(loaded, ())
        with pytest.raises(Stopped):
            run.run()
        times.append(run.seconds)
    assert times[1] >= times[0] + 0.02 >= 0.04


@pytest.mark.slow
def test_a_speedrun_stops_at_its_target(
    bench: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rates = iter((0.25, 1.0))
    monkeypatch.setattr("sd3_light.evaluate.composition._rates", lambda verdicts: {"all": next(rates)})
    monkeypatch.setattr("sd3_light.checkpoint.requests.FILE_CHECK_SECONDS", 0.0)
    _ablate(bench, "--speedrun", "toy", "--set", "max_steps=50")
    record = json.loads((bench.folder / "records.jsonl").read_text(encoding="utf-8"))
    assert (record["right"], record["steps"], record["samples"]) == (1.0, 4, 16)
    assert 0 < record["minutes"] < 10
    assert "max_steps = 50" in record["recipe"]
    assert record["num_report"] == 4
    assert 0 <= record["reported"] <= 1
    assert record["text_encoders"] == bench.world.text_encoders(bench.folder)
    assert "`text_encoder_3`: random weights, not trained | " in capsys.readouterr().out.splitlines()[-1]
