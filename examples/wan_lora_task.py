"""Train a LoRA on another model class, a small Wan video transformer, on random clips: python wan_lora_task.py OUT"""

import sys

import torch
from accelerate import Accelerator
from diffusers import WanTransformer3DModel

from sd3_light import tasks


def clip(index):
    """Return latents [channels, frames, height, width] of 1 or 3 frames, and text features."""
    random = torch.Generator().manual_seed(index)
    size = (4, 1 + 2 * (index % 2), 8, 8)
    return {"latents": torch.randn(size, generator=random), "text": torch.randn(6, 32, generator=random)}


class WanLora(tasks.DiffusionTrainingModule):
    def __init__(self):
        torch.manual_seed(0)
        heads = {"num_attention_heads": 2, "attention_head_dim": 12, "num_layers": 2, "rope_max_seq_len": 32}
        widths = {"in_channels": 4, "out_channels": 4, "text_dim": 32, "freq_dim": 32, "ffn_dim": 48}
        loss = tasks.FlowMatchSFTLoss(timestep_sample_method="uniform", shift=5.0)
        super().__init__(WanTransformer3DModel(**heads, **widths), loss=loss, reads=("text",))
        self.train_adapter(rank=4, dropout=0.1, target_modules=["attn1.to_q", "attn1.to_v", "ffn.net.2"])

    def denoise(self, noisy, t, inputs):
        return self.transformer(noisy, 1000 * t, inputs["text"], return_dict=False)[0]


if __name__ == "__main__":
    clips = [clip(index) for index in range(12)]
    settings = {"batch_size": 2, "lr_scheduler": "cosine", "eval_dataset": clips, "eval_steps": 6}
    settings |= {"bucket_of": lambda index: clips[index]["latents"].shape, "save_steps": 6, "num_epochs": 2}
    tasks.launch_training_task(Accelerator(), clips, WanLora(), tasks.ModelLogger(sys.argv[1]), 1e-3, **settings)
