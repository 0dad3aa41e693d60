"""Cancelling, previews, images drawn again from their PNG; steps and guidance by default."""

import json
import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline
from PIL import Image
from transformers import CLIPTokenizer

from sd3_light import cli
from sd3_light.assets import DEMO
from sd3_light.config import TrainConfig
from sd3_light.config.faults import UserError
from sd3_light.core.registry import family_named, family_of_folder
from sd3_light.core.sampling import ImageRequest
from sd3_light.engines import Launch
from sd3_light.evaluate import against
from sd3_light.evaluate.composition import ScoreOptions, score
from sd3_light.export import lora
from sd3_light.export.chosen import choose_model
from sd3_light.export.lora_file import write_lora
from sd3_light.export.lora_stack import Lora
from sd3_light.export.open_pipeline import open_policy
from sd3_light.model.lora_layers import LoraModule
from sd3_light.sample import phases
from sd3_light.sample import verb as sample
from sd3_light.sample.again import drawn_image, options_again, read_drawn_image
from sd3_light.sample.generate import Cancelled, stream_images
from sd3_light.sample.image_requests import PromptRow
from sd3_light.sample.png import PNG_FACTS, read_png_facts, save_png
from sd3_light.sample.verb import OpenModel, SampleOptions, open_model, run
from sd3_light.sample.watch import Preview, StepEstimate, Watch, as_grid, cancellable
from sd3_light.ui.draw_request import parse_request
from tests.families import PIPELINES, make_pipeline
from tests.stock import save_stock

pytestmark = pytest.mark.usefixtures("prx_without_ftfy")

Command = Callable[..., str]
OPTIONS = SampleOptions(steps=3, width=32, height=32)
DRAWING = [name for name in PIPELINES if not name.startswith("qwen_image_edit")]  # which draw from images only
SIZE = {"width": 64, "height": 64}
SCHNELL = {"guidance_embeds": False}


@pytest.fixture(scope="module")
def model() -> OpenModel:
    return open_model(DEMO, OPTIONS, Launch())


def drawn(model: OpenModel, out: Path, watch: Watch | None = None, size: tuple[int, int] = (32, 32)) -> list[bytes]:
    row = PromptRow("a red circle", width=size[0], height=size[1])
    requests = {number: model.request(row, number) for number in range(2)}
    files = [path for each in model.draw(requests, out, watch=watch) for path in each.values()]
    return [path.read_bytes() for path in sorted(files)]


def test_what_is_cancelled_restores_the_state_of_its_thread() -> None:
    cancelled = threading.Event()

    def draw() -> None:
        with cancellable(cancelled.is_set), torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            cancelled.set()
            torch.ones(2)

    with pytest.raises(Cancelled):
        draw()
    assert torch.is_grad_enabled()
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("family", ["sd3", *DRAWING])
def test_previews_show_every_family_and_change_no_bit(family: str, tmp_path: Path) -> None:
    folder = DEMO if family == "sd3" else save_stock(family, tmp_path / "model")
    options = SampleOptions(steps=3, frames=5 if family == "wan" else 0)
    model = open_model(folder, options, Launch())
    size = (64, 32)
    seen: list[tuple[int, int, Image.Image | None]] = []
    watch = Watch(lambda: False, lambda *each: seen.append(each), Preview(model.chosen.folder))
    assert drawn(model, tmp_path / "seen", watch, size) == drawn(model, tmp_path / "unseen", None, size)
    for index in range(2):
        steps = [step for at, step, _ in seen if at == index]
        assert steps == [1, 2, 3]
    shown = [image.size for _, step, image in seen if step > 1 and image is not None]
    assert len(shown) == 4
    assert {width / height for width, height in shown} == {2.0}
    assert all(image is None for _, step, image in seen if step == 1), "no line goes through one point"


def test_a_model_in_phases_has_previews_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(phases, "free_memory", lambda _: 1)
    model = open_model(DEMO, OPTIONS, Launch())
    assert isinstance(model.pipe, phases.Phases)
    seen: list[Any] = []
    watch = Watch(lambda: False, lambda *each: seen.append(each), Preview(DEMO))
    assert drawn(model, tmp_path / "a", watch) == drawn(model, tmp_path / "b")
    assert sum(each[2] is not None for each in seen) == 4


