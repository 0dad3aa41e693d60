"""The folder of a run when training starts."""

from pathlib import Path

from sd3_light.config import load_config
from sd3_light.train.folder import RunFolder
from tests.leftovers import leave


def test_the_start_removes_what_a_killed_process_left(tmp_path: Path) -> None:
    (tmp_path / "data.toml").write_text('resolutions = [64]\n[[directory]]\npath = "images"\n')
    model = '[model]\ndiffusers_path = "no_model"\ntrain_type = "sd3_light_pretrain"\nsize = "tiny2"\n'
    top = 'output_dir = "run"\ndataset = "data.toml"\nmax_steps = 2\nsave_every_n_steps = 2\n'
    (tmp_path / "train.toml").write_text(top + model)
    loaded = load_config(tmp_path / "train.toml")
    run = tmp_path / "run"
    leftovers = [leave(run / name) for name in ("config.toml", "trackers.json")]
    (run / ".tmp-of-another-program").touch()
    with RunFolder(loaded, True) as folder:
        assert all(path.exists() for path in leftovers), "nothing changes before training begins"
        folder.begin(loaded.train)
    names = {path.name for path in run.iterdir()}
    assert names - {"tensorboard"} == {".lock", ".tmp-of-another-program", "config.toml", "log.jsonl"}
