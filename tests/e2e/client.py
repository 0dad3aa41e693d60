"""A user of our files without this package: stock diffusers of any version draws images from them.

    python client.py MODEL_FOLDER SINGLE_FILE LORA OUT

Writes one image per file and prompt to OUT (safetensors), and the libraries' versions to OUT.json.
"""

import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from diffusers import StableDiffusion3Pipeline
from safetensors.torch import save_file
from torch import Tensor

PROMPTS = {"en": "a red star left of a blue ring on a white background", "zh": "白色背景上，红色圆形在蓝色正方形的左边"}
CALL: dict[str, Any] = {"num_inference_steps": 4, "guidance_scale": 3.0, "width": 64, "height": 64}
T5_LENGTH, SEED = 16, 5
LIBRARIES = ("diffusers", "transformers", "tokenizers", "huggingface_hub", "peft", "safetensors", "torch")


def draw(pipe: Any, name: str) -> dict[str, Tensor]:
    """Return an image [3, H, W] with values from 0 to 1 per prompt, by ``name`` and language."""
    pipe.set_progress_bar_config(disable=True)
    images = {}
    for language, prompt in PROMPTS.items():
        seed = torch.Generator("cpu").manual_seed(SEED)
        call = {**CALL, "max_sequence_length": T5_LENGTH, "output_type": "pt", "generator": seed}
        images[f"{name} {language}"] = pipe(prompt, **call).images[0].contiguous()
    return images


def main(folder: str, single: str, lora: str, out: str) -> None:
    torch.set_num_threads(1)
    options = {"torch_dtype": torch.float32, "local_files_only": True}
    pipe = StableDiffusion3Pipeline.from_pretrained(folder, **options)
    images = draw(pipe, "folder")
    pipe.load_lora_weights(Path(lora).parent, weight_name=Path(lora).name)
    images |= draw(pipe, "lora")
    pipe = StableDiffusion3Pipeline.from_single_file(single, config=folder, **options)
    pipe.text_encoder_3.eval()  # diffusers leaves it in training mode
    images |= draw(pipe, "single")
    save_file(images, out)
    Path(f"{out}.json").write_text(json.dumps({name: version(name) for name in LIBRARIES}), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
