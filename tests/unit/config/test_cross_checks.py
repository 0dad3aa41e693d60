"""Checks over several keys: each reports its own fault and nothing else."""

from collections.abc import Callable
from typing import Any

import pytest

from sd3_light.config import ConfigFaults, Fault, load_config
from sd3_light.config.cross_checks import one_process_problem
from sd3_light.config.schema_blocks import LayerSyncConfig, RoutingConfig, layer_sync_problem, routing_problem

OnlyFault = Callable[..., Fault]
RECON = "text_recon_gamma = 0.1\n"
AR = "enable_ar_bucket = true\n"
PAIR = 'caption_column = ["a", "b"]\n'
MANUAL = 'partition_method = "manual"\npipeline_stages = 3\n'
RELEASE = "gradient_release = true\ngradient_clipping = 0.0\n"
NARROW = '[optimizer]\nweight_dtype = "bfloat16"\n'
FSDP = 'parallel = "fsdp2"'
ROUTING, SYNC = "[model.routing]\n", "[model.layer_sync]\n"
ALIGNMENT = "[objective.alignment]\n"
AVERAGE = 'teacher = "average"\n'
TEACHER = 'teacher_path = "teacher"\n'
EMA = "[ema]\nenable = true\n"
SAMPLES = '[sampling]\nprompts = ["a"]\nevery_n_steps = 5'
SNAPSHOTS = "snapshot_every_n_steps = 5\n"
PREFETCH = "prefetch_batches_per_worker = 2\n"
EVALUATED = 'eval_datasets = ["data.toml"]\n'
SHAPE = "[model.shape]\nnum_layers = 2\n"
FLOW = "[objective.flow]\n"