def test_previews_learn_the_colors_of_finished_images(model: OpenModel, tmp_path: Path) -> None:
    """The demo's VAE knows no other images than its own: after one of these, the colors of another are close."""
    preview = Preview(DEMO)
    seen: dict[int, Image.Image | None] = {}
    watch = Watch(None, lambda index, _, image: seen.update({index: image}), preview)
    opened = model.adjusted(SampleOptions(steps=8))
    errors = []
    for number, prompt in enumerate(("a large red circle", "a blue star and a yellow circle")):
        request = opened.request(PromptRow(prompt), number)
        ((path,),) = [each.values() for each in opened.draw({0: request}, tmp_path / str(number), watch=watch)]
        shown = seen[0]
        small = np.asarray(Image.open(path).resize(shown.size, Image.Resampling.BOX), dtype=float)
        errors.append(np.abs(np.asarray(shown, dtype=float) - small).mean())
    assert errors[1] < 0.4 * errors[0]


def test_packed_latents_are_unpacked_as_the_pipeline_does() -> None:
    grid = torch.arange(2 * 4 * 8 * 6).reshape(2, 4, 8, 6).float()
    packed = FluxPipeline._pack_latents(grid, 2, 4, 8, 6)
    assert as_grid(packed, 8 / 6).equal(grid)
    assert as_grid(grid, 1.0) is grid
    assert as_grid(grid[:, :, None].repeat(1, 1, 3, 1, 1), 1.0).equal(grid)
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    scheduler.set_timesteps(5)
    clean, noise = torch.tensor([2.0]), torch.tensor([-1.0])
    estimate = StepEstimate(scheduler)
    times = [*(scheduler.timesteps / 1000).tolist(), 0.0]
    points = [(1 - time) * clean + time * noise for time in times]
    estimates = [estimate.after(step, point) for step, point in enumerate(points[1:])]
    assert estimates[0] is None
    for each in estimates[1:]:
        assert each is not None
        torch.testing.assert_close(each, clean)


def test_steps_and_the_vae_are_cancelled_between_two_operations(model: OpenModel, tmp_path: Path) -> None:
    """The first layer of denoiser or VAE sets the event; a later one is never called."""
    before = drawn(model, tmp_path / "before")
    blocks = model.pipe.transformer.transformer_blocks
    decoder = model.pipe.vae.decoder
    for first, second in ((blocks[0], blocks[1]), (decoder.conv_in, decoder.conv_out)):
        cancelled, called = threading.Event(), list[int]()
        hooks = [first.register_forward_hook(lambda *_, cancelled=cancelled: cancelled.set())]
        hooks += [second.register_forward_hook(lambda *_, called=called: called.append(1))]
        with pytest.raises(Cancelled):
            drawn(model, tmp_path / "none", Watch(cancelled.is_set))
        for hook in hooks:
            hook.remove()
        assert called == []
        assert list((tmp_path / "none").glob("*")) == []
    assert drawn(model, tmp_path / "after", Watch(lambda: False)) == before


def test_a_tokenizer_does_not_hide_that_images_were_cancelled() -> None:
    tokenizer = CLIPTokenizer.from_pretrained(DEMO / "tokenizer")
    with pytest.raises(Cancelled), cancellable(lambda: True):
        tokenizer(["a circle"], return_tensors="pt")


def test_loading_is_cancelled_and_loads_the_same_afterwards(model: OpenModel, tmp_path: Path) -> None:
    calls: list[int] = []

    def is_cancelled() -> bool:
        calls.append(1)
        return len(calls) > 40

    dtype = torch.get_default_dtype()
    with pytest.raises(Cancelled), cancellable(is_cancelled):
        open_model(DEMO, OPTIONS, Launch())
    assert 41 <= len(calls) < 45
    assert torch.get_default_dtype() == dtype
    again = open_model(DEMO, OPTIONS, Launch())
    assert drawn(again, tmp_path / "again") == drawn(model, tmp_path / "first")


