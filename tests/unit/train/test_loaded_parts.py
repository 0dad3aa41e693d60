"""While a denoiser trains, no text encoder is in memory, and the VAE is on the device only while it decodes."""

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import WeakSet

import pytest
from torch import nn
from transformers import PreTrainedModel

from sd3_light.check import verb as check
from sd3_light.config import SIZES
from sd3_light.encoding.vae import VaeDecoder
from sd3_light.engines.torch import TorchEngine
from sd3_light.families.sd3.random_weights import new_transformer
from sd3_light.train import verb as train
from tests.families import make_pipeline
from tests.project import Project
from tests.stock_project import LORA, write_project

pytestmark = pytest.mark.usefixtures("unproven")

SAMPLING = ('prompts=["a star that the cache lacks"]', "every_n_steps=1", "steps=1", "before_first_step=true")
KEYS = (*(f"sampling.{key}" for key in SAMPLING), "max_steps=2", 'output_dir="watched"')


class Watch:
    """Remembers text encoders, and the VAEs that are on the device."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.encoders: WeakSet[nn.Module] = WeakSet()
        self.loaded: list[str] = []
        self.decoding: list[VaeDecoder] = []
        self.decoded = 0
        construct, enter, leave = PreTrainedModel.__init__, VaeDecoder.__enter__, VaeDecoder.__exit__

        def remember(model: Any, *args: Any, **options: Any) -> None:
            construct(model, *args, **options)
            self.encoders.add(model)
            self.loaded.append(type(model).__name__)

        def begin(decoder: VaeDecoder) -> VaeDecoder:
            self.decoding.append(decoder)
            self.decoded += 1
            return enter(decoder)

        def end(decoder: VaeDecoder, *error: object) -> None:
            leave(decoder, *error)
            self.decoding.remove(decoder)

        monkeypatch.setattr(PreTrainedModel, "__init__", remember)
        monkeypatch.setattr(VaeDecoder, "__enter__", begin)
        monkeypatch.setattr(VaeDecoder, "__exit__", end)

    def require_none(self) -> None:
        gc.collect()
        assert not list(self.encoders), "a text encoder is in memory"
        assert not self.decoding, "a VAE is on the device"


@pytest.fixture
def project_of(tmp_path: Path, request: pytest.FixtureRequest) -> Callable[[str], Project]:
    def make(family: str) -> Project:
        if family == "sd3":
            project: Project = request.getfixturevalue("project")
            return project
        make_pipeline(family).save_pretrained(tmp_path / "model")
        return write_project(tmp_path, tmp_path / "model")

    return make


@pytest.mark.parametrize("adapter", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("family", ["sd3", "flux", "wan"])
def test_only_the_denoiser_is_loaded(project_of: Any, monkeypatch: Any, family: str, adapter: bool) -> None:
    project = project_of(family)
    keys = KEYS
    if adapter:
        text = project.train_toml.read_text()
        if family == "sd3":
            text = text.replace('train_type = "sd3_light_pretrain"', "").replace('size = "tiny2"', "")
            new_transformer(SIZES["tiny2"].transformer_config(), 0).save_pretrained(project.folder / "transformer")
            keys = (*KEYS, 'model.init="transformer"')
        project.train_toml.write_text(text + LORA)
    watch = Watch(monkeypatch)
    steps: list[int] = []
    step = TorchEngine.train_step

    def watched(engine: TorchEngine, *args: Any) -> Any:
        watch.require_none()
        result = step(engine, *args)
        watch.require_none()
        steps.append(watch.decoded)
        return result

    monkeypatch.setattr(TorchEngine, "train_step", watched)
    make = TorchEngine.__init__

    def made(engine: TorchEngine, *args: Any, **options: Any) -> None:
        watch.require_none()
        make(engine, *args, **options)

    monkeypatch.setattr(TorchEngine, "__init__", made)
    train.run(check.load(project.train_toml, keys))
    assert watch.loaded, "the prompt was encoded"
    assert steps == [1, 2], "one grid before each step"
    assert watch.decoded == 3
    watch.require_none()
