"""LoRAs and models of the playground: which files are listed, and how those of an image are found again."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from sd3_light.assets import DEMO
from sd3_light.export.weights_fingerprint import file_fingerprint, model_fingerprint
from sd3_light.ui.folders import Folders, folder_id
from sd3_light.ui.playground import Playground
from tests.refusals import refused
from tests.unit.ui.conftest import write_run

KEY = "transformer.transformer_blocks.0.attn.to_q.lora_A.weight"


def write_adapter(path: Path, key: str = KEY, value: float = 0.0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({key: torch.full((2,), value)}, path)
    return path


def test_files_and_exports_of_runs_are_listed(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    files = [
        write_adapter(run / "exports" / "step-10" / "pytorch_lora_weights.safetensors"),
        write_adapter(tmp_path / "a <b>&.safetensors", "lora_unet_x.lora_down.weight"),
        write_adapter(tmp_path / "deep" / "lokr.safetensors", "lycoris_x.lokr_w1"),
    ]
    write_adapter(tmp_path / "weights.safetensors", "transformer_blocks.0.attn.to_q.weight")
    write_adapter(tmp_path / "model" / "transformer" / "lora.safetensors")
    (tmp_path / "model" / "model_index.json").touch()
    write_adapter(tmp_path / "model" / "lora.safetensors")
    (tmp_path / "link.safetensors").symlink_to(files[1])
    (tmp_path / "linked").symlink_to(tmp_path / "deep")
    (run / "exports" / "step-20").symlink_to(tmp_path / "deep")
    (tmp_path / "huge.safetensors").write_bytes((1 << 40).to_bytes(8, "little") + b"{}")
    (tmp_path / "odd.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0[]")
    os.mkfifo(tmp_path / "pipe.safetensors")
    found = Folders([tmp_path]).adapters()
    assert {path for _, path in found.values()} == set(files)
    assert found[folder_id(files[1])][0] == "a <b>&.safetensors"
    page = Playground(Folders([tmp_path]), tmp_path / "out", [], lambda: pytest.fail("no library")).page()
    assert "a &lt;b&gt;&amp;.safetensors" in page


def facts(**more: Any) -> str:
    values = {"prompt": "a star", "negative_prompt": "", "seed": 2**62 + 1, "width": 32, "height": 48, "steps": 3}
    values |= {"guidance": 2.5, "sampler": "dpm++", "shift": 3.0, "dtype": "bfloat16", "threads": 1, "model": "demo"}
    return json.dumps(values | {"fingerprint": model_fingerprint(DEMO), "loras": []} | more)


@pytest.fixture
def playground(tmp_path: Path) -> Playground:
    return Playground(Folders([tmp_path]), tmp_path / "out", [DEMO], lambda: pytest.fail("no device is needed"))


def test_the_settings_of_an_image_fill_the_form(playground: Playground, tmp_path: Path) -> None:
    file = write_adapter(tmp_path / "renamed.safetensors", value=1.0)
    lora = {"file": "style.safetensors", "strength": 0.5, "fingerprint": file_fingerprint(file)}
    lost = {"file": "lost.safetensors", "strength": 2, "fingerprint": "0" * 16}
    values = playground.settings_of(facts(loras=[lora, lost]))
    assert values["seeds"] == str(2**62 + 1)
    assert (values["width"], values["height"], values["steps"], values["guidance"]) == (32, 48, 3, 2.5)
    assert (values["sampler"], values["dtype"], values["shift"]) == ("dpm++", "bfloat16", 3.0)
    assert values["model"] == folder_id(DEMO)
    assert values["chosen_loras"] == {folder_id(file): 0.5}
    assert values["notes"] == [f"the LoRA lost.safetensors ({'0' * 16}) is not among the listed files; write FILE:2"]
    values = playground.settings_of(facts(fingerprint="f" * 16))
    assert values["model"] is None
    assert values["notes"] == [f"none of the models here has the weights of demo ({'f' * 16})"]


@pytest.mark.parametrize("text", ["", "[]", "{}", "[" * 2000, '{"prompt": 1}', facts(steps=10**400), facts(loras={})])
def test_settings_that_are_damaged_are_refused(playground: Playground, text: str) -> None:
    refused("the image: ", playground.settings_of, text)


def test_a_fingerprint_sees_a_change_anywhere_in_a_large_file(tmp_path: Path) -> None:
    prints = set()
    for part in range(17):  # the last one changes nothing
        data = bytearray(3 << 20)
        data[part * 3 << 16 : (part + 1) * 3 << 16] = bytes([part < 16]) * (3 << 16)
        (tmp_path / str(part)).write_bytes(data[: 3 << 20])
        prints.add(file_fingerprint(tmp_path / str(part)))
    assert len(prints) == 17