def test_shift_and_sampler_of_a_loaded_model_change_as_if_loaded_with_them(model: OpenModel, tmp_path: Path) -> None:
    plain = drawn(model.adjusted(OPTIONS), tmp_path / "plain")
    changes = ({"shift": 5.0}, {"sampler": "heun"}, {})
    for number, options in enumerate(SampleOptions(steps=3, **change) for change in changes):
        fresh = drawn(open_model(DEMO, options, Launch()), tmp_path / f"fresh{number}")
        assert drawn(model.adjusted(options), tmp_path / f"adjusted{number}") == fresh
        assert (fresh != plain) == (number < 2)
    assert read_png_facts(tmp_path / "fresh0" / "00000.png")["shift"] == 5.0


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """`sd3-light sample`; returns what it prints to stderr."""

    def call(*arguments: object) -> str:
        monkeypatch.setattr(sys, "argv", ["sd3-light", "sample", *map(str, arguments)])
        with pytest.raises(SystemExit):
            cli.main()
        return capsys.readouterr().err

    return call


def test_an_image_is_drawn_again_from_its_png(command: Command, tmp_path: Path) -> None:
    options = SampleOptions(steps=2, guidance=1.5, width=32, height=48, negative_prompt="", shift=2.0, sampler="dpm++")
    run(DEMO, [PromptRow('a "red" circle, 红\n2')], [7], tmp_path / "a", options)
    first = tmp_path / "a" / "00000.png"
    command(DEMO, "--from", first, "--out", tmp_path / "b", "--no-grid")
    assert (tmp_path / "b" / "00000.png").read_bytes() == first.read_bytes()
    facts = read_png_facts(first)
    assert len(facts["fingerprint"]) == 16
    assert facts["threads"] == 1


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"steps": 10**9}, "steps is 1000000000; the file is damaged"),
        ({"seed": "0"}, "seed is '0'"),
        ({"guidance": float("nan")}, "guidance is nan"),
        ({"guidance": 10**400}, "guidance is 1000"),
        ({"sampler": ["euler"]}, "sampler is \\['euler'\\]"),
        ({"loras": [{"file": 1}]}, "loras is"),
        ({"prompt": None}, "prompt is None"),
        ({"loras": [{"file": "x.safetensors", "strength": 1, "fingerprint": "ab"}]}, "pass it with --lora"),
    ],
)
def test_a_damaged_png_is_refused(change: dict[str, Any], text: str, tmp_path: Path) -> None:
    facts = {"prompt": "a", "negative_prompt": "", "seed": 0, "width": 32, "height": 32, "steps": 2, "guidance": 1}
    facts |= {"sampler": "euler", "dtype": "float32", "shift": 3.0, "model": "demo", "fingerprint": "", "loras": []}
    save_png(Image.new("RGB", (8, 8)), tmp_path / "a.png", {PNG_FACTS: json.dumps(facts | change)})
    with pytest.raises(UserError, match=text):
        options_again(read_drawn_image(tmp_path / "a.png"), choose_model(DEMO), [])
    Image.new("RGB", (8, 8)).save(tmp_path / "plain.png")
    with pytest.raises(UserError, match="it has no settings"):
        read_drawn_image(tmp_path / "plain.png")


def test_what_an_earlier_version_did_not_write_is_the_models_own(tmp_path: Path, command: Command) -> None:
    facts = {"prompt": "a", "seed": 0, "width": 32, "height": 32, "steps": 2, "guidance": 1}
    text = json.dumps(facts | {"sampler": "euler", "dtype": "float32", "model": "demo"})
    drawn = drawn_image(text, "it")
    assert (drawn.options.shift, drawn.options.threads, drawn.options.frames, drawn.loras) == (None, 1, 1, ())
    assert "leave --steps out" in command(DEMO, "--from", "a.png", "--steps", 3)
    assert "leave the prompt out" in command(DEMO, "a cat", "--from", "a.png")
    assert "--shift -1.0: pass a number above 0" in command(DEMO, "a cat", "--shift", "-1")


def shown(capsys: pytest.CaptureFixture[str]) -> str:
    return " ".join(capsys.readouterr().err.split())


