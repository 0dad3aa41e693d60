"""An estimate counts samples and sums up costs; its screen shows every number with its formula."""

import re
import shutil
from dataclasses import replace
from typing import Any

import pytest
from safetensors.torch import save_file

from sd3_light.check import count as count_module
from sd3_light.check import estimate as estimate_module
from sd3_light.check import run_setup
from sd3_light.check import verb as check
from sd3_light.check.render import render
from sd3_light.check.verb import RunEstimate, estimate_run
from sd3_light.config import SIZES, ConfigFaults, LoadedConfig, UserError
from sd3_light.core.cost import Layout, Tokens
from sd3_light.core.registry import family_named, starting_weights
from sd3_light.cost.amount import format_bytes
from sd3_light.cost.data_bytes import caption_bytes, image_bytes, resident_index_bytes
from sd3_light.cost.training_flops import training_flops
from sd3_light.families.sd3.cost import SD3Cost
from sd3_light.families.sd3.positions import position_table
from tests.project import Project
from tests.unit.check.conftest import shown

PRETRAIN = 'size = "demo"\ntrain_type = "sd3_light_pretrain"'
ONE = '[[directory]]\npath = "images"\n'
BUCKETED = 'resolutions = [64]\nenable_ar_bucket = true\nar_buckets = [1.0, 2.0]\n[[directory]]\npath = "images"\n'


def estimated(loaded: LoadedConfig, world: int = 1) -> RunEstimate:
    return estimate_run(loaded, starting_weights(loaded.train.model), Layout(world))


def test_samples_are_counted_by_bucket_and_reject(files: Any) -> None:
    for number, side in enumerate((80, 80, 80, 80, 60, 52)):  # 60 is hardly enlarged
        files.image(f"square{number}.png", side, side)
    files.image("wide.png", 40, 20)
    files.image("silent.png", 64, 64, caption=None)
    (files.folder / "images" / "broken.png").write_bytes(b"not an image")
    (files.folder / "images" / "broken.txt").write_text("a broken one")
    estimate = estimated(files.load(top="micro_batch_size_per_gpu = 2", dataset=BUCKETED))
    assert estimate.data.samples == 7
    assert estimate.data.rejects.counts == {"no_caption": 1, "not_an_image": 1}
    rows = {str(row.bucket): row for row in estimate.data.rows}
    assert {name: (row.samples, row.enlarged, row.steps, row.padding) for name, row in rows.items()} == {
        "64x64": (6, 1, 3, 0),
        "96x48": (1, 1, 1, 1),
    }
    assert estimate.data.steps == 4


