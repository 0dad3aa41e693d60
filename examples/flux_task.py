"""Train Flux.1, a LoRA or all weights: `python flux_task.py MODEL IMAGES OUT [--full]`.

MODEL is a diffusers folder. IMAGES has NAME.png, with sides that are multiples of 16, and NAME.txt.
"""

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from diffusers import FluxPipeline
from PIL import Image

from sd3_light import tasks

LAYERS = ["attn.to_*", "attn.add_*_proj", "ff.net.*", "ff_context.net.*", "proj_mlp", "*single*.proj_out"]


@tasks.unit("text", "pooled", uses="encoders")
def encode_text(module, prompt):
    text, pooled, _ = module.pipe.encode_prompt(prompt)
    return text[0], pooled[0]


class Flux(tasks.DiffusionTrainingModule):
    reads = ("text", "pooled")

    def __init__(self, pipe, full, guidance=1.0):
        units = [tasks.EncodeImage(), encode_text, tasks.DrawLatent()]
        super().__init__(pipe.transformer, units, tasks.FlowMatchSFTLoss(flux_shift=True))
        self.pipe, self.vae, self.guidance = pipe, pipe.vae, guidance
        self.encoders = torch.nn.ModuleList([pipe.text_encoder, pipe.text_encoder_2])
        self.transformer.enable_gradient_checkpointing()
        if not full:
            self.train_adapter(rank=16, target_modules=LAYERS)

    def denoise(self, noisy, t, inputs):
        height, width, text = *noisy.shape[-2:], inputs["text"]
        axes = [torch.arange(size, device=noisy.device) for size in (1, height // 2, width // 2)]
        ids = (torch.cartesian_prod(*axes), text.new_zeros(text.shape[1], 3))  # positions of image and text tokens
        guidance = torch.full_like(t, self.guidance) if self.transformer.config.guidance_embeds else None
        tokens = (tasks.pack_latents(noisy), text, inputs["pooled"])
        return tasks.unpack_latents(self.transformer(*tokens, t, *ids, guidance, return_dict=False)[0], height, width)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("paths", nargs=3, metavar=("MODEL", "IMAGES", "OUT"))
    parser.add_argument("--full", action="store_true")
    (model, images, out), full = vars(parser.parse_args()).values()
    files = sorted(Path(images).glob("*.png"))
    data = [
        {"image": Image.open(file).convert("RGB"), "prompt": file.with_suffix(".txt").read_text()} for file in files
    ]
    module = Flux(FluxPipeline.from_pretrained(model, dtype=torch.float32), full)
    settings = {"batch_size": 2, "bucket_of": lambda index: data[index]["image"].size, "resume": True}
    accelerator = Accelerator(mixed_precision="bf16" if torch.cuda.is_available() else "no")
    rate = 1e-5 if full else 1e-4
    tasks.launch_training_task(accelerator, data, module, tasks.ModelLogger(out), rate, num_epochs=2, **settings)
