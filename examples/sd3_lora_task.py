"""Train a LoRA on SD3: `python sd3_lora_task.py MODEL IMAGES OUT [process | train]`; IMAGES has NAME.png, NAME.txt."""

import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from diffusers import StableDiffusion3Pipeline
from PIL import Image

from sd3_light import tasks


@tasks.unit("text", "pooled", uses="encoders")
def encode_text(module, prompt):
    text, _, pooled, _ = module.pipe.encode_prompt(prompt, None, None, do_classifier_free_guidance=False)
    return text[0], pooled[0]


class Sd3Lora(tasks.DiffusionTrainingModule):
    def __init__(self, pipe):
        units, shift = [tasks.EncodeImage(), encode_text, tasks.DrawLatent()], pipe.scheduler.config.shift
        super().__init__(pipe.transformer, units, tasks.FlowMatchSFTLoss(shift=shift), reads=("text", "pooled"))
        self.pipe, self.vae = pipe, pipe.vae
        self.encoders = torch.nn.ModuleList([pipe.text_encoder, pipe.text_encoder_2, pipe.text_encoder_3])
        self.train_adapter(rank=8, target_modules=["attn.to_*", "attn.add_*_proj"])

    def denoise(self, noisy, t, inputs):
        return self.transformer(noisy, inputs["text"], inputs["pooled"], 1000 * t, return_dict=False)[0]


model, files, out, stage = sys.argv[1], sorted(Path(sys.argv[2]).glob("*.png")), sys.argv[3], sys.argv[4:]
data = [{"image": Image.open(file).convert("RGB"), "prompt": file.with_suffix(".txt").read_text()} for file in files]
module = Sd3Lora(StableDiffusion3Pipeline.from_pretrained(model, dtype=torch.float32))
if stage == ["process"]:  # compute and store once what needs no gradient and draws nothing
    tasks.launch_data_process_task(Accelerator(), data, module, tasks.ModelLogger(f"{out}/processed"))
else:
    data = tasks.ProcessedDataset(f"{out}/processed") if stage == ["train"] else data
    settings = {"batch_size": 2, "warmup_steps": 2, "ema_decay": 0.9, "checkpoint_steps": 4, "resume": True}
    tasks.launch_training_task(Accelerator(), data, module, tasks.ModelLogger(out), 1e-3, num_epochs=2, **settings)