def test_every_bucket_needs_inputs_for_its_graph(files: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    files.image("square.png", 80, 80)
    one = estimated(files.load(dataset=BUCKETED))
    files.image("wide.png", 40, 20)
    two = estimated(files.load(dataset=BUCKETED))
    assert (one.setup.graph_shapes, two.setup.graph_shapes) == (1, 2)
    monkeypatch.setattr(run_setup, "MAX_GRAPHS", 1)
    limited = estimated(files.load(dataset=BUCKETED))
    assert limited.setup.graph_shapes == 1
    assert limited.gpu.total < two.gpu.total


def test_steps_follow_world_accumulation_and_repeats(files: Any) -> None:
    files.squares(8)
    top = "micro_batch_size_per_gpu = 2\ngradient_accumulation_steps = 2\nepochs = 3\nmax_steps = 1000"
    dataset = 'resolutions = [64]\n[[directory]]\npath = "images"\nnum_repeats = 4\n'
    alone, many = (estimated(files.load(top=top, dataset=dataset), world) for world in (1, 4))
    assert (alone.data.steps, alone.total_steps) == (8, 24)
    assert (many.data.steps, many.total_steps) == (2, 6)
    assert alone.run_flops == many.run_flops


def test_the_micro_batch_depends_on_the_resolution(files: Any) -> None:
    files.squares(4, 128)
    top = "micro_batch_size_per_gpu = [[64, 4], [128, 1]]"
    dataset = 'resolutions = [64, 128]\n[[directory]]\npath = "images"\n'
    estimate = estimated(files.load(top=top, dataset=dataset))
    assert [(row.micro_batch, row.steps) for row in estimate.data.rows] == [(4, 1), (1, 4)]
    assert estimate.data.samples == 4


def test_costs_match_the_formulas(files: Any) -> None:
    files.image("one.png", 64, 64)
    files.image("two.png", 64, 64)
    dataset = 'resolutions = [64]\nflip = true\n[[directory]]\npath = "images"\n'
    estimate = estimated(files.load(top="micro_batch_size_per_gpu = 2", dataset=dataset))
    (row,) = estimate.data.rows
    assert estimate.setup.cost.text.most == 20 + 12
    assert row.tokens == Tokens(16, 32)
    assert row.step_flops.value == 2 * training_flops(SD3Cost(SIZES["demo"]), Tokens(16, 32)).value
    assert estimate.start.size.num_parameters() == SIZES["demo"].num_parameters()
    model = files.load().train.model
    columns = family_named("sd3").columns(model, model.diffusers_path, row.bucket)
    image, caption = image_bytes(columns, variants=2), caption_bytes(columns)
    assert estimate.data.cache.value == 2 * (image.value + caption.value)
    assert estimate.gpu == row.gpu


def test_the_position_step_is_shown(files: Any) -> None:
    files.image("one.png", 64, 64)
    line = next(line for line in shown(render(estimated(files.load()))).splitlines() if "position step" in line)
    assert re.search(" 1 +radians between neighbouring tokens of the position table of the size", line)
    assert estimated(files.load(model=f"{PRETRAIN}\nposition_step = 0.25")).facts[0].value == "0.25"
    folder = files.denoiser("trained")
    table = {"pos_embed.pos_embed": position_table(256, 16, 0.5).bfloat16()}
    save_file(table, folder / "diffusion_pytorch_model.safetensors")
    text = shown(render(estimated(files.load(model=f'{PRETRAIN}\ninit = "trained"'))))
    assert re.search("position step +0.5 +radians between neighbouring tokens of .* in the weights", text)


def test_run_rejects_data_without_a_usable_sample_or_bucket(files: Any) -> None:
    files.image("silent.png", 64, 64, caption=None)
    with pytest.raises(ConfigFaults, match=r"no usable sample \(1 no_caption\)"):
        check.run(files.load())
    files.image("a.png", 64, 64)
    with pytest.raises(ConfigFaults, match="every bucket is smaller than a global batch"):
        check.run(files.load(top='small_buckets = "drop"\nmicro_batch_size_per_gpu = 4'))


def test_the_screen_shows_numbers_and_formulas(files: Any) -> None:
    files.image("one.png", 64, 64)
    files.image("silent.png", 64, 64, caption=None)
    estimate = check.run(files.load(tables="[ema]\nenable = true"), world_size=2)
    text = shown(render(estimate))
    assert f"{estimate.start.size.num_parameters():,}" in text
    assert "random weights of size demo" in text
    assert "P·(weights 4 + AdamW 8 + EMA 4 + gradient buckets 4 + compute copies 2)" in text
    assert "rejected 1: no_caption (the image has no caption): images#0/silent.png" in text
    assert f"lists all rejected inputs in {estimate.data.cache_dir}/rejects.jsonl" in text
    assert "64x64" in text
    assert "estimate" in text
    for line in ("host memory", "cache train", "FLOPs per step", "steps per epoch"):
        assert line in text


def test_real_tokens_are_counted_as_the_longest_captions(files: Any) -> None:
    files.image("a.png", 64, 64)
    padded, real = (
        estimated(files.load(top="cuda_graphs = false", model=PRETRAIN + f'\ntext_tokens = "{kind}"'))
        for kind in ("padded", "real")
    )
    assert real.gpu == padded.gpu
    assert (real.data.cache.value, real.run_flops) == (padded.data.cache.value, padded.run_flops)
    lines = [line.strip() for line in shown(render(real)).splitlines() if "at most" in line]
    for name in ("text tokens", "FLOPs per step", "cache train", "host memory", "step "):
        assert any(line.startswith(name) for line in lines), name
    assert "at most" not in shown(render(padded))


def test_an_evaluation_set_is_counted_without_repeats_and_adds_its_loader(files: Any) -> None:
    files.image("a.png", 64, 64)
    (files.folder / "val.toml").write_text(f"resolutions = [64]\n{ONE}num_repeats = 9\n")
    alone = estimated(files.load()).host
    top = 'eval_datasets = ["val.toml"]\neval_every_n_steps = 5\ngradient_accumulation_steps = 2'
    estimate = estimated(files.load(top=top))
    (data,) = estimate.evals
    assert (data.name, data.samples, data.steps) == ("val", 1, 1)
    assert estimate.host.value > 1.5 * alone.value
    assert "while evaluating" in estimate.host.formula


# --- cached datasets -------------------------------------------------------------------


def test_a_cached_dataset_is_not_scanned_again(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(count_module, "scan", lambda *_: pytest.fail("the sources were scanned"))
    counts = count_module.count_samples(project.load().dataset, 0)
    assert counts.samples == 40
    monkeypatch.undo()
    (project.images / "000003.png").unlink()
    assert count_module.count_samples(project.load().dataset, 0).samples == 39, "a change is seen"


def test_a_cache_at_a_url_is_counted_by_its_manifest(project: Project) -> None:
    local = count_module.count_samples(project.load().dataset, 0)
    shutil.rmtree(project.images)
    remote = count_module.count_samples(project.load(f'cache_dir="file://{project.cache}"').dataset, 0)
    assert remote.samples == local.samples
    assert {key: counts[0].samples for key, counts in remote.buckets.items()} == {
        key: counts[0].samples for key, counts in local.buckets.items()
    }


# --- launches ----------------------------------------------------------------------------------


def test_a_pipeline_launch_is_estimated(files: Any) -> None:
    """Samples per step depend on pipelines, memory on the fullest stage; the screen names layout and blocks."""
    files.squares(16)
    top = "micro_batch_size_per_gpu = 2\npipeline_stages = 2\ngradient_accumulation_steps = 4"
    loaded = files.load(top=top, model=PRETRAIN)
    least = check.run(loaded)
    assert (least.setup.world_size, least.setup.replicas, least.setup.deepspeed) == (2, 1, True)
    pipes = check.run(loaded, 4)
    assert {row.global_batch for row in pipes.data.rows} == {2 * 4 * 2}
    assert pipes.gpu.state.value < check.run(files.load(model=PRETRAIN), 4, by_deepspeed=True).gpu.state.value
    text = shown(render(pipes))
    assert "DeepSpeed (--deepspeed), ZeRO-1, 2 pipelines of 2 stages: layers 0 to 2, 3 to 5" in text
    assert f"on stage {pipes.gpu.stage}, which needs most" in text
    assert "micro-batch·4 accumulation·2 pipelines" in text
    assert f"because {pipes.why_stock}" in text


def test_every_layout_is_described(files: Any) -> None:
    files.image("one.png", 64, 64)

    def screen(world: int | None = None, by_deepspeed: bool = False, top: str = "") -> str:
        return shown(render(check.run(files.load(top=top, model=PRETRAIN), world, by_deepspeed)))

    assert "torch engine; see other launches with --processes N and --deepspeed" in screen()
    assert "blocks on GPUs" in screen()
    assert "fast kernels" in screen()
    assert 'torch engine, parallel = "ddp": all weights on every GPU' in screen(4)
    assert 'parallel = "fsdp2": weights and state sharded over all GPUs' in screen(4, top='parallel = "fsdp2"')
    assert "fast kernels" in screen(4, top='parallel = "fsdp2"')
    assert "because compile = true" in screen(4, top='parallel = "fsdp2"\ncompile = true')
    assert "DeepSpeed (--deepspeed), ZeRO-3" in screen(4, True, "zero_stage = 3")
    assert "zero_stage = 1 has nothing to shard on one GPU" in screen(1, True)


def test_a_cache_at_a_url_adds_its_downloads(files: Any) -> None:
    files.image("a.png", 64, 64)
    loaded = files.load(top="num_dataloader_workers = 2\nsd3_shard_size = 1000000")
    local = estimated(loaded).data
    remote = replace(local, cache_dir="s3://bucket/cache")
    more = [estimate_module._loader(loaded.train, data, 1)[0].value for data in (local, remote)]
    assert more[1] - more[0] == 2 * (16 + 1) * (8 << 20)  # workers, ranges in flight and one that is joined
    few = loaded.train.model_copy(update={"sd3_shard_size": 1})
    shard = round(max(row.read / row.micro_batch for row in local.rows))
    assert estimate_module._downloads(few, remote) == (16 + 3 + 1) * shard  # in flight, hashed, waited for


@pytest.mark.parametrize(
    ("top", "world", "message"),
    [
        ("pipeline_stages = 2", 3, "3 processes cannot form pipelines of 2 stages"),
        ('parallel = "fsdp2"', 4, "needs the torch engine"),
    ],
)
def test_an_impossible_launch_is_rejected(files: Any, top: str, world: int, message: str) -> None:
    files.image("one.png", 64, 64)
    with pytest.raises(UserError, match=message):
        check.run(files.load(top=top, model=PRETRAIN), world, by_deepspeed=True)


# --- the cache in memory -----------------------------------------------------------------------


def test_a_cache_in_memory_is_added_to_host_or_gpu_memory(files: Any) -> None:
    files.squares(6)
    stream, host, device = (
        estimated(files.load(top=f'cache_residence = "{name}"')) for name in ("stream", "host", "device")
    )
    cache, index = stream.data.cache.value, resident_index_bytes(6, 6)
    assert host.host.value - stream.host.value == cache + index
    assert device.host.value - stream.host.value == index
    assert device.gpu.total - stream.gpu.total == cache
    assert host.gpu == stream.gpu
    assert f"{format_bytes(cache)} cache" in device.gpu.state.formula
    assert "MiB for the cache in memory (host)" in host.host.formula
    auto = estimated(files.load())  # the cache is in memory only if it fits beside the rest
    assert (auto.residence, auto.host, auto.gpu) == ("auto", stream.host, stream.gpu)
    old = estimated(files.load(top="sd3_streaming_dataset = false"))
    assert (old.residence, old.host) == ("host", host.host)
