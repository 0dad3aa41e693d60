"""The strict, typed config: TOML in, frozen objects out, all faults in one report (law 7)."""

from sd3_light.config.base import CacheLocation, Resolution
from sd3_light.config.faults import ConfigFaults, Fault, UserError
from sd3_light.config.load import VALIDATION, LoadedConfig, load_config, load_dataset, load_images, resolved_toml
from sd3_light.config.schema_dataset import DatasetConfig, DirectoryConfig
from sd3_light.config.schema_tables import (
    DEFAULT_GUIDANCE,
    AdapterConfig,
    EmaConfig,
    ModelConfig,
    MonitoringConfig,
    OptimizerConfig,
)
from sd3_light.config.schema_train import BatchSize, TrainConfig, batch_size_for
from sd3_light.config.sizes import SIZES, ModelSize, resolve_size, size_from_transformer_config

__all__ = [
    "DEFAULT_GUIDANCE",
    "SIZES",
    "VALIDATION",
    "AdapterConfig",
    "BatchSize",
    "CacheLocation",
    "ConfigFaults",
    "DatasetConfig",
    "DirectoryConfig",
    "EmaConfig",
    "Fault",
    "LoadedConfig",
    "ModelConfig",
    "ModelSize",
    "MonitoringConfig",
    "OptimizerConfig",
    "Resolution",
    "TrainConfig",
    "UserError",
    "batch_size_for",
    "load_config",
    "load_dataset",
    "load_images",
    "resolve_size",
    "resolved_toml",
    "size_from_transformer_config",
]