@pytest.mark.parametrize(
    ("top", "model", "tables", "key"),
    [
        ("", RECON + "text_recon_target_layer = 14", "", "model.text_recon_target_layer"),
        ("", RECON + "num_layers = 4\ntext_recon_target_layer = 3", "", "model.text_recon_target_layer"),
        ("", RECON + 'size = "tiny2"\ntext_recon_target_layer = 1', "", "model.text_recon_target_layer"),
        ("", RECON + "num_layers = 1", "", "model.text_recon_target_layer"),
        ("", "", FLOW + "[objective.text_recon]\nweight = 0.1\ntarget_layer = 14", "objective.text_recon.target_layer"),
        ("", "", FLOW + "[objective.text_recon]", "objective.text_recon.weight"),
        ("", "", FLOW + "weight = 0", "objective.flow.weight"),
        ("", "", FLOW + "c = 1", "objective.flow.c"),
        ("", "", "[objective]", "objective"),
        ("", "", "[objective.layer_sync]", "objective"),
        ("", "", FLOW + "[objective.layer_sync]\nlate_block = 15", "objective.layer_sync"),
        ("pipeline_stages = 2", "", FLOW + "[objective.layer_sync]", "objective.layer_sync"),
        ("", "", FLOW + ALIGNMENT, "objective.alignment"),
        ("", TEACHER, ALIGNMENT, "objective"),
        ("", TEACHER, FLOW + ALIGNMENT + "block = 15", "objective.alignment"),
        ("", TEACHER, FLOW + ALIGNMENT + "until = 0.0", "objective.alignment.until"),
        ("pipeline_stages = 2", TEACHER, FLOW + ALIGNMENT, "objective.alignment"),
        ("", "", FLOW + ALIGNMENT + AVERAGE, "objective.alignment.teacher"),
        ("", "", FLOW + ALIGNMENT + AVERAGE + "block = 9\nteacher_block = 8\n" + EMA, "objective.alignment"),
        ("", "", FLOW + ALIGNMENT + AVERAGE + ROUTING + EMA, "objective.alignment.teacher"),
        ("pseudo_huber_c = 0.1", "", FLOW, "pseudo_huber_c"),
        ("", RECON, FLOW, "model.text_recon_gamma"),
        ("", "text_recon_target_layer = 1", FLOW, "model.text_recon_target_layer"),
        ("", "", FLOW + SYNC, "model.layer_sync"),
        ("", "shift = 3.0\nflux_shift = true", "", "model.shift"),
        ("pipeline_stages = 2\nzero_stage = 0", "", "", "zero_stage"),
        ("pipeline_stages = 2\nzero_stage = 2", "", "", "zero_stage"),
        (f"pipeline_stages = 2\n{FSDP}", "", "", "parallel"),
        ("pipeline_stages = 18", "", "", "pipeline_stages"),
        ('pipeline_stages = 2\ncache_residence = "device"', "", "", "cache_residence"),
        ("partition_split = [3]\npipeline_stages = 2", "", "", "partition_split"),
        (MANUAL + "partition_split = [3]", "", "", "partition_split"),
        (MANUAL, "", "", "partition_split"),
        (MANUAL + "partition_split = [4, 4]", "", "", "partition_split"),
        (MANUAL + "partition_split = [4, 17]", "", "", "partition_split"),
        (MANUAL + "partition_split = [2, 6]", "num_layers = 4", "", "partition_split"),
        ('lr_scheduler = "step"\nlr_step_size = 3', "", "", "lr_step_gamma"),
        ('lr_scheduler = "step"\nlr_step_gamma = 0.5', "", "", "lr_step_size"),
        ("lr_step_size = 3", "", "", "lr_step_size"),
        (FSDP, "", '[optimizer]\ntype = "adafactor"', "optimizer.type"),
        ("pipeline_stages = 2", "", '[optimizer]\ntype = "muon"', "optimizer.type"),
        ("gradient_release = true", "", "", "gradient_clipping"),
        (RELEASE + "gradient_accumulation_steps = 2", "", "", "gradient_accumulation_steps"),
        (RELEASE + FSDP, "", "", "gradient_release"),
        (RELEASE + "pipeline_stages = 2", "", "", "gradient_release"),
        (RELEASE, "", '[optimizer]\ntype = "muon"', "gradient_release"),
        (RELEASE + "fp8 = true", "", "", "fp8"),
        ("swap_blocks = 3", "", "", "swap_blocks"),
        (FSDP, "", NARROW, "optimizer.weight_dtype"),
        ("", 'transformer_dtype = "float32"', NARROW, "optimizer.weight_dtype"),
        ("", "", NARROW + 'type = "muon"', "optimizer.weight_dtype"),
        ("", "", "[optimizer]\nsplit_modulation = true", "optimizer.split_modulation"),
        ("", "sqrt_shift = true\nflux_shift = true", "", "model.flux_shift"),
        ("", 'timestep_sample_method = "uniform"\nlogit_mean = 0.5', "", "model.logit_mean"),
        ("", 'timestep_sample_method = "uniform"\nuniform_share = 0.1', "", "model.uniform_share"),
        ("", "uniform_share = 1.0", "", "model.uniform_share"),
        ("", 'size = "tiny2"', SHAPE + "num_heads = 4", "model.size"),
        ("", "num_layers = 3", SHAPE + "num_heads = 4", "model.num_layers"),
        ("", "", SHAPE + "num_heads = 4\nhead_dim = 60", "model.shape.head_dim"),
        ("", "", SHAPE + "num_heads = 4\nhead_dim = 512", "model.shape.head_dim"),
        ("", "", SHAPE, "model.shape.num_heads"),
        ("", RECON + "text_recon_target_layer = 1", SHAPE + "num_heads = 2", "model.text_recon_target_layer"),
        ("", "", ROUTING + "first_block = 5\nlast_block = 4", "model.routing"),
        ("", "", ROUTING + "share = 1.0", "model.routing.share"),
        ("", "num_layers = 1", ROUTING, "model.routing"),
        ("pipeline_stages = 2", "", ROUTING, "model.routing"),
        ("", "", SYNC + "early_block = 9\nlate_block = 9", "model.layer_sync"),
        ("", "", SYNC + "weight = 0", "model.layer_sync.weight"),
        ("", 'size = "tiny2"', SYNC, "model.layer_sync"),
        ("pipeline_stages = 2", "", SYNC, "model.layer_sync"),
        ("", "position_crop_side = 193", "", "model.position_crop_side"),
        ("", 'size = "tiny2"\nposition_crop_side = 17', "", "model.position_crop_side"),
        ('lr_scheduler = "cosine"\ncooldown_steps = 2', "", "", "cooldown_steps"),
        ("cooldown_steps = 1000000", "", "", "cooldown_steps"),
        ("cooldown_steps = 1.5", "", "", "cooldown_steps"),
        ("cooldown_steps = -0.2", "", "", "cooldown_steps"),
        ("force_constant_lr = 0.1\ncooldown_steps = 2", "", "", "cooldown_steps"),
        ("", "", '[sampling]\nprompts = ["a"]', "sampling.every_n_steps"),
        ("", "", "[sampling]\nevery_n_steps = 5", "sampling.prompts"),
        ("", "", '[[sampling.image]]\nprompt = "a"', "sampling.every_n_steps"),
        ("", 'uncond_text = "zero"', f'{SAMPLES}\nnegative_prompt = "b"', "sampling.negative_prompt"),
        ("", "", f'{SAMPLES}\n[[sampling.image]]\nprompt = "a"\nnegative_prompt = "b"', "sampling.negative_prompt"),
        ("", "", "[[ema.track]]\nname = 'a'\ndecay = 0.9", "ema.track"),
        ("", "", EMA + "[[ema.track]]\nname = 'ema'\ndecay = 0.9", "ema.track[0].name"),
        ("", "", EMA + "[[ema.track]]\nname = 'raw'\ndecay = 0.9", "ema.track[0].name"),
        ("", "", EMA + "[[ema.track]]\nname = 'a'\ndecay = 0.9\npower_width = 0.1", "ema.track[0]"),
        ("", "", EMA + "[[ema.track]]\nname = 'a'", "ema.track[0]"),
        ("", "", EMA + "[[ema.track]]\nname = 'a'\npower_width = 0.3", "ema.track[0].power_width"),
        ("", "", EMA + "[[ema.track]]\nname = 'a'\ndecay = 0.9\nupdate_every = 0", "ema.track[0].update_every"),
        ("", "", EMA + SNAPSHOTS, "ema.snapshot_every_n_steps"),
        ("", "", EMA + SNAPSHOTS + "[[ema.track]]\nname = 'a'\ndecay = 0.9", "ema.snapshot_every_n_steps"),
        ("", "", EMA + "snapshot_dtype = 'bfloat16'", "ema.snapshot_dtype"),
        (PREFETCH + "dataloader_prefetch_per_worker = 3", "", "", "dataloader_prefetch_per_worker"),
        ("micro_batch_size_per_gpu = [[512, 4]]", "", "", "micro_batch_size_per_gpu"),
        (EVALUATED + "eval_micro_batch_size_per_gpu = [[512, 4]]", "", "", "eval_micro_batch_size_per_gpu"),
    ],
)
def test_train_faults(only_fault: OnlyFault, top: str, model: str, tables: str, key: str) -> None:
    assert only_fault(top, model, tables).key == key


