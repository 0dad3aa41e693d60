"""The script of a tutorial about DiffSynth's training loop: a LoRA on a small video pipeline, in one stage or two.

It is written from the tutorial's description of `launch_training_task` and `launch_data_process_task`, with the
signatures shown there; only the import is ours. Run it as `python tutorial_script.py OUT one|data_process|train`.
"""

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator

from sd3_light.tasks import (
    DiffusionTrainingModule,
    FlowMatchSFTLoss,
    ModelLogger,
    launch_data_process_task,
    launch_training_task,
)


class Videos(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return {"video": torch.rand(3, 4, 8, 8, generator=generator), "prompt": f"video {index}"}


class Cached(torch.utils.data.Dataset):
    """What the first stage saved to `{output_path}/{process_index}/{data_id}.pth`."""

    def __init__(self, output_path):
        self.files = sorted(Path(output_path).glob("*/*.pth"))

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        return torch.load(self.files[index])


class Scheduler:
    timesteps = torch.linspace(1000, 1, 1000)

    def add_noise(self, clean, noise, timestep):
        sigma = timestep / 1000
        return (1 - sigma) * clean + sigma * noise

    def training_target(self, clean, noise, timestep):
        return noise - clean

    def training_weight(self, timestep):
        return 1.0


class LoRALinear(torch.nn.Module):
    def __init__(self, base, rank=2):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_A = torch.nn.Linear(base.in_features, rank, bias=False)
        self.lora_B = torch.nn.Linear(rank, base.out_features, bias=False)
        torch.nn.init.zeros_(self.lora_B.weight)

    def forward(self, x):
        return self.base(x) + self.lora_B(self.lora_A(x))


class VaeUnit:
    def process(self, pipe, inputs):
        return {"input_latents": pipe.vae(inputs["video"][None])}


class PromptUnit:
    def process(self, pipe, inputs):
        tokens = torch.tensor([ord(letter) % 16 for letter in inputs["prompt"]], device=pipe.device)
        return {"context": pipe.text_encoder(tokens).mean(0)}


class VideoPipeline(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.vae = torch.nn.Conv3d(3, 4, (1, 2, 2), (1, 2, 2)).requires_grad_(False)
        self.text_encoder = torch.nn.Embedding(16, 4).requires_grad_(False)
        self.dit = LoRALinear(torch.nn.Linear(4, 4))
        self.units = [VaeUnit(), PromptUnit()]
        self.scheduler, self.in_iteration_models = Scheduler(), ("dit",)
        self.torch_dtype = torch.float32

    @property
    def device(self):
        return self.vae.weight.device

    def model_fn(self, dit, latents, timestep, context, **_):
        return dit(latents.movedim(1, -1) + context + timestep / 1000).movedim(-1, 1)


class VideoTrainingModule(DiffusionTrainingModule):
    def __init__(self, task):
        super().__init__()
        self.pipe = VideoPipeline()
        self.task = task

    def forward(self, data):
        inputs = dict(data)
        if self.task != "train":
            for unit in self.pipe.units:
                inputs.update(unit.process(self.pipe, inputs))
        if self.task == "data_process":
            return {name: inputs[name] for name in ("input_latents", "context")}
        return FlowMatchSFTLoss(self.pipe, **inputs)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("output_path")
    parser.add_argument("task")
    for name in ("learning_rate", "weight_decay"):
        parser.add_argument(f"--{name}", type=float, default=1e-2)
    for name, default in (("dataset_num_workers", 0), ("save_steps", None), ("num_epochs", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = VideoTrainingModule(args.task)
    if args.task == "data_process":
        model_logger = ModelLogger(f"{args.output_path}/cache")
        launch_data_process_task(accelerator, Videos(), model, model_logger, num_workers=8, args=args)
    else:
        dataset = Cached(f"{args.output_path}/cache") if args.task == "train" else Videos()
        model_logger = ModelLogger(f"{args.output_path}/{args.task}")
        settings = {"learning_rate": 1e-5, "weight_decay": 1e-2, "num_workers": 1, "save_steps": None, "num_epochs": 1}
        launch_training_task(accelerator, dataset, model, model_logger, **settings, args=args)
