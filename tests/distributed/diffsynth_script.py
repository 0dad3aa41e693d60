"""A DiffSynth training script: its pipeline, units, dataset, losses and logger, with a tiny random Wan model.

It works with either launcher and takes the options of DiffSynth's scripts; `then` separates runs.
"""

import argparse
import sys
from pathlib import Path

import accelerate
import torch
from diffsynth.core import UnifiedDataset
from diffsynth.diffusion import DiffusionTrainingModule, FlowMatchSFTLoss, ModelLogger, add_general_config
from diffsynth.models.wan_video_dit import WanModel
from diffsynth.models.wan_video_text_encoder import WanTextEncoder
from diffsynth.pipelines.wan_video import WanVideoPipeline
from PIL import Image

from diffsynth.diffusion import launch_data_process_task, launch_training_task  # isort: skip


class TinyVae(torch.nn.Module):
    upsampling_factor = 8

    def __init__(self):
        super().__init__()
        self.model = torch.nn.Conv3d(3, 4, (1, 8, 8), (1, 8, 8))
        self.model.z_dim = 4

    def encode(self, videos, device, **options):
        return self.model(videos.to(device))


def tokenize(text, return_mask, add_special_tokens):
    ids = torch.tensor([[ord(letter) % 32 for letter in text]])
    return ids, torch.ones_like(ids)


def make_pipeline(device, dtype):
    torch.manual_seed(0)
    pipe = WanVideoPipeline(device=device, torch_dtype=dtype)
    pipe.vae, pipe.tokenizer = TinyVae(), tokenize
    pipe.text_encoder = WanTextEncoder(32, 16, 16, 32, num_heads=2, num_layers=1, num_buckets=8)
    pipe.dit = WanModel(24, 4, 32, 4, 16, 8, 1e-6, (1, 2, 2), num_heads=2, num_layers=2, has_image_input=False)
    return pipe.to(device=device, dtype=dtype)


class WanModule(DiffusionTrainingModule):
    def __init__(self, args, device):
        super().__init__()
        self.pipe = make_pipeline(device, getattr(torch, args.dtype))
        trains = (args.trainable_models, args.lora_base_model)
        self.pipe = self.split_pipeline_units(args.task, self.pipe, *trains)
        self.switch_pipe_to_training_mode(self.pipe, *trains, args.lora_target_modules, args.lora_rank, task=args.task)
        self.task = args.task

    def inputs_of(self, data):
        frames = data["video"]
        width, height = frames[0].size
        shared = {"input_video": frames, "height": height, "width": width, "num_frames": len(frames), "cfg_scale": 1}
        shared |= {"tiled": False, "rand_device": self.pipe.device, "cfg_merge": False, "vace_scale": 1}
        shared |= {"use_gradient_checkpointing": True, "use_gradient_checkpointing_offload": False}
        return shared, {"prompt": data["prompt"]}, {}

    def forward(self, data, inputs=None):
        inputs = self.inputs_of(data) if inputs is None else inputs
        inputs = self.transfer_data_to_device(inputs, self.pipe.device, self.pipe.torch_dtype)
        for unit in self.pipe.units:
            inputs = self.pipe.unit_runner(unit, self.pipe, *inputs)
        if self.task.endswith(":data_process"):
            return inputs
        shared, positive, _ = inputs
        return FlowMatchSFTLoss(self.pipe, **shared, **positive)


def main(arguments):
    parser = add_general_config(argparse.ArgumentParser())
    parser.add_argument("--dtype", default="float32")
    for name, kind in (
        ("engine", str),
        ("zero_stage", int),
        ("max_steps", int),
        ("eval_steps", int),
        ("ema_decay", float),
    ):
        parser.add_argument(f"--{name}", type=kind)
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args(arguments)
    accelerator = None
    if args.engine is None:
        accelerator = accelerate.Accelerator(gradient_accumulation_steps=args.gradient_accumulation_steps)
    base = Path(args.dataset_base_path)
    dataset = UnifiedDataset(
        base_path=str(base),
        metadata_path=args.dataset_metadata_path,
        repeat=args.dataset_repeat,
        data_file_keys=("video",),
        main_data_operator=lambda name: [Image.open(base / name).convert("RGB")],
    )
    args.eval_dataset = dataset if args.eval_steps else None
    model = WanModule(args, "cpu" if accelerator is None else accelerator.device)
    model_logger = ModelLogger(args.output_path, args.remove_prefix_in_ckpt, enable_csv_log=args.enable_csv_log)
    launch = launch_data_process_task if args.task.endswith(":data_process") else launch_training_task
    launch(accelerator, dataset, model, model_logger, args=args)


if __name__ == "__main__":
    for run in " ".join(sys.argv[1:]).split(" then "):
        main(run.split())