@pytest.mark.parametrize(
    ("top", "model", "tables"),
    [
        ("", RECON + "text_recon_target_layer = 13", ""),
        ("", RECON + "num_layers = 2", ""),
        ("", "text_recon_target_layer = 15", ""),
        ("", "", FLOW + "pseudo_huber_c = 0.1\n[objective.text_recon]\nweight = 0.1\ntarget_layer = 13"),
        ("zero_stage = 3", "text_recon_gamma = 0.0", "[objective.layer_sync]\n" + FLOW),
        ("pipeline_stages = 2", "", ""),
        ("zero_stage = 3", "", ""),
        ("zero_stage = 0", "", ""),
        (MANUAL + "partition_split = [1, 16]", "", ""),
        ('partition_method = "manual"', "", ""),
        ('lr_scheduler = "step"\nlr_step_size = 3\nlr_step_gamma = 0.5', "", ""),
        (FSDP, "", ""),
        ("", "", '[optimizer]\ntype = "muon"'),
        (FSDP, "", '[optimizer]\ntype = "muon"'),
        ("", RECON + "text_recon_target_layer = 0\nqk_norm = false", SHAPE + "num_heads = 4\nhead_dim = 32"),
        ("cooldown_steps = 0.2", "", ""),
        ("epochs = 1", "", ""),
        ("cooldown_steps = 2", "sqrt_shift = true\nlogit_mean = -0.5\nuniform_share = 0.1", ""),
        ("", "", EMA + "snapshot_every_n_steps = 5\n[[ema.track]]\nname = 'a'\npower_width = 0.1\nupdate_every = 1"),
        ("", 'uncond_text = "empty"', f'{SAMPLES}\nnegative_prompt = "b"\nsize = [64, 48]'),
        (PREFETCH + "dataloader_prefetch_per_worker = 2", "", ""),
        ("micro_batch_size_per_gpu = [[512, 4], [256, 8]]", "", ""),
        ("", "position_crop_side = 192", ROUTING + "first_block = 14\nlast_block = 14\n" + SYNC + "late_block = 14"),
        ("pipeline_stages = 2", "position_crop_side = 64", ""),
        ('eval_datasets = ["data.toml", {name = "b", config = "data.toml"}]', "", ""),
        (RELEASE, "", ""),
        (RELEASE, "", NARROW + 'type = "adafactor"'),
        ("gradient_accumulation_steps = 2", "", NARROW),
    ],
)
def test_valid_neighbours_of_those_faults(files: Any, top: str, model: str, tables: str) -> None:
    assert files.load(top, model, tables).train.output_dir.is_absolute()


