"""The same API with another class: a LoRA on a small Wan video transformer, `python wan_lora_task.py OUT`.

The clips are random latents of two lengths, so that the script runs anywhere; your own data set gives yours.
"""

import sys

import torch
from accelerate import Accelerator
from diffusers import WanTransformer3DModel

from sd3_light.tasks import DiffusionTrainingModule, FlowMatchSFTLoss, ModelLogger, launch_training_task


class Clips(torch.utils.data.Dataset):
    """Latents [channels, frames, height, width] of 1 or 3 frames, and the text's features."""

    def __len__(self):
        return 12

    def bucket_of(self, index):
        return f"{1 + 2 * (index % 2)} frames"

    def __getitem__(self, index):
        random = torch.Generator().manual_seed(index)
        frames = 1 + 2 * (index % 2)
        return {"latents": torch.randn(4, frames, 8, 8, generator=random), "text": torch.randn(6, 32, generator=random)}


class WanLora(DiffusionTrainingModule):
    reads = ("text",)

    def __init__(self):
        shape = {
            "num_attention_heads": 2,
            "attention_head_dim": 12,
            "in_channels": 4,
            "out_channels": 4,
            "text_dim": 32,
        }
        torch.manual_seed(0)
        transformer = WanTransformer3DModel(**shape, freq_dim=32, ffn_dim=48, num_layers=2, rope_max_seq_len=32)
        super().__init__(transformer, loss=FlowMatchSFTLoss(timestep_sample_method="uniform", shift=5.0))
        self.train_adapter(rank=4, dropout=0.1, target_modules=["attn1.to_q", "attn1.to_v", "ffn.net.2"])

    def denoise(self, noisy, t, inputs):
        return self.transformer(noisy, 1000 * t, inputs["text"], return_dict=False)[0]


if __name__ == "__main__":
    settings = {"batch_size": 2, "lr_scheduler": "cosine", "eval_dataset": Clips(), "eval_steps": 6}
    accelerator, logger = Accelerator(), ModelLogger(sys.argv[1])
    launch_training_task(accelerator, Clips(), WanLora(), logger, 1e-3, save_steps=6, num_epochs=2, **settings)
