"""Cancelling within an operation, previews that change no bit, and images that are drawn again from their PNG."""

import json
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
from sd3_light.config.faults import UserError
from sd3_light.engines import Launch
from sd3_light.export.chosen import choose_model
from sd3_light.sample import phases
from sd3_light.sample.again import drawn_image, options_again, read_drawn_image
from sd3_light.sample.generate import Cancelled
from sd3_light.sample.image_requests import PromptRow
from sd3_light.sample.png import PNG_FACTS, read_png_facts, save_png
from sd3_light.sample.verb import OpenModel, SampleOptions, open_model, run
from sd3_light.sample.watch import Preview, StepEstimate, Watch, as_grid, cancellable
from tests.families import PIPELINES
from tests.stock import save_stock

pytestmark = pytest.mark.usefixtures("prx_without_ftfy")
Command = Callable[..., str]
OPTIONS = SampleOptions(steps=3, width=32, height=32)
DRAWING = [name for name in PIPELINES if not name.startswith("qwen_image_edit")]  # which draw from images only


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
    for number, options in enumerate(
        (SampleOptions(steps=3, shift=5.0), SampleOptions(steps=3, sampler="heun"), SampleOptions(steps=3))
    ):
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