def test_schnell_is_drawn_as_its_stock_pipeline_is_called(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "schnell"
    pipe: Any = make_pipeline("flux", guidance_embeds=False)
    pipe.save_pretrained(folder)
    sample.run(folder, [PromptRow("a star")], [3], tmp_path / "own", SampleOptions(**SIZE, grid=False))
    assert "4 steps, guidance 1: " in shown(capsys)
    length = read_png_facts(tmp_path / "own" / "00000.png")["text_max_length"]
    call = {"num_inference_steps": 4, "guidance_scale": 0.0, "max_sequence_length": length, **SIZE}
    stock = pipe("a star", generator=torch.Generator("cpu").manual_seed(3), **call)
    assert np.array_equal(np.asarray(Image.open(tmp_path / "own" / "00000.png")), np.asarray(stock.images[0]))
    given = SampleOptions(**SIZE, steps=1, guidance=2.0, grid=False)
    sample.run(folder, [PromptRow("a star")], [3], tmp_path / "given", given)
    assert "guidance" not in shown(capsys)
    facts = read_png_facts(tmp_path / "given" / "00000.png")
    assert (facts["steps"], facts["guidance"]) == (1, 2.0)


def test_the_defaults_of_other_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for family, expected in (("flux", (28, 3.5)), ("z_image", (28, 5.0)), ("wan", (28, 5.0))):
        make_pipeline(family).save_pretrained(tmp_path / family)
        assert open_policy(tmp_path / family)[1].drawing(None, None) == expected
    _, demo = open_policy(DEMO)
    assert demo.drawing(None, None) == (28, 4.0)
    assert demo.drawing(None, 0.0, 20) == (20, 0.0)
    sample.choose_drawing(open_policy(tmp_path / "z_image")[1], 5, None)
    note = "Z-Image-Turbo, whose configs are the same, needs --steps 8 --guidance 0"
    assert f"5 steps, guidance 5: {note}" in shown(capsys)
    sample.choose_drawing(demo, None, None)
    assert not shown(capsys)


@pytest.mark.parametrize("family", ["flux", "schnell", "z_image", "wan"])
def test_grids_metrics_and_the_playground_draw_as_sample_does(family: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    pipe = make_pipeline("flux", **SCHNELL) if family == "schnell" else make_pipeline(family)
    pipe.save_pretrained(folder)
    policy = open_policy(folder)[1]
    metrics = {"dataset": "true.toml", "features": "clip", "every_n_steps": 1}
    table = {"output_dir": "out", "dataset": "data.toml", "max_steps": 1, "model": {"diffusers_path": str(folder)}}
    for keys in ({}, {"steps": 7}, {"guidance": 2.5}, {"steps": 7, "guidance": 2.5}):
        tables = {**table, "sampling": keys, "metrics": {**metrics, **keys}}
        config = TrainConfig.model_validate(tables, context={"base": tmp_path})
        config = family_of_folder(folder).completed(config)
        assert config.metrics is not None
        steps = keys.get("steps")
        guidance = keys.get("guidance")
        assert (config.sampling.steps, config.sampling.guidance) == policy.drawing(steps, guidance)
        assert (config.metrics.steps, config.metrics.guidance) == policy.drawing(steps, guidance, against.USUAL_STEPS)
        form = {"models": ["a"], "prompt": "a star", **{name: str(value) for name, value in keys.items()}}
        row = parse_request(form, {"a": ("a", folder)}, {}).row()
        assert (row.steps, row.guidance) == (steps, guidance), "`OpenModel.request` completes them"


def test_models_with_different_defaults_are_not_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_pipeline("flux", guidance_embeds=False).save_pretrained(tmp_path / "schnell")
    chosen = {"a": choose_model(DEMO), "b": choose_model(tmp_path / "schnell")}
    with pytest.raises(sample.UserError, match=r"a with 20 and 4, b with 4 and 1; pass --steps and --guidance"):
        against._drawing(chosen, against.AgainstOptions())
    assert against._drawing(chosen, against.AgainstOptions(steps=3, guidance=2.0)) == (3, 2.0)
    assert against._drawing({"b": chosen["b"]}, against.AgainstOptions()) == (4, 1.0)
    drawn: list[tuple[Any, ...]] = []
    monkeypatch.setattr("sd3_light.evaluate.composition.generate", lambda *args: drawn.append(args) or [])
    for name in ("a", "b"):
        score(None, [], open_policy(chosen[name].folder)[1], ScoreOptions())  # type: ignore[arg-type]
    assert [args[3] for args in drawn] == [(20, 4.0), (4, 1.0)]


def stating(folder: Path, **sampling: Any) -> Path:
    """Return a copy of the demo's model that states how it is drawn."""
    shutil.copytree(DEMO, folder)
    (folder / "sd3_light.json").write_text(json.dumps({"sampling": sampling}))
    return folder


def test_a_model_is_drawn_as_its_export_or_user_states(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = stating(tmp_path / "model", steps=3, guidance=1.0)
    _, policy = open_policy(folder)
    assert policy.drawing(None, None) == (3, 1.0)
    assert policy.drawing(None, None, 20) == (3, 1.0)
    assert policy.drawing(5, None) == (5, 1.0)
    assert policy.drawing(None, 2.0) == (3, 2.0)
    assert "stated" not in policy.facts()
    rows = [PromptRow("a star")]
    sample.run(folder, rows, [3], tmp_path / "own", SampleOptions(**SIZE, grid=False))
    assert "3 steps, guidance 1: as its export says" in shown(capsys)
    facts = read_png_facts(tmp_path / "own" / "00000.png")
    assert (facts["steps"], facts["guidance"]) == (3, 1.0)
    chosen = {"a": choose_model(folder)}
    assert against._drawing(chosen, against.AgainstOptions()) == (3, 1.0)


def test_an_invalid_statement_is_one_line(tmp_path: Path) -> None:
    folder = stating(tmp_path / "model")
    statements: list[Any] = [{"steps": steps} for steps in (0, True, "4", 10**9)]
    statements += [{"guidance": guidance} for guidance in (-1, None, float("nan"), 10**400)]
    for sampling in (*statements, {"last_time": 1.0}, [4], None):
        (folder / "sd3_light.json").write_text(json.dumps({"sampling": sampling}))
        with pytest.raises(sample.UserError, match=r"sd3_light\.json: sampling.* is .*; export the model again"):
            open_policy(folder)


@pytest.mark.parametrize("moved", [False, True])
def test_an_adapter_s_file_states_it_too(tmp_path: Path, capsys: pytest.CaptureFixture[str], moved: bool) -> None:
    layer = "transformer_blocks.0.attn.to_q"
    module = LoraModule(torch.zeros(2, 256), torch.zeros(256, 2), 1.0)
    facts = {"sampling": {"steps": 2, "guidance": 1.0, "last_time": 0.5}}
    names = family_named("sd3").files.adapters
    file = write_lora(tmp_path / "lora.safetensors", {layer: module}, facts=facts, names=names)
    if moved:  # a program that renames files keeps their metadata
        file = file.rename(tmp_path / "other.safetensors")
    opened = sample.open_model(DEMO, SampleOptions(loras=(Lora(file),)), Launch())
    assert opened.policy.drawing(None, None) == (2, 1.0)
    assert opened.pipe.scheduler.config.shift_terminal == 0.5
    lora.merge(DEMO, [Lora(file)], tmp_path / "merged")
    assert open_policy(tmp_path / "merged")[1].drawing(None, None) == (2, 1.0)
    scheduler = json.loads((tmp_path / "merged" / "scheduler" / "scheduler_config.json").read_text())
    assert scheduler["shift_terminal"] == 0.5
    with pytest.raises(sample.UserError, match="needs at least 2 steps"):
        next(stream_images(opened.pipe, [ImageRequest("a star", 0, 64, 64, steps=1)], opened.policy))
    facts = {"sampling": {"last_time": 0.3}}
    alone = write_lora(tmp_path / "alone.safetensors", {layer: module}, facts=facts, names=names)
    opened = sample.open_model(DEMO, SampleOptions(loras=(Lora(alone),)), Launch())
    assert opened.pipe.scheduler.config.shift_terminal == 0.3, "without steps and guidance"
