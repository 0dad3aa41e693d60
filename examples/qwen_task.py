"""Train Qwen-Image, a LoRA or all weights: `python qwen_task.py MODEL IMAGES OUT [--full]`.

MODEL is a diffusers folder. IMAGES has NAME.png, with sides that are multiples of 16, and NAME.txt.
"""

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from diffusers import QwenImagePipeline
from PIL import Image

from sd3_light import tasks

LAYERS = ["attn.to_[qkv]", "attn.to_out.0", "attn.add_*_proj", "img_mlp.net.*", "img_mod.1", "txt_mod.1"]


@tasks.unit("text", uses="encoder")
def encode_text(module, prompt):
    return module.pipe.encode_prompt(prompt)[0][0]


class QwenImage(tasks.DiffusionTrainingModule):
    reads, pads = ("text",), ("text",)

    def __init__(self, pipe, full):
        units = [tasks.EncodeImage(), *tasks.drop_text(encode_text, 0.1, prompt=" "), tasks.DrawLatent()]
        super().__init__(pipe.transformer, units, tasks.FlowMatchSFTLoss(flux_shift=True))
        self.pipe, self.vae, self.encoder = pipe, pipe.vae, pipe.text_encoder
        self.transformer.enable_gradient_checkpointing()
        last = self.transformer.transformer_blocks[-1]
        for unused in (last.attn.to_add_out, last.txt_mlp):  # the last block's text goes nowhere
            unused.requires_grad_(False)
        if not full:
            self.train_adapter(rank=16, target_modules=LAYERS)

    def denoise(self, noisy, t, inputs):
        height, width = noisy.shape[-2:]
        shapes = [[(1, height // 2, width // 2)]] * len(noisy)
        text = (inputs["text"], inputs["text_mask"])
        tokens = self.transformer(tasks.pack_latents(noisy), *text, t, shapes, return_dict=False)[0]
        return tasks.unpack_latents(tokens, height, width)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("paths", nargs=3, metavar=("MODEL", "IMAGES", "OUT"))
    parser.add_argument("--full", action="store_true")
    (model, images, out), full = vars(parser.parse_args()).values()
    files = sorted(Path(images).glob("*.png"))
    data = [
        {"image": Image.open(file).convert("RGB"), "prompt": file.with_suffix(".txt").read_text()} for file in files
    ]
    module = QwenImage(QwenImagePipeline.from_pretrained(model, dtype=torch.float32), full)
    settings = {"batch_size": 2, "bucket_of": lambda index: data[index]["image"].size, "resume": True}
    accelerator = Accelerator(mixed_precision="bf16" if torch.cuda.is_available() else "no")
    rate = 1e-5 if full else 1e-4
    tasks.launch_training_task(accelerator, data, module, tasks.ModelLogger(out), rate, num_epochs=2, **settings)
