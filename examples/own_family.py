"""Train your own kind of model: `python own_family.py IMAGES OUT [process | train]`; IMAGES has images with captions.

The denoiser and its encoders are toys. Put yours in their place: whatever torch modules you have.
"""

import sys

import numpy as np
import torch
from PIL import Image
from torch import nn

from sd3_light import tasks


@tasks.unit("latents", uses="vae")  # cached: it uses no part that trains and draws nothing
def encode_image(module, image):
    return module.vae(torch.from_numpy(np.array(image)).permute(2, 0, 1).to(module.device) / 127.5 - 1)


@tasks.unit("text", uses="letters")
def encode_text(module, prompt):
    return module.letters(torch.tensor([min(ord(letter), 127) for letter in f"{prompt} "], device=module.device))


class Family(tasks.DiffusionTrainingModule):
    reads, pads = ("text",), ("text",)  # texts of unequal length are padded, and `text_mask` is true for real rows

    def __init__(self, width=32):
        net = nn.ModuleDict({"image": nn.Linear(3, width), "text": nn.Linear(16, width), "out": nn.Linear(width, 3)})
        net["blocks"] = nn.ModuleList(nn.TransformerEncoderLayer(width, 4, 64, 0.0, batch_first=True) for _ in range(2))
        units = [encode_image, *tasks.drop_text(encode_text, 0.1)]
        super().__init__(net, units, tasks.FlowMatchSFTLoss(shift=2.0))
        self.vae, self.letters = nn.AvgPool2d(8), nn.Embedding(128, 16)

    def denoise(self, noisy, t, inputs):  # t from 0 (data) to 1 (noise) -> noise minus data
        image, text = self.transformer["image"](noisy.flatten(2).mT), self.transformer["text"](inputs["text"])
        tokens = torch.cat([image + t[:, None, None], text * inputs["text_mask"][..., None]], dim=1)
        for block in self.transformer["blocks"]:
            tokens = block(tokens)
        return self.transformer["out"](tokens[:, : image.shape[1]]).mT.reshape(noisy.shape)


def draw(module, steps=8):
    latents, text = torch.randn(1, 3, 8, 8, device=module.device), encode_text.run(module, prompt="a dot")["text"][None]
    for step in range(steps):
        t = torch.full((1,), 1 - step / steps, device=module.device)
        latents -= module.denoise(latents, t, {"text": text, "text_mask": torch.ones_like(text[..., 0])}) / steps
    return Image.fromarray(((latents[0].permute(1, 2, 0).cpu().clip(-1, 1) + 1) * 127.5).byte().numpy())


images, out, *stage = sys.argv[1:]
torch.manual_seed(0)
data, module = tasks.ImageFolder(images, resolutions=[64], enable_ar_bucket=True), Family()
if stage == ["process"]:  # compute and store once what does not change
    tasks.launch_data_process_task(None, data, module, tasks.ModelLogger(f"{out}/processed"), num_workers=2)
else:
    data = tasks.ProcessedDataset(f"{out}/processed") if stage == ["train"] else data
    settings = {"engine": "torch", "batch_size": 2, "ema_decay": 0.9, "draw": draw, "draw_steps": 4, "resume": True}
    tasks.launch_training_task(None, data, module, tasks.ModelLogger(out), 1e-3, num_epochs=2, **settings)
