"""Which checkpoint a run resumes from, and what happens to later ones."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sd3_light.checkpoint.reading import open_checkpoint
from sd3_light.checkpoint.store import checkpoint_name, keep_newest
from sd3_light.config import EmaConfig, load_config, resolved_toml
from sd3_light.config.faults import UserError
from sd3_light.data.order import Segment, build_order
from sd3_light.engines.feed import order_facts
from sd3_light.engines.protocol import TensorPiece
from sd3_light.optim.ema import Averages
from sd3_light.train.resume import (
    Resume,
    _difference,
    _must_differ,
    _remedy,
    changed_keys,
    choose_checkpoint,
    load_checkpoint,
)
from tests.checkpoints import write_checkpoint

MODEL = '[model]\ndiffusers_path = "folder"\ntrain_type = "sd3_light_pretrain"\n'


def write_run(folder: Path, *steps: int) -> Path:
    for step in steps:
        write_checkpoint(folder / "checkpoints", step, {"param/w": torch.full((2,), float(step))}, {"step": step})
        for kind in ("ema", "exports"):
            (folder / kind / checkpoint_name(step)).mkdir(parents=True)
            (folder / kind / checkpoint_name(step) / "content").write_text(str(step))
    return folder


def names(folder: Path, kind: str = "checkpoints") -> list[str]:
    return sorted(path.name for path in (folder / kind).iterdir())


def at(folder: Path, step: int, prefix: str = "") -> Path:
    return folder / "checkpoints" / f"{prefix}{checkpoint_name(step)}"


def test_an_earlier_one_sets_aside_the_later_in_every_folder(tmp_path: Path) -> None:
    """Abandoned averages must not be mixed with new ones, and abandoned exports must not look like the newest."""
    run = write_run(tmp_path, 1, 2, 3)
    assert choose_checkpoint(run, Resume()) == at(run, 3)
    for kind in ("checkpoints", "ema", "exports"):
        assert names(run, kind) == ["step-00000001", "step-00000002", "step-00000003"], "nothing moves"
    assert choose_checkpoint(run, Resume(at(run, 1))) == at(run, 1)
    for kind in ("checkpoints", "ema", "exports"):
        assert names(run, kind) == ["abandoned-step-00000002", "abandoned-step-00000003", "step-00000001"]
    assert choose_checkpoint(run, Resume()) == at(run, 1)
    # a new run sets aside what one wrote that was killed before its first checkpoint
    (tmp_path / "new" / "exports" / checkpoint_name(4)).mkdir(parents=True)
    assert choose_checkpoint(tmp_path / "new", Resume()) is None
    assert names(tmp_path / "new", "exports") == ["abandoned-step-00000004"]


def test_abandoned_saves_are_reported_and_not_deleted(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path, 1, 2)
    choose_checkpoint(run, Resume(at(run, 1)))
    write_run(tmp_path / "again", 2)
    (tmp_path / "again" / "checkpoints" / checkpoint_name(2)).rename(at(run, 2))
    choose_checkpoint(run, Resume(at(run, 1)))
    assert names(run) == ["abandoned-step-00000002", "abandoned-step-00000002.again", "step-00000001"]
    line = capfd.readouterr().err.splitlines()[-1]
    assert line.startswith("4 abandoned checkpoints, snapshots and exports take 0.00 GB")
    assert line.endswith(f"rm -r {run}/*/abandoned-step-*")
    assert choose_checkpoint(run, Resume()) == at(run, 1)
    assert "4 abandoned" in capfd.readouterr().err, "at every start"
    write_run(tmp_path / "third", 2)
    (tmp_path / "third" / "checkpoints" / checkpoint_name(2)).rename(at(run, 2))
    chosen = at(run, 2, "abandoned-")
    assert choose_checkpoint(run, Resume(chosen)) == chosen, "one of them can be resumed"
    assert chosen.is_dir()
    assert at(run, 1).is_dir(), "earlier ones stay"
    assert not at(run, 2).exists(), "the other one of the same step is set aside"


def test_a_run_that_has_passed_them_deletes_them(tmp_path: Path) -> None:
    """They are pruned like its own: when there are enough newer ones."""
    run = write_run(tmp_path, 1, 2, 3, 4)
    choose_checkpoint(run, Resume(at(run, 1)))
    folder = run / "checkpoints"
    write_checkpoint(folder, 3, {"param/w": torch.zeros(2)}, {})
    keep_newest(folder, 2, at(run, 3))
    assert names(run) == [*(f"abandoned-{checkpoint_name(step)}" for step in (2, 3, 4)), *map(checkpoint_name, (1, 3))]
    write_checkpoint(folder, 5, {"param/w": torch.zeros(2)}, {})
    assert keep_newest(folder, 0) == []
    keep_newest(folder, 2, at(run, 5))
    assert names(run) == ["abandoned-step-00000004", checkpoint_name(3), checkpoint_name(5)]
    at(run, 4, "abandoned-").rename(folder / ".abandoned-step-00000004.gone")
    assert choose_checkpoint(run, Resume()) == at(run, 5)
    assert names(run) == [checkpoint_name(3), checkpoint_name(5)], "an interrupted deletion is finished"


def damage(run: Path, step: int) -> Path:
    """Cut 9 bytes off the rank file of a checkpoint."""
    file = at(run, step) / "rank-00000.safetensors"
    with open(file, "ab") as opened:
        opened.truncate(file.stat().st_size - 9)
    return at(run, step)


def listing(folder: Path) -> list[tuple[str, bytes]]:
    return [(str(path), path.read_bytes()) for path in sorted(folder.rglob("*")) if path.is_file()]


@pytest.mark.parametrize("resume", [None, Resume()], ids=["plain", "resume"])
def test_a_damaged_only_checkpoint_stops_the_run_and_stays(tmp_path: Path, resume: Resume | None) -> None:
    """Starting from the beginning would lose the training so far, and then delete what could be repaired."""
    run = write_run(tmp_path, 1, 2)
    for step in (1, 2):
        damage(run, step)
    (run / "checkpoints" / ".step-00000003.tmp").mkdir()
    (run / "checkpoints" / ".step-00000003.tmp" / "rank-00000.safetensors").write_bytes(b"an interrupted save")
    before = listing(run)
    with pytest.raises(UserError, match=r"step-00000001 \(rank-.* bytes\), step-00000002 \(rank") as error:
        choose_checkpoint(run, resume)
    assert "--restart" in str(error.value)
    assert "--resume-from" in str(error.value)
    assert "\n" not in str(error.value)
    assert listing(run) == before


def test_a_restart_sets_everything_aside(tmp_path: Path) -> None:
    run = write_run(tmp_path, 1, 2)
    damage(run, 2)
    assert choose_checkpoint(run, Resume(restart=True)) is None
    for kind in ("checkpoints", "ema", "exports"):
        assert names(run, kind) == ["abandoned-step-00000001", "abandoned-step-00000002"]


def test_a_damaged_checkpoint_is_named_and_never_deleted(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path, 1, 2)
    damaged = damage(run, 2)
    assert choose_checkpoint(run, Resume()) == at(run, 1)
    assert f"ignoring {damaged}: it is damaged (rank-00000.safetensors has " in capfd.readouterr().err
    write_checkpoint(run / "checkpoints", 3, {"param/w": torch.zeros(2)}, {})
    keep_newest(run / "checkpoints", 1, at(run, 3))
    assert names(run) == ["abandoned-step-00000002", "step-00000003"]
    at(run, 3).rename(run / "checkpoints" / ".step-00000003.old")
    assert choose_checkpoint(run, Resume()) == at(run, 3), "one that was being replaced counts"


def test_checkpoints_of_other_runs_and_orders_are_compared(tmp_path: Path) -> None:
    run, other = write_run(tmp_path / "one", 5), write_run(tmp_path / "other", 2)
    with pytest.raises(UserError, match=r"one holds another run \(step-00000005\) than .*other"):
        choose_checkpoint(run, Resume(at(other, 2)))
    assert choose_checkpoint(tmp_path / "new", Resume(at(other, 2))) == at(other, 2)
    run, copy = write_run(tmp_path / "run", 2), write_run(tmp_path / "copy", 1)
    damage(run, 2)
    assert choose_checkpoint(run, Resume(at(copy, 1))) == at(copy, 1)
    assert names(run) == ["abandoned-step-00000002"], "set aside, not deleted"
    order = {"seed": 1, "buckets": [[4, 16, 40, 10, "ab"]]}
    assert _difference(order, {**order, "seed": 2}) == "seed 1, now 2"
    assert _difference(order, {"seed": 1, "buckets": []}) == "1 buckets, now 0"
    assert _difference(order, {"seed": 1, "buckets": [[2, 16, 40, 20, "ab"]]}) == "global batch of bucket 0: 4, now 2"
    assert _difference(order, {"seed": 1, "buckets": [[4, 16, 40, 10, "cd"]]}) == "shards of bucket 0: ab, now cd"


class OneWeight:
    """An engine of one weight, which starts at zero."""

    shapes: Mapping[str, Any] = {"w": (2,)}

    def __init__(self) -> None:
        self.weights = {"w": torch.zeros(2)}

    def pieces(self) -> Iterator[TensorPiece]:
        return self.like_weights("param", self.weights)

    def like_weights(self, kind: str, held: Mapping[str, Tensor]) -> Iterator[TensorPiece]:
        yield TensorPiece(f"{kind}/w", held["w"], 0, (2,))


def test_keys_that_differ_from_the_resumed_run_are_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "train.toml"
    for path, text in {config: "", tmp_path / "other.toml": "seed = 7\nlogging_steps = 3\n"}.items():
        top = 'output_dir = "run"\ndataset = "data.toml"\nepochs = 1\nsave_every_n_steps = 5\n'
        path.write_text(f"{top}{text}{MODEL}", encoding="utf-8")
    (tmp_path / "data.toml").write_text('resolutions = [64]\n[[directory]]\npath = "images"\n', encoding="utf-8")
    order = build_order(0, [([Segment(8, 1.0)], 4)])
    facts = {"order": order_facts(order), "progress": {"step": 3, "samples": 12, "skipped": 0, "position": 3}}
    folder = tmp_path / "run" / "checkpoints"
    weights = {"param/w": torch.tensor([5.0, 7.0])}
    saved = open_checkpoint(write_checkpoint(folder, 3, weights, {**facts, "window": None}))
    other = load_config(tmp_path / "other.toml")
    assert changed_keys(other, saved) == [], "a checkpoint without its run"
    (tmp_path / "run" / "config.toml").write_text(resolved_toml(load_config(config)), encoding="utf-8")
    assert changed_keys(load_config(config), saved) == []
    changes = changed_keys(other, saved)
    assert changes == ["logging_steps = 3 (was 1)", "seed = 7 (was 0)"]
    engine: Any = OneWeight()
    averages = Averages(engine.weights, EmaConfig(enable=True, decay=0.9))
    load_checkpoint(saved, engine, averages, order, Resume(), changes)
    assert engine.weights["w"].tolist() == [5.0, 7.0]
    # an average that the checkpoint lacks starts from its weights, not from those before training
    assert averages.tracks["ema"].shadow["w"].tolist() == [5.0, 7.0]
    line = "the config has changed since the checkpoint: logging_steps = 3 (was 1), seed = 7 (was 0)"
    assert line in capfd.readouterr().err.splitlines()
    message = r"another order of data .*; write seed = 0, or pass --reset-dataloader; .* has .*seed = 7 \(was 0\)"
    with pytest.raises(UserError, match=message):
        load_checkpoint(saved, engine, averages, build_order(7, [([Segment(8, 1.0)], 4)]), Resume(), changes)


ORDER = {"seed": 1, "buckets": [[4, 16, 40, 10, "ab"], [4, 16, 8, 2, "ab"]]}


@pytest.mark.parametrize(
    ("seed", "buckets", "remedy", "must_differ"),
    [
        (2, ORDER["buckets"], "write seed = 1", True),
        (1, [[4, 16, 35, 9, "cd"], [4, 16, 8, 2, "ab"]], "restore the 5 missing samples", True),
        (1, [[4, 16, 39, 10, "cd"], [4, 16, 8, 2, "ab"]], "restore the 1 missing sample", True),
        (1, [[4, 16, 40, 10, "ab"]], "restore the 8 missing samples", True),
        (1, [[4, 16, 43, 11, "cd"], [4, 16, 8, 2, "ab"]], "remove the 3 new samples", False),
        (1, [[4, 16, 43, 11, "cd"], [4, 16, 7, 2, "cd"]], "remove the 2 new samples", True),
        (1, [*ORDER["buckets"], [4, 16, 1, 1, "ab"]], "remove the 1 new sample", False),
        (1, [[2, 16, 40, 20, "ab"], [2, 16, 8, 4, "ab"]], "restore the global batch", True),
        (1, [[4, 8, 40, 10, "ab"], [4, 8, 8, 2, "ab"]], "write shuffle_window = 16", True),
        (1, [[4, 16, 40, 10, "cd"], [4, 16, 8, 2, "ab"]], "restore the data", False),
    ],
)
def test_how_to_restore_an_order(seed: int, buckets: list[Any], remedy: str, must_differ: bool) -> None:
    """``must_differ``: also if images of a planned cache turn out to be broken."""
    now = {"seed": seed, "buckets": buckets}
    assert _remedy(ORDER, now) == remedy
    assert _must_differ(ORDER, now) == must_differ
