"""Captions by a tiny random Llava: batches, several captions, resuming, and what is refused."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from PIL import Image
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers

from sd3_light.cache import caption
from sd3_light.cache.caption import Captioner, CaptionOptions
from sd3_light.config.faults import UserError
from sd3_light.config.load_dataset import load_directories
from sd3_light.sources.records import Record
from sd3_light.sources.scan import scan
from tests.refusals import refused
from tests.unit.pages.parsed_page import ParsedPage, assert_self_contained

WORDS = ["<pad>", "<bos>", "<eos>", "<unk>", "<image>", "USER", "ASSISTANT", *(f"word{n}" for n in range(40))]
SHAPE = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
PART = "{% if c['type'] == 'image' %}<image> {% else %}{{ c['text'] }}{% endif %}"
CHAT = f"{{% for m in messages %}}USER {{% for c in m['content'] %}}{PART}{{% endfor %}} ASSISTANT{{% endfor %}}"


def make_tokenizer() -> Any:
    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, "<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special: dict[str, Any] = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}
    special |= {"extra_special_tokens": {"image_token": "<image>"}}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, **special)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llava of a few thousand random weights, as transformers saves it."""
    images = transformers.CLIPImageProcessor(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})
    options = {"chat_template": CHAT, "num_additional_image_tokens": 1}
    processor = transformers.LlavaProcessor(images, make_tokenizer(), 8, "default", **options)
    vision = transformers.CLIPVisionConfig(image_size=16, patch_size=8, projection_dim=16, **SHAPE)
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    text = transformers.LlamaConfig(vocab_size=len(WORDS), **ids, **SHAPE)
    config = transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_index=4)
    folder = tmp_path_factory.mktemp("captioner") / "model"
    with torch.random.fork_rng():
        torch.manual_seed(0)
        transformers.LlavaForConditionalGeneration(config).save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


@pytest.fixture
def data(tmp_path: Path) -> Path:
    (tmp_path / "images" / "more").mkdir(parents=True)
    for number in range(6):
        name = f"more/{number}.png" if number > 3 else f"{number}.png"
        Image.new("RGB", (20 + number, 18), (40 * number, 90, 200)).save(tmp_path / "images" / name)
    (tmp_path / "images" / "0.txt").write_text("an old caption")
    (tmp_path / "images" / "broken.png").write_text("not an image")
    (tmp_path / "data.toml").write_text('resolutions = [64]\n[[directory]]\npath = "images"\n')
    return tmp_path / "data.toml"


def read_table(data: Path) -> dict[str, list[str]]:
    table: dict[str, list[str]] = json.loads((data.parent / "images" / caption.TABLE).read_text())
    return table


NAMES = ["0.png", "1.png", "2.png", "3.png", "more/4.png", "more/5.png"]
SHORT = CaptionOptions(max_tokens=4, batch=4)


def test_every_image_gets_the_captions_that_the_dataset_reads(model: Path, data: Path) -> None:
    page = data.parent / "page.html"
    options = CaptionOptions(("word1 word2", "word3"), captions=2, max_tokens=4, batch=4)
    assert caption.run(data, str(model), options, page) == [data.parent / "images" / caption.TABLE]
    table = read_table(data)
    assert list(table) == NAMES
    assert all(len(texts) == 4 for texts in table.values())
    assert max(len(text.split()) for texts in table.values() for text in texts) <= 4  # without the prompt
    (directory,), _ = load_directories(data)
    records = {item.key.partition("/")[2]: item.captions for item in scan(directory, 0) if isinstance(item, Record)}
    assert {name: records[name] for name in NAMES} == {name: tuple(texts) for name, texts in table.items()}
    parsed = ParsedPage(page)
    assert_self_contained(parsed)
    assert "6 of 6 captioned images" in parsed.text
    assert len(parsed.attributes("img")) == 6


@pytest.mark.parametrize("captions", [1, 3])
def test_captions_do_not_depend_on_the_batch_or_on_interruptions(model: Path, data: Path, captions: int) -> None:
    options = replace(SHORT, captions=captions)
    caption.run(data, str(model), options)
    table = read_table(data)
    assert len({tuple(texts) for texts in table.values()}) > 1 or captions == 1
    caption.run(data, str(model), replace(options, batch=1), restart=True)
    assert read_table(data) == table
    done = data.parent / "images" / caption.DONE
    done.write_bytes(b"".join(done.read_bytes().splitlines(keepends=True)[:4]))
    caption.run(data, str(model), options)
    assert read_table(data) == table


def test_tokens_are_drawn_with_the_probabilities_of_the_model() -> None:
    scores = torch.tensor([0.1, 0.2, 0.0, 0.7]).log().expand(1000, 4)
    numbers = (torch.arange(1, 1001, dtype=torch.float64) / 1000)[:, None]
    drawn = caption.SeededDraws(numbers, [])(torch.empty(0), scores).softmax(-1)
    assert drawn.max(-1).values.eq(1).all()
    assert drawn.sum(0).tolist() == pytest.approx([100, 200, 0, 700], abs=1)


