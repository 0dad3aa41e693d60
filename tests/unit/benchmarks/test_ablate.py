"""The ablation table without training: rows, what is missing, how it is filled and printed; errors of means."""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sd3_light.config import UserError

TABLE = """
minutes = 4
tuned = "fast"
[draws]
raw = { weights = "raw" }
[rows.base]
draws = ["raw"]
[rows.fast]
set = ["optimizer.lr=2e-3"]
[rows.slow]
set = ["optimizer.lr=1e-4"]
[rows.split]
like = "tuned"
set = ["optimizer.split_modulation=true"]
[rows.grown]
like = "tuned"
against = ""
init = "base"
minutes = 10
"""


@pytest.fixture
def bench(scripts: SimpleNamespace, tmp_path: Path) -> SimpleNamespace:
    """A prepared folder with a table, and what its rows need."""
    (tmp_path / "bench.json").write_text(json.dumps({"hard": True, "side": 128, "num_prompts": 2}), encoding="utf-8")
    (tmp_path / "table.toml").write_text(TABLE, encoding="utf-8")
    table = scripts.ablate.read_table(tmp_path / "table.toml")

    def select(*rows: str, seeds: tuple[int, ...] = (1,), results: Any = (), best: int | None = None) -> list[Any]:
        args = argparse.Namespace(rows=rows or None, seeds=seeds, best=best, table="t", set=[], lane=False)
        return list(scripts.ablate.select(tmp_path, table, args, results))

    members = {**vars(scripts.ablations), **vars(scripts.ablate), "select": select}
    return SimpleNamespace(folder=tmp_path, table=table, **members)


def result(ablation: Any, right: str = "10", end: float = 0.5, **more: Any) -> dict[str, Any]:
    return {
        "row": ablation.row.name, "seed": ablation.seed, "recipe": ablation.recipe, "set": ablation.changes,
        "right": {"average": right}, "fixed": {"raw": 0.3, "ema": 0.2}, "minutes": 2.0, "lane_minutes": 3.0,
        "scores": [[50_000, end]], "samples": 200_000, **more,
    }  # fmt: skip


