"""The public Python API for custom scripts: train denoisers of diffusers, in one stage or two."""

from sd3_light.config.faults import Stopped
from sd3_light.core.batch import Batch
from sd3_light.core.columns import Column
from sd3_light.core.family import Family
from sd3_light.core.objective import Objective
from sd3_light.evaluate.rewards import reward
from sd3_light.export.wan_names import wan_to_comfyui
from sd3_light.flow.losses import FlowMatchDPOLoss, FlowMatchSFTLoss
from sd3_light.flow.packing import pack_latents, unpack_latents
from sd3_light.sources.video import write_video
from sd3_light.tasks.cost import check
from sd3_light.tasks.datasets import ImageFolder, VideoDataset
from sd3_light.tasks.logger import ModelLogger
from sd3_light.tasks.module import DiffusionTrainingModule
from sd3_light.tasks.prior import ClassPictures, WithPrior
from sd3_light.tasks.process import launch_data_process_task
from sd3_light.tasks.processed import ProcessedDataset
from sd3_light.tasks.ready_made import DrawLatent, EncodeImage, EncodeVideo, drop_text
from sd3_light.tasks.rewarded import launch_reward_task
from sd3_light.tasks.settings import TaskSettings
from sd3_light.tasks.train import launch_training_task
from sd3_light.tasks.units import PipelineUnit, unit

__all__ = [
    "Batch",
    "ClassPictures",
    "Column",
    "DiffusionTrainingModule",
    "DrawLatent",
    "EncodeImage",
    "EncodeVideo",
    "Family",
    "FlowMatchDPOLoss",
    "FlowMatchSFTLoss",
    "ImageFolder",
    "ModelLogger",
    "Objective",
    "PipelineUnit",
    "ProcessedDataset",
    "Stopped",
    "TaskSettings",
    "VideoDataset",
    "WithPrior",
    "check",
    "drop_text",
    "launch_data_process_task",
    "launch_reward_task",
    "launch_training_task",
    "pack_latents",
    "reward",
    "unit",
    "unpack_latents",
    "wan_to_comfyui",
    "write_video",
]
