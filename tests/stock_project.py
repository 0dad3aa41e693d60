"""A project that continues a tiny stock model on a cache of made-up rows."""

from pathlib import Path

from sd3_light.check import verb as check
from sd3_light.core.columns import Bucket
from sd3_light.core.registry import family_of
from sd3_light.world import write_dataset
from tests.made_up_cache import write_cache
from tests.project import Project

BUCKETS = {Bucket(64, 64): 16, Bucket(128, 64): 8}
TRAIN = """
output_dir = "run"
dataset = "data.toml"
cache_dir = "cache"
eval_datasets = ["eval.toml"]
eval_every_n_steps = 4
seed = 3
max_steps = 4
micro_batch_size_per_gpu = 4
checkpoint_every_n_steps = 2
keep_last_n_checkpoints = 0
num_dataloader_workers = 0
save_dtype = "float32"

[model]
diffusers_path = "{model}"
dtype = "float32"
enable_uncond_text_dropout = true
text_max_length = 12

[optimizer]
lr = 1e-3

[ema]
enable = true
decay = 0.9
update_every = 1
"""
LORA = """
[adapter]
rank = 4
dropout = 0.1
"""


def write_project(folder: Path, model: Path, extra: str = "", keys: str = "", dropout: bool = True) -> Project:
    """Write the files of a project and its caches; ``extra`` are keys of the directory, ``keys`` those of [model].

    ``dropout``: samples lose their text.
    """
    project = Project(folder, model)
    write_dataset(folder / "images", 1, seed=1)
    text = TRAIN.format(model=model).replace("[model]\n", f"[model]\n{keys}")
    text = text if dropout else text.replace("enable_uncond_text_dropout = true\n", "")
    project.train_toml.write_text(text, encoding="utf-8")
    for name, sizes in (("data", [[64, 64], [128, 64]]), ("eval", [[64, 64]])):
        text = f'size_buckets = {sizes}\n[[directory]]\npath = "images"\n{extra}'
        (folder / f"{name}.toml").write_text(text, encoding="utf-8")
    table = check.load(project.train_toml).train.model
    family = family_of(table)
    write_cache(folder / "cache", family, table, BUCKETS)
    write_cache(folder / "cache-eval-eval", family, table, {Bucket(64, 64): 4})
    return project