@pytest.fixture
def trained(bench: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the rows that are trained, by a stand-in."""
    names: list[str] = []

    def run(self: Any, deadline: float | None, keep: bool = False) -> dict[str, Any]:
        names.append(f"{self.row.name}-{self.seed}")
        self.run_folder.mkdir(parents=True, exist_ok=True)
        if keep:
            self.final.mkdir()
        return result(self)

    monkeypatch.setattr(bench.Ablation, "run", run)
    return names


def names(ablations: list[Any]) -> list[str]:
    return [f"{each.row.name}-{each.seed}" for each in ablations]


def test_rows_change_the_tuned_one_and_bring_what_they_need(bench: SimpleNamespace, tmp_path: Path) -> None:
    rows = bench.table.rows
    assert rows["split"].overrides == ("optimizer.lr=2e-3", "optimizer.split_modulation=true")
    assert [rows[name].against for name in rows] == [None, "base", "base", "fast", None]
    other = bench.read_table(bench.folder / "table.toml", tuned="slow").rows["split"]
    assert (other.overrides[0], other.against) == ("optimizer.lr=1e-4", "slow")
    (tmp_path / "loop.toml").write_text('[rows.a]\nlike = "b"\n[rows.b]\nlike = "a"\n', encoding="utf-8")
    with pytest.raises(UserError, match="no row 'a', or it is like itself"):
        bench.read_table(tmp_path / "loop.toml")
    expected = [f"{name}-{seed}" for seed in (1, 3) for name in ("base", "fast", "split")]
    assert names(bench.select("split", seeds=(1, 3))) == expected
    assert names(bench.select("grown")) == ["base-1", "grown-1"]
    assert names(bench.select("s*")) == ["base-1", "slow-1", "fast-1", "split-1"]
    with pytest.raises(UserError, match="has no row quick; it has base, fast"):
        bench.select("quick")
    base, fast, slow = bench.select("base", "fast", "slow")
    results = [result(base, "11", 0.2), result(fast, "00", 0.9), result(slow, "11", 0.1)]
    assert names(bench.select("base", "fast", "slow", results=results, best=1, seeds=(2,))) == ["base-2", "fast-2"]
    with pytest.raises(UserError, match="none of slow"):
        bench.select("fast", "slow", results=results[:2], best=1)


def test_a_table_is_filled_once_and_continued(bench: SimpleNamespace, trained: list[str]) -> None:
    file = bench.folder / "results.jsonl"
    assert bench.fill(bench.select("fast"), file, None) == []
    assert trained == ["base-1", "fast-1"]
    with open(file, "a", encoding="utf-8") as out:
        out.write('{"row": "slow", "seed"')  # the machine was lost here
    assert bench.fill(bench.select("fast", "slow"), file, None) == []
    assert trained == ["base-1", "fast-1", "slow-1"]
    assert [entry["row"] for entry in bench.read_results(file)] == ["base", "fast", "slow"]
    assert bench.fill(bench.select("fast", "slow"), file, None) == []
    assert len(trained) == 3


def test_a_changed_recipe_is_run_again(bench: SimpleNamespace, trained: list[str]) -> None:
    file = bench.folder / "results.jsonl"
    bench.fill(bench.select("base"), file, None)
    (bench.folder / "bench.json").write_text('{"hard": true, "side": 128, "num_prompts": 3}', encoding="utf-8")
    bench.fill(bench.select("base"), file, None)
    assert trained == ["base-1", "base-1"]
    assert len(bench.read_results(file)) == 1


def test_a_row_that_others_continue_trains_again_without_its_export(bench: SimpleNamespace, trained: list[str]) -> None:
    file = bench.folder / "results.jsonl"
    (base,) = bench.select("base")
    bench.keep_result(file, result(base))  # on another machine
    assert bench.fill([base], file, None) == []
    assert trained == []
    bench.fill(bench.select("grown"), file, None)
    assert trained == ["base-1", "grown-1"]
    base.final.rmdir()
    bench.fill(bench.select("grown"), file, None)
    assert len(trained) == 2  # nothing is missing that would continue it


def test_a_lane_waits_for_another(bench: SimpleNamespace, trained: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    base, grown = bench.select("grown")
    file = bench.folder / "results.jsonl"
    with bench.claimed(bench.folder, base.name):

        def other_lane_ends(seconds: float) -> None:
            base.final.mkdir(parents=True)
            bench.keep_result(file, result(base))

        monkeypatch.setattr(bench.time, "sleep", other_lane_ends)
        bench.fill([base, grown], file, None)
    assert trained == ["grown-1"]


def test_a_row_that_another_lane_trains_is_left_to_it(bench: SimpleNamespace, trained: list[str]) -> None:
    ablations = bench.select("fast")
    with bench.claimed(bench.folder, ablations[0].name):
        bench.fill(ablations, bench.folder / "results.jsonl", None)
    assert trained == ["fast-1"]


def test_a_row_that_fails_does_not_stop_the_others(bench: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(self: Any, deadline: float | None, keep: bool = False) -> dict[str, Any]:
        if self.row.name == "base":
            raise UserError("no such key")
        return result(self)

    monkeypatch.setattr(bench.Ablation, "run", run)
    failures = bench.fill(bench.select("fast", "grown"), bench.folder / "results.jsonl", None)
    assert [failure.split(": ")[1] for failure in failures] == ["no such key"]
    assert [entry["row"] for entry in bench.read_results(bench.folder / "results.jsonl")] == ["fast"]


@pytest.mark.parametrize("left", [-1.0, 60.0])
def test_a_row_that_the_deadline_cuts_is_not_kept(bench: SimpleNamespace, monkeypatch: Any, left: float) -> None:
    calls: list[float | None] = []
    stub: Callable[..., None] = lambda self, deadline, keep=False: calls.append(deadline)  # noqa: E731
    monkeypatch.setattr(bench.Ablation, "run", stub)
    deadline = time.monotonic() + left
    assert bench.fill(bench.select("fast"), bench.folder / "results.jsonl", deadline) == []
    assert calls == ([deadline] if left > 0 else [])
    assert bench.read_results(bench.folder / "results.jsonl") == []


def test_points_times_and_prompts_of_rows(bench: SimpleNamespace, scripts: SimpleNamespace) -> None:
    scores = [[50_000, 0.5], [100_000, 0.95], [150_000, 0.85]]
    assert bench.samples_to(0.9, scores) == "0.10"
    assert bench.samples_to(0.99, scores) == "-"
    assert bench.samples_to(0.9, [[50_000, 0.5], [550_000, 0.95]]) == "-"
    todo = bench.select("slow", "grown")  # base, slow, grown
    text = bench.estimate(todo, [], bench.table, 1, 10)
    assert text == "missing: 3 runs, 18 minutes in all, 18 with 1 lane: 2 slots of 10 minutes"
    text = bench.estimate(todo, [], bench.table, 3, 20)  # grown waits for base
    assert text == "missing: 3 runs, 18 minutes in all, 14 with 3 lanes: 1 slot of 20 minutes"
    (base,) = bench.select("base", seeds=(2,))
    text = bench.estimate(bench.select("slow", seeds=(1, 2))[:3], [result(base)], bench.table, 1, 20)
    assert text.startswith("missing: 3 runs, 9 minutes in all")  # the usual time of what finished
    assert bench.estimate([], [], bench.table, 1, 20) == "every row is done"
    for hard in (True, False):
        bench = scripts.world.Bench(hard=hard, side=128, num_prompts=256)
        curve = {prompt.text for prompt in bench.prompts}
        report = [prompt.text for prompt in bench.report_prompts]
        assert len(set(report)) == 512
        assert not curve & set(report)


def test_the_table_compares_rows_and_draws(bench: SimpleNamespace) -> None:
    base, fast = bench.select("fast")
    base_2, fast_2 = bench.select("fast", seeds=(2,))
    stale = bench.select("slow")[1]
    results = [
        result(base_2, "1000") | {"right": {"average": "1000", "raw": "1100"}},
        result(base, "0000") | {"right": {"average": "0000", "raw": "0100"}},
        result(fast, "1110"),
        result(fast_2, "1110", 0.95),
        result(stale) | {"set": ["optimizer.lr=5e-4"]},
    ]
    lines = bench.markdown(results, bench.table).splitlines()[2:]
    # differences of fast: 1 1 1 0 and 0 1 1 0; seed means 0.75 and 0.5
    assert lines == [
        "| base |  | 1, 2 | 0.000 / 0.250 |  |  |  | 0.2000 / 0.2000 | - / - | 2.0 / 2.0 |",
        "| base | drawn: raw | 1, 2 | 0.250 / 0.500 | +0.250 ± 0.250 | its average | undecided | | | |",
        "| fast |  | 1, 2 | 0.750 / 0.750 | +0.625 ± 0.239 | base | better | 0.2000 / 0.2000 | - / 0.05 | 2.0 / 2.0 |",
    ]


def test_gains_are_what_the_base_needs_for_the_same_score(bench: SimpleNamespace, tmp_path: Path) -> None:
    base, fast, slow = bench.select("base", "fast", "slow")
    (base_2,) = bench.select("base", seeds=(2,))
    curve = [[100_000, 0.5], [200_000, 1.0]]  # 0.9 at 180,000 of 400,000 samples
    facts = {"samples": 400_000, "minutes": 2.0}
    files = [tmp_path / "1.jsonl", tmp_path / "2.jsonl"]
    bench.keep_result(files[0], result(base, **facts | {"scores": curve}))
    bench.keep_result(files[0], result(base_2, **facts | {"scores": curve}))
    bench.keep_result(files[1], result(fast, **facts | {"scores": [[90_000, 0.9]], "minutes": 3.0}))
    bench.keep_result(files[1], result(slow, **facts | {"scores": [[400_000, 0.85]]}))
    entries = [entry for file in files for entry in bench.read_results(file)]
    assert bench.crossing(curve, 0.9) == pytest.approx(180_000)
    # 180,000 / 90,000 samples, and 0.9 / 0.675 minutes
    assert bench.gain_table(entries, bench.table, ["*"], 0.9).splitlines()[2:] == [
        "| fast | 1 | 0.900 | 1.000 | 2.00 | 1.33 |",
        "| slow | 1 | 0.850 | 1.000 | - | - |",
    ]
    assert "fast" not in bench.gain_table(entries, bench.table, ["sl*"], 0.9)


def test_gains_are_printed_without_training(bench: SimpleNamespace, monkeypatch: Any, capsys: Any) -> None:
    file = bench.folder / "kept.jsonl"
    for ablation, end in zip(bench.select("fast"), (0.5, 1.0), strict=True):
        bench.keep_result(file, result(ablation, end=end))
    words = ["ablate.py", bench.folder, "--table", bench.folder / "table.toml", "--gains", file, "--score", "0.5"]
    monkeypatch.setattr("sys.argv", [str(word) for word in words])
    bench.main()
    assert capsys.readouterr().out.splitlines()[2:] == ["| fast | 1 | 1.000 | 0.500 | 2.00 | 2.00 |"]
    assert not (bench.folder / "runs").exists()


def test_differences_of_seeds_have_their_errors(scripts: SimpleNamespace) -> None:
    table = scripts.ablations.differences({1: [True, True], 3: [False, False]}, {3: [True, False], 2: [True, True]})
    assert table.tolist() == [[-1.0, 0.0]]
    assert scripts.ablations.compare(scripts.ablations.differences({1: [True, True]}, {2: [True, True]})) is None
    table = np.array([[1.0, 0.0, 0.0, 0.0]])  # variance 1/4 over 4 prompts
    alone, pooled = scripts.ablations.compare(table), scripts.ablations.compare(table, 0.01)
    assert (alone.mean, alone.error, alone.verdict) == (0.25, None, "undecided")
    assert pooled.error == pytest.approx((0.01 + 0.25 / 4) ** 0.5)
    assert scripts.ablations.compare(np.ones((1, 4)), 0.0).verdict == "undecided"
    table = np.array([[1.0, 0.0, 0.0, 0.0]] * 3)
    assert scripts.ablations.seed_variance(table) == pytest.approx(0.0)
    assert scripts.ablations.compare(table).error == pytest.approx((0.25 / 4) ** 0.5)
    table = np.array([[1.0] * 8, [0.0] * 8])
    assert scripts.ablations.seed_variance(table) == pytest.approx(0.5)
    found = scripts.ablations.compare(table)
    assert (found.mean, found.error, found.seeds) == (0.5, pytest.approx(0.5), 2)
    agreeing, differing = np.array([[1.0, 0.0] * 50] * 2), np.array([[1.0] * 8, [0.0] * 8, [0.0] * 8])
    pooled = scripts.ablations.pooled_seed_variance([agreeing, differing, np.ones((1, 4))])
    assert pooled == pytest.approx((0 * 1 + 1 / 3 * 2) / 3)
    assert scripts.ablations.compare(agreeing).verdict == "better"
    assert scripts.ablations.compare(agreeing, pooled).verdict == "undecided"
    assert scripts.ablations.pooled_seed_variance([np.ones((1, 4))]) is None


@pytest.mark.parametrize(
    ("mean", "error", "seeds", "verdict"),
    [
        (0.20, 0.1, 2, "better"),
        (-0.20, 0.1, 2, "worse"),
        (0.19, 0.1, 2, "undecided"),
        (0.9, 0.1, 1, "undecided"),
        (0.0, 0.0, 3, "undecided"),
        (0.9, None, 2, "undecided"),
    ],
)
def test_a_verdict_needs_two_seeds(scripts: Any, mean: float, error: float | None, seeds: int, verdict: str) -> None:
    assert scripts.ablations.Difference(mean, error, seeds).verdict == verdict


def test_the_error_is_the_spread_of_repeated_experiments(scripts: SimpleNamespace) -> None:
    rng = np.random.default_rng(0)
    means, errors = [], []
    for _ in range(400):
        seeds, prompts = rng.normal(0, 0.05, (4, 1)), rng.normal(0, 0.3, (1, 100))
        found = scripts.ablations.compare(seeds + prompts + rng.normal(0, 0.4, (4, 100)))
        means.append(found.mean)
        errors.append(found.error**2)
    assert np.mean(errors) == pytest.approx(np.var(means), rel=0.15)
    assert np.mean(errors) == pytest.approx(0.05**2 / 4 + 0.3**2 / 100 + 0.4**2 / 400, rel=0.1)


def test_means_shares_and_steps(scripts: SimpleNamespace) -> None:
    assert scripts.basics.spread([0.5, 0.7], 2) == "0.60 ±0.10"
    assert scripts.basics.spread([1.0], 3) == "1.000"
    assert scripts.basics.percent([0.5, 0.7], 100) == "60.0 ± 10.0"
    assert scripts.basics.percent([0.5], 100) == "50.0 ± 5.0"
    fit = scripts.basics.steps_that_fit
    assert fit(lambda steps: 5 + 0.5 * steps, (4, 20), 1.0) == 120
    assert fit(lambda steps: 5 + 0.5 * steps, (4, 20), 0.0) == 20, "those that were run"
