"""Train Z-Image, a LoRA or all weights: `python z_image_task.py MODEL IMAGES OUT [--full]`.

MODEL is a diffusers folder. IMAGES has NAME.png, with sides that are multiples of 16, and NAME.txt.
"""

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from diffusers import ZImagePipeline
from PIL import Image

from sd3_light import tasks

LAYERS = ["attention.to_*", "feed_forward.w[123]"]


@tasks.unit("text", uses="encoder")
def encode_text(module, prompt):
    return module.pipe.encode_prompt(prompt, do_classifier_free_guidance=False)[0][0]


class ZImage(tasks.DiffusionTrainingModule):
    reads, pads = ("text",), ("text",)

    def __init__(self, pipe, full):
        units = [tasks.EncodeImage(), *tasks.drop_text(encode_text, 0.1), tasks.DrawLatent()]
        super().__init__(pipe.transformer, units, tasks.FlowMatchSFTLoss(flux_shift=True))
        self.pipe, self.vae, self.encoder = pipe, pipe.vae, pipe.text_encoder
        self.transformer.enable_gradient_checkpointing()
        if not full:
            self.train_adapter(rank=16, target_modules=LAYERS)

    def denoise(self, noisy, t, inputs):
        """Z-Image counts time from noise (0) to data (1), and predicts the velocity in that direction."""
        texts = [text[mask] for text, mask in zip(inputs["text"], inputs["text_mask"], strict=True)]
        images = list(noisy.unsqueeze(2))  # one frame each
        velocities = self.transformer(images, 1 - t, texts, return_dict=False)[0]
        return -torch.stack(velocities).squeeze(2)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("paths", nargs=3, metavar=("MODEL", "IMAGES", "OUT"))
    parser.add_argument("--full", action="store_true")
    (model, images, out), full = vars(parser.parse_args()).values()
    files = sorted(Path(images).glob("*.png"))
    data = [
        {"image": Image.open(file).convert("RGB"), "prompt": file.with_suffix(".txt").read_text()} for file in files
    ]
    module = ZImage(ZImagePipeline.from_pretrained(model, dtype=torch.float32), full)
    settings = {"batch_size": 2, "bucket_of": lambda index: data[index]["image"].size, "resume": True}
    accelerator = Accelerator(mixed_precision="bf16" if torch.cuda.is_available() else "no")
    rate = 1e-5 if full else 1e-4
    tasks.launch_training_task(accelerator, data, module, tasks.ModelLogger(out), rate, num_epochs=2, **settings)