def test_two_eval_datasets_with_the_same_name(files: Any) -> None:
    faults = files.faults('eval_datasets = ["data.toml", "./data.toml"]')
    assert [fault.key for fault in faults] == ["eval_datasets[0]", "eval_datasets[1]"]


@pytest.mark.parametrize(
    ("missing", "problem", "enough"),
    [
        ("max_steps", "neither epochs nor max_steps", "epochs=1"),
        ("save_every_n_steps", "nothing is ever saved", "checkpoint_every_n_minutes=30"),
        ("save_every_n_steps", "nothing is ever saved", "save_every_n_epochs=1"),
    ],
)
def test_a_run_needs_an_end_and_saves(files: Any, missing: str, problem: str, enough: str) -> None:
    path = files.write()
    path.write_text("\n".join(line for line in path.read_text().splitlines() if not line.startswith(missing)))
    with pytest.raises(ConfigFaults, match=problem):
        load_config(path)
    assert getattr(load_config(path, [enough]).train, missing) is None


@pytest.mark.parametrize(
    ("top", "directory", "key"),
    [
        ("resolutions = [250]", "", "resolutions"),
        ("resolutions = [[256, 100]]", "", "resolutions"),
        ("resolutions = []", "", "resolutions"),
        ("resolutions = [256, 256]", "", "resolutions"),
        ("size_buckets = [[256, 100]]", "", "size_buckets"),
        ("size_buckets = [[256, 256, 1]]", "", "size_buckets"),
        ("resolutions = [256]\nsize_buckets = [[256, 256]]", "", "resolutions"),
        ("resolutions = [256]", "size_buckets = [[256, 256]]\nresolutions = [256]", "directory[0].resolutions"),
        ("", "", "directory[0].resolutions"),
        ("resolutions = [256]\nmin_ar = 0.5", "", "min_ar"),
        ("resolutions = [256]\nar_buckets = [1.0]", "", "ar_buckets"),
        ("resolutions = [256]", "num_ar_buckets = 3", "directory[0].num_ar_buckets"),
        ("resolutions = [256]\n" + AR, "enable_ar_bucket = false\nmax_ar = 3.0", "directory[0].max_ar"),
        ("resolutions = [256]\n" + AR + "min_ar = 2.0\nmax_ar = 0.5", "", "min_ar"),
        ("resolutions = [256]\n" + AR, "min_ar = 3.0", "directory[0].min_ar"),
        ("resolutions = [256]\n" + AR, "max_ar = 0.1", "directory[0].max_ar"),
        ("resolutions = [256]\n" + AR + "ar_buckets = [1.0]\nmin_ar = 0.5", "", "ar_buckets"),
        ("resolutions = [256]\n" + AR + "ar_buckets = [0]", "", "ar_buckets"),
        ("resolutions = [256]\ncache_shuffle_num = 2", "", "cache_shuffle_num"),
        ("resolutions = [256]", "cache_shuffle_num = 2", "directory[0].cache_shuffle_num"),
        ('resolutions = [256]\ncache_shuffle_delimiter = "|"', "", "cache_shuffle_delimiter"),
        ('resolutions = [256]\ncache_shuffle_delimiter = ""', "shuffle_tags = true", "cache_shuffle_delimiter"),
        ("resolutions = [256]\nkeep_tokens = 1", "", "keep_tokens"),
        ("resolutions = [256]", "tag_dropout = 0.1", "directory[0].tag_dropout"),
        ("resolutions = [256]\nshuffle_tags = true", "tag_dropout = 1.0", "directory[0].tag_dropout"),
        ("resolutions = [256]", "max_crop = 1.5", "directory[0].max_crop"),
        ("resolutions = [256]", "num_repeats = 0", "directory[0].num_repeats"),
        ("resolutions = [256]", 'caption_column = ["a"]', "directory[0].caption_column"),
        ("resolutions = [256]", 'caption_column = ["a", "A"]', "directory[0].caption_column"),
        ("resolutions = [256]", PAIR + "caption_weights = [1.0]", "directory[0].caption_weights"),
        ("resolutions = [256]\ncaption_weights = [1.0, 2.0]", 'caption_column = "a"', "caption_weights"),
        ("resolutions = [256]", PAIR + "caption_weights = [1.0, 0.0]", "directory[0].caption_weights[1]"),
        ("resolutions = [256]", "subsample_ratio = 1.1", "directory[0].subsample_ratio"),
    ],
)
def test_dataset_faults(only_fault: OnlyFault, top: str, directory: str, key: str) -> None:
    fault = only_fault(dataset=f'{top}\n[[directory]]\npath = "a"\n{directory}')
    assert fault.key == key
    assert fault.file.endswith("data.toml")