@pytest.fixture
def described(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    sizes: list[int] = []
    original: Callable[..., list[list[str]]] = Captioner.describe

    def describe(self: Captioner, images: list[Image.Image]) -> list[list[str]]:
        sizes.append(len(images))
        return original(self, images)

    monkeypatch.setattr(Captioner, "describe", describe)
    return sizes


def test_an_interrupted_run_continues(model: Path, data: Path, described: list[int]) -> None:
    images = data.parent / "images"
    assert caption.run(images, str(model), SHORT) == [images / caption.TABLE], "a folder needs no dataset TOML"
    table = read_table(data)
    lines = (images / caption.DONE).read_bytes().splitlines(keepends=True)
    (images / caption.DONE).write_bytes(b"".join(lines[:4]) + lines[4][:7])  # killed while it wrote the fourth image
    (images / caption.TABLE).unlink()
    described.clear()
    caption.run(data, str(model), SHORT)
    assert sum(described) == 3
    assert read_table(data) == table
    described.clear()
    caption.run(data, str(model), SHORT)
    assert described == []
    Image.new("RGB", (30, 30)).save(images / "new.png")
    (images / "1.png").unlink()
    caption.run(data, str(model), SHORT)
    assert described == [1]
    assert set(read_table(data)) == {*NAMES, "new.png"} - {"1.png"}


def test_directories_of_one_folder_share_its_table(model: Path, data: Path) -> None:
    data.write_text(data.read_text() + '[[directory]]\npath = "more/../images"\nsubsample_ratio = 0.5\n')
    (data.parent / "more").mkdir()
    tables = caption.run(data, str(model), SHORT)
    assert list(read_table(data)) == NAMES
    assert tables == [data.parent / "images" / caption.TABLE]


def test_a_folder_without_images_can_be_captioned_later(model: Path, tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    data = tmp_path / "data.toml"
    data.write_text('resolutions = [64]\n[[directory]]\npath = "images"\n')
    assert caption.run(data, str(model), SHORT) == []
    Image.new("RGB", (30, 30)).save(tmp_path / "images" / "new.png")
    caption.run(data, str(model), SHORT)
    assert list(read_table(data)) == ["new.png"]


def test_other_settings_need_a_restart(model: Path, data: Path) -> None:
    caption.run(data, str(model), SHORT)
    message = "has captions with another prompts, max_tokens; use the same, or pass --restart"
    refused(message, caption.run, data, str(model), CaptionOptions(("other",), max_tokens=5))


def test_a_table_of_the_user_is_not_overwritten(model: Path, data: Path) -> None:
    table = data.parent / "images" / caption.TABLE
    table.write_text('{"0.png": "mine"}')
    refused("exists and is not by this command", caption.run, data, str(model), SHORT)
    assert table.read_text() == '{"0.png": "mine"}'


def test_pickles_and_other_folders_are_refused(model: Path, data: Path, tmp_path: Path) -> None:
    refused(r"has no config\.json", caption.run, data, str(tmp_path), SHORT)
    (tmp_path / "config.json").write_text('{"model_type": "llava"}')
    (tmp_path / "pytorch_model.bin").touch()
    refused(r"no \.safetensors file; other formats are not read", caption.run, data, str(tmp_path), SHORT)
    (tmp_path / "model.safetensors").touch()
    refused(r"model\.safetensors cannot be read", caption.run, data, str(tmp_path), SHORT)
    save_file({"weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    refused("not a usable image-text-to-text model", caption.run, data, str(tmp_path), SHORT)
    assert not (data.parent / "images" / caption.DONE).exists()


def test_tars_columns_and_dtypes_are_refused_before_a_model_is_loaded(data: Path) -> None:
    with pytest.raises(UserError, match="--dtype int8: use auto, float32, bfloat16 or float16"):
        caption.run(data.with_name("none.toml"), "no model", CaptionOptions(dtype="int8"))
    data.write_text('resolutions = [64]\ncaption_column = ["a", "b"]\n[[directory]]\npath = "images"\n')
    refused("caption_column names several columns", caption.run, data, "no model", SHORT)
    (data.parent / "a.tar").touch()
    data.write_text('resolutions = [64]\n[[directory]]\npath = "a.tar"\n')
    refused("captions are written for folders of images", caption.run, data, "no model", SHORT)
    data.write_text('resolutions = [64]\n[[directory]]\npath = "s3://bucket/photos"\n')
    refused("captions are written for folders on disk", caption.run, data, "no model", SHORT)


@pytest.fixture(scope="module")
def blip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random BLIP: a model without a chat template."""
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "sep_token_id": 2}
    text = {"vocab_size": len(WORDS), "encoder_hidden_size": 16, "projection_dim": 16, **ids, **SHAPE}
    vision = {"image_size": 16, "patch_size": 8, "projection_dim": 16, **SHAPE}
    config = transformers.BlipConfig(text_config=text, vision_config=vision)
    folder = tmp_path_factory.mktemp("captioner") / "blip"
    with torch.random.fork_rng():
        torch.manual_seed(0)
        transformers.BlipForConditionalGeneration(config).save_pretrained(folder)
    images = transformers.BlipImageProcessor(size={"height": 16, "width": 16})
    transformers.BlipProcessor(images, make_tokenizer()).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("prompt", ["", "word1 word2"])
def test_a_model_without_a_chat_template_continues_the_prompt_or_gets_none(blip: Path, data: Path, prompt: str) -> None:
    caption.run(data, str(blip), CaptionOptions((prompt,), max_tokens=4, batch=4))
    assert {len(texts) for texts in read_table(data).values()} == {1}
    assert list(read_table(data)) == NAMES
