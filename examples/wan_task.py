"""Train a LoRA, or all weights, of a Wan text-to-video model on a folder of captioned clips.

    python wan_task.py MODEL CLIPS OUT --stage process    # encode the clips once
    python wan_task.py MODEL CLIPS OUT                    # train on them; start it again to resume

MODEL is a diffusers folder with one transformer, such as Wan2.1-T2V-1.3B. CLIPS has a.mp4 and a.txt, or a table with
a column `video`. Options: --full (all weights), --stage both (encode in every step), and those below.
"""

import argparse

import torch
from accelerate import Accelerator
from diffusers import WanPipeline

from sd3_light import tasks


@tasks.unit("text", uses="text_encoder")
def encode_text(module, prompt):
    options = {"do_classifier_free_guidance": False, "max_sequence_length": 512}
    return module.pipe.encode_prompt(prompt, **options)[0][0]


class Wan(tasks.DiffusionTrainingModule):
    def __init__(self, folder, full=False):
        pipe = WanPipeline.from_pretrained(folder, dtype={"text_encoder": torch.bfloat16, "default": torch.float32})
        units = [tasks.EncodeVideo(sample=False), encode_text, tasks.DrawLatent()]
        loss = tasks.FlowMatchSFTLoss(timestep_sample_method="uniform", shift=5.0)
        super().__init__(pipe.transformer, units, loss, reads=("text",))
        self.pipe, self.vae, self.text_encoder = pipe, pipe.vae, pipe.text_encoder
        self.transformer.enable_gradient_checkpointing()
        if not full:
            self.train_adapter(rank=16, target_modules=["attn1.to_*", "attn2.to_*", "ffn.net.*"])

    def denoise(self, noisy, t, inputs):
        return self.transformer(noisy, 1000 * t, inputs["text"].to(noisy.dtype), return_dict=False)[0]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("model", "clips", "out"):
        parser.add_argument(name)
    parser.add_argument("--stage", choices=("process", "train", "both"), default="train")
    parser.add_argument("--full", action="store_true")
    for name, default in (("frames", 81), ("fps", 16.0), ("side", 480), ("epochs", 10), ("rate", 1e-4)):
        parser.add_argument(f"--{name}", type=type(default), default=default)
    args = parser.parse_args()
    module, processed = Wan(args.model, args.full), f"{args.out}/processed"
    accelerator = Accelerator(mixed_precision="bf16" if torch.cuda.is_available() else "no")
    if args.stage == "train":
        clips = tasks.ProcessedDataset(processed)
    else:
        clips = tasks.VideoDataset(args.clips, args.frames, args.fps, resolutions=[args.side], enable_ar_bucket=True)
    if args.stage == "process":
        tasks.launch_data_process_task(accelerator, clips, module, tasks.ModelLogger(processed))
    else:
        logger, settings = tasks.ModelLogger(args.out), {"resume": True, "checkpoint_steps": 200}
        tasks.launch_training_task(accelerator, clips, module, logger, args.rate, num_epochs=args.epochs, **settings)
