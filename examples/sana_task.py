"""Train Sana, a LoRA or all weights: `python sana_task.py MODEL IMAGES OUT [--full]`.

MODEL is a diffusers folder. IMAGES has NAME.png, with sides that are multiples of 32, and NAME.txt.
"""

import argparse
import inspect
from pathlib import Path

import torch
from accelerate import Accelerator
from diffusers import SanaPipeline
from PIL import Image

from sd3_light import tasks

LAYERS = ["attn1.to_*", "attn2.to_*"]
INSTRUCTION = inspect.signature(SanaPipeline.__call__).parameters["complex_human_instruction"].default


@tasks.unit("text", uses="encoder")
def encode_text(module, prompt, instruction=INSTRUCTION):
    text, mask, *_ = module.pipe.encode_prompt(prompt, False, complex_human_instruction=instruction)
    return text[0][mask[0].bool()]


class Sana(tasks.DiffusionTrainingModule):
    reads, pads = ("text",), ("text",)

    def __init__(self, pipe, full):
        dropped = tasks.drop_text(encode_text, 0.1, prompt="", instruction=None)
        units = [tasks.EncodeImage(), *dropped, tasks.DrawLatent()]
        super().__init__(pipe.transformer, units, tasks.FlowMatchSFTLoss(shift=3.0))
        self.pipe, self.vae, self.encoder = pipe, pipe.vae, pipe.text_encoder
        self.transformer.enable_gradient_checkpointing()
        if not full:
            self.train_adapter(rank=16, target_modules=LAYERS)

    def denoise(self, noisy, t, inputs):
        time = 1000 * t * self.transformer.config.timestep_scale
        text = {"encoder_attention_mask": inputs["text_mask"]}
        return self.transformer(noisy, inputs["text"], time, **text, return_dict=False)[0]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("paths", nargs=3, metavar=("MODEL", "IMAGES", "OUT"))
    parser.add_argument("--full", action="store_true")
    (model, images, out), full = vars(parser.parse_args()).values()
    files = sorted(Path(images).glob("*.png"))
    data = [
        {"image": Image.open(file).convert("RGB"), "prompt": file.with_suffix(".txt").read_text()} for file in files
    ]
    module = Sana(SanaPipeline.from_pretrained(model, dtype=torch.float32), full)
    settings = {"batch_size": 2, "bucket_of": lambda index: data[index]["image"].size, "resume": True}
    accelerator = Accelerator(mixed_precision="bf16" if torch.cuda.is_available() else "no")
    rate = 1e-5 if full else 1e-4
    tasks.launch_training_task(accelerator, data, module, tasks.ModelLogger(out), rate, num_epochs=2, **settings)