@pytest.mark.parametrize("dataset", ["resolutions = [256]", "resolutions = [256]\ndirectory = []", "directory = 3"])
def test_a_dataset_needs_a_directory(only_fault: OnlyFault, dataset: str) -> None:
    assert only_fault(dataset=dataset).key == "directory"


def test_faults_of_the_dataset_say_what_to_write(only_fault: OnlyFault) -> None:
    assert only_fault(dataset='[directory]\npath = "a"').hint == "write [[directory]], with two brackets"
    dataset = 'resolutions = [256, [320, 192]]\n[[directory]]\npath = "a"'
    assert only_fault("micro_batch_size_per_gpu = [[256, 4]]", dataset=dataset).hint == "add [[320, 192], SIZE]"
    fault = only_fault(model='size = "tiny2"', dataset='resolutions = [272]\n[[directory]]\npath = "a"')
    assert (fault.key, fault.value) == ("resolutions", "[272, 272]")


def test_default_blocks_follow_the_depth() -> None:
    """At the depths of the papers: TREAD's route, LayerSync's pair."""
    assert RoutingConfig().route(28) == (0.5, 3, 24)
    assert RoutingConfig().route(15) == (0.5, 3, 11)
    assert LayerSyncConfig().pair(28) == (8, 16)
    assert LayerSyncConfig().pair(15) == (4, 9)
    assert all(routing_problem(RoutingConfig(), depth) is None for depth in range(2, 40))
    assert all(layer_sync_problem(LayerSyncConfig(), depth) is None for depth in range(3, 40))


@pytest.mark.parametrize(("top", "tables"), [(RELEASE, ""), ("", NARROW)])
def test_weights_that_are_updated_one_after_another_need_one_process(files: Any, top: str, tables: str) -> None:
    train = files.load(top, tables=tables).train
    assert one_process_problem(train, 1, False) is None
    assert "needs one process, not 2" in str(one_process_problem(train, 2, False))
    assert "start without --deepspeed" in str(one_process_problem(train, 1, True))
    assert one_process_problem(files.load().train, 8, True) is None


@pytest.mark.parametrize("teacher", ["start", "average"])
def test_a_teacher_of_all_weights_is_not_swapped(files: Any, teacher: str) -> None:
    found = files.faults(RELEASE + "swap_blocks = 3", "", f'{EMA}[objective.dpo]\nteacher = "{teacher}"')
    (fault,) = [fault for fault in found if fault.key == "swap_blocks"]
    assert f"teacher is the {teacher} of all weights" in fault.problem
