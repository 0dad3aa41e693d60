"""A LoRA on SD3 by a script of one's own: `python sd3_lora_task.py MODEL PICTURES OUT [process | train]`.

PICTURES holds NAME.png with NAME.txt beside it. Without a last word encoders and denoiser run together; `process` runs
the encoders once, and `train` goes on from what they left in OUT/processed.
"""

import sys
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from diffusers import StableDiffusion3Pipeline
from PIL import Image

from sd3_light.tasks import (
    DiffusionTrainingModule,
    FlowMatchSFTLoss,
    ModelLogger,
    PipelineUnit,
    ProcessedDataset,
    launch_data_process_task,
    launch_training_task,
)


class Pictures(torch.utils.data.Dataset):
    """Dicts with a picture and its caption."""

    def __init__(self, folder):
        self.files = sorted(Path(folder).glob("*.png"))

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        file = self.files[index]
        return {"image": Image.open(file).convert("RGB"), "prompt": file.with_suffix(".txt").read_text()}


class EncodeImage(PipelineUnit):
    reads, writes, uses = ("image",), ("moments",), ("vae",)

    def run(self, module, image):
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None].float() / 127.5 - 1
        return {"moments": module.vae.encode(pixels.to(module.device)).latent_dist.parameters[0]}


class EncodeText(PipelineUnit):
    reads, writes, uses = ("prompt",), ("text", "pooled"), ("encoders",)

    def run(self, module, prompt):
        text, _, pooled, _ = module.pipe.encode_prompt(
            prompt, None, None, do_classifier_free_guidance=False, max_sequence_length=16
        )
        return {"text": text[0], "pooled": pooled[0]}


class DrawLatent(PipelineUnit):
    """The VAE's posterior, drawn anew in each epoch: it is random, so it is never cached."""

    reads, writes, draws = ("moments",), ("latents",), True

    def run(self, module, moments, draw):
        mean, log_variance = moments.chunk(2)
        latent = mean + (log_variance / 2).exp() * draw("posterior", tuple(mean.shape))
        return {"latents": (latent - module.shift) * module.scale}


class Sd3Lora(DiffusionTrainingModule):
    reads = ("text", "pooled")

    def __init__(self, folder):
        pipe = StableDiffusion3Pipeline.from_pretrained(folder, torch_dtype=torch.float32)
        super().__init__(pipe.transformer, [EncodeImage(), EncodeText(), DrawLatent()], FlowMatchSFTLoss(shift=3.0))
        self.pipe, self.vae = pipe, pipe.vae
        self.encoders = torch.nn.ModuleList([pipe.text_encoder, pipe.text_encoder_2, pipe.text_encoder_3])
        self.scale, self.shift = pipe.vae.config.scaling_factor, pipe.vae.config.shift_factor
        self.train_adapter(rank=8, alpha=8, target_modules=["attn.to_*", "attn.add_*_proj"])

    def denoise(self, noisy, t, inputs):
        return self.transformer(noisy, inputs["text"], inputs["pooled"], 1000 * t, return_dict=False)[0]


if __name__ == "__main__":
    model, pictures, out, *stage = sys.argv[1:]
    accelerator, module, data = Accelerator(), Sd3Lora(model), Pictures(pictures)
    if stage == ["process"]:
        launch_data_process_task(accelerator, data, module, ModelLogger(f"{out}/processed"), num_workers=0)
    else:
        data = ProcessedDataset(f"{out}/processed") if stage == ["train"] else data
        settings = {"batch_size": 2, "warmup_steps": 2, "ema_decay": 0.9, "checkpoint_steps": 4, "resume": True}
        launch_training_task(accelerator, data, module, ModelLogger(out), 1e-3, num_workers=0, num_epochs=2, **settings)
