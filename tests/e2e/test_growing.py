"""Runs with draws per image resume exactly; a run grows from another's export to a higher resolution."""

from pathlib import Path

import pytest
from diffusers import SD3Transformer2DModel
from safetensors.torch import load_file

from sd3_light.checkpoint.store import checkpoint_name
from sd3_light.core.registry import family_named, starting_weights
from sd3_light.train.verb import Resume
from tests.checkpoints import assert_same_checkpoint
from tests.project import Project

pytestmark = pytest.mark.usefixtures("unproven")
WEIGHTS = "transformer/diffusion_pytorch_model.safetensors"
DRAWS = ("model.num_layers=3", "model.routing.share=0.5", "model.layer_sync.weight=0.5", "model.position_crop_side=8")


def export(project: Project, step: int, run: str = "run") -> Path:
    return Path(project.folder / run / "exports" / checkpoint_name(step))


def numbers(project: Project, run: str) -> list[tuple[float, ...]]:
    keys = ("step", "loss", "flow", "layer_sync", "grad_norm")
    return [tuple(event[key] for key in keys) for event in project.events("step", run)]


def test_a_run_with_draws_per_image_resumes_exactly_and_exports_the_stock_model(project: Project) -> None:
    project.train(*DRAWS)
    steps = numbers(project, "run")
    assert all(loss == pytest.approx(flow + 0.5 * sync, rel=1e-5) for _, loss, flow, sync, _ in steps)
    resume = Resume(project.run / "checkpoints" / checkpoint_name(2))
    project.train(*DRAWS, 'output_dir="resumed"', "num_dataloader_workers=2", resume=resume)
    assert numbers(project, "resumed") == steps[2:]
    last = Path("checkpoints") / checkpoint_name(4)
    assert_same_checkpoint(project.folder / "resumed" / last, project.run / last)
    split = ("micro_batch_size_per_gpu=2", "gradient_accumulation_steps=2", "activation_checkpointing=true")
    project.train(*DRAWS, 'output_dir="split"', *split, "max_steps=2")
    for event, other in zip(numbers(project, "split"), steps[:2], strict=True):
        assert event == pytest.approx(other, rel=1e-5)
    stock = SD3Transformer2DModel.from_pretrained(export(project, 4) / "transformer")
    assert set(load_file(export(project, 4) / WEIGHTS)) == set(stock.state_dict())


def test_a_run_grows_from_64_to_128_px(project: Project) -> None:
    project.data(project.data_toml.read_text().replace("[64, 64], [80, 48], [48, 80]", "[64, 64]"))
    project.train("max_steps=2", "model.position_crop_side=8")
    project.data(project.data_toml.read_text().replace("[64, 64]", "[128, 128]"))
    larger = ("max_steps=2", 'output_dir="larger"', 'cache_dir="larger_cache"', f'model.init="{export(project, 2)}"')
    start = starting_weights(project.load(*larger).train.model)
    trained = load_file(export(project, 2) / WEIGHTS)
    first = family_named("sd3").weights.load(start, 0).state_dict()
    assert all(tensor.equal(trained[name]) for name, tensor in first.items())
    project.train(*larger, "model.sqrt_shift=true")
    grown = load_file(export(project, 2, "larger") / WEIGHTS)
    assert grown["pos_embed.pos_embed"].equal(trained["pos_embed.pos_embed"])
    assert not grown["proj_out.weight"].equal(trained["proj_out.weight"])
    sizes = [SD3Transformer2DModel.load_config(export(project, 2, run) / "transformer") for run in ("run", "larger")]
    assert [config["sample_size"] for config in sizes] == [8, 16]
