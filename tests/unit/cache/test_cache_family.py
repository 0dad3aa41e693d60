"""The cache stage with a family that has one text encoder, a mask and no pooled vector."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from sd3_light.cache.local_builder import LocalBuilder
from sd3_light.cache.recipe import make_recipe
from sd3_light.cache.reuse import ValueCounts
from sd3_light.cache.unit_builder import UnitInProgress
from sd3_light.core import registry
from sd3_light.core.caption_lengths import TextLimit, count_cut_captions, cut_prompts
from sd3_light.core.columns import Column
from sd3_light.core.encoding import Encoding
from sd3_light.core.sampling import EncodedText
from sd3_light.data.prompt_features import (
    encode_prompts,
    encode_prompts_one_by_one,
    prompt_file,
    read_prompt,
    write_prompt,
)
from sd3_light.engines import Launch
from sd3_light.sample import in_training as samples
from sd3_light.sources.decode import Decoded
from tests.project import Project

LENGTH = 5
WIDTH = 3
COLUMNS = (
    Column("moments", "image", "float16", (3, 1, 1), ("vae",)),
    Column("text", "caption", "float32", (LENGTH, WIDTH), ("text_encoder", "tokenizer"), settings={"words": LENGTH}),
)


class WordEncoders:
    """Encodes the lengths of words; its results are complete after `synchronize`."""

    vae_dtype = torch.float32

    def __init__(self, closed: list[str]) -> None:
        self._pending: list[Callable[[], None]] = []
        self._closed = closed

    def tokenize(self, captions: Sequence[str]) -> dict[str, list[list[int]]]:
        return {"words": [[len(word) for word in caption.split()][:LENGTH] for caption in captions]}

    def encode_captions(self, captions: Any, columns: Any = None) -> dict[str, Tensor]:
        return self.encode_text(
            "words", (captions if isinstance(captions, Mapping) else self.tokenize(captions))["words"]
        )

    def encode_empty(self) -> dict[str, Tensor]:
        return self.encode_captions([""])

    def encode_text(self, name: str, ids: list[list[int]]) -> dict[str, Tensor]:
        assert name == "words"
        text = torch.zeros(len(ids), LENGTH, WIDTH)
        mask = torch.zeros(len(ids), LENGTH, dtype=torch.bool)

        def fill() -> None:
            for row, lengths in enumerate(ids):
                text[row, : len(lengths)] = torch.tensor(lengths).float()[:, None]
                mask[row, : len(lengths)] = True

        self._pending.append(fill)
        return {"text": text, "mask": mask}

    def encode_images(self, pixels: NDArray[np.uint8], flip: bool) -> dict[str, Tensor]:
        return {"moments": torch.as_tensor(pixels)[:, None, ::32, ::32].permute(0, 1, 4, 2, 3).half()}

    def reconstruct(self, pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
        return pixels

    def synchronize(self) -> None:
        self.waiter()()

    def waiter(self) -> Callable[[], None]:
        pending = self._pending[:]
        self._pending.clear()
        return lambda: [fill() for fill in pending] and None

    def close(self) -> None:
        self._closed.append("words")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class WordEncoding(Encoding):
    """One text encoder that reads five words."""

    folders = ("vae", "text_encoder", "tokenizer")
    text_encoders = ("words",)

    def __init__(self) -> None:
        self.closed: list[str] = []

    def text_settings(self, model: Any) -> dict[str, Any]:
        return {"words": LENGTH}

    def text_limits(self, folder: Path, settings: Mapping[str, Any]) -> list[TextLimit]:
        read = settings["words"]
        remedies = ("shorten them", "shorten it")
        return [TextLimit("words", read, f"{read} words", *remedies, lambda text: len(text.split()))]

    def encoders(
        self, model: Any, device: torch.device, batch_size: int, one_at_a_time: bool | None = None
    ) -> WordEncoders:
        return WordEncoders(self.closed)


def as_text(features: Mapping[str, Tensor]) -> EncodedText:
    return {"text": features["text"], "mask": features["mask"]}


@pytest.fixture
def encoding(monkeypatch: pytest.MonkeyPatch) -> WordEncoding:
    encoding = WordEncoding()
    sampling = SimpleNamespace(text=as_text)
    family = SimpleNamespace(encoding=encoding, sampling=sampling, columns=lambda *_: COLUMNS)
    monkeypatch.setattr(registry, "family_named", lambda name: family)
    return encoding


def test_the_recipe_and_the_name_of_a_prompt_follow_from_the_family(
    encoding: WordEncoding, raw_project: Project
) -> None:
    model = raw_project.load().train.model
    recipe = make_recipe(model)
    assert set(recipe) == {"format", "preprocess", "words", "vae", "text_encoder", "tokenizer", "dtype", "columns"}
    assert set(recipe["columns"]) == {"moments", "moments.rejected", "text"}
    name = prompt_file("a star", recipe)
    assert prompt_file("a star", {**recipe, "vae": "another", "preprocess": 0, "vae_dtype": "float16"}) == name
    assert prompt_file("a star", {**recipe, "words": 6}) != name
    assert prompt_file("a star", {**recipe, "tokenizer": "another"}) != name


def test_prompts_have_the_values_of_the_family(
    encoding: WordEncoding, raw_project: Project, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    train = raw_project.load().train
    prompts = ["a large star", "one two three four five six seven"]
    with LocalBuilder(train, Launch()) as builder:
        features = builder.call(encode_prompts, prompts, encoding.text_encoders)
    assert encoding.closed == ["words"]
    assert features[0]["text"][:, 0].tolist() == [1, 5, 4, 0, 0]
    assert [each["mask"].sum().item() for each in features] == [3, 5]
    recipe = make_recipe(train.model)
    write_prompt(tmp_path, prompts[0], recipe, features[0])
    read = read_prompt(tmp_path, prompts[0], recipe)
    assert read is not None
    assert {name: tensor.tolist() for name, tensor in read.items()} == {
        name: tensor.tolist() for name, tensor in features[0].items()
    }
    # a run reads the first from the cache and encodes the second
    texts = samples._texts(train.model, prompts, tmp_path, recipe, torch.device("cpu"))
    assert encoding.closed == ["words", "words"]
    for prompt, expected in zip(prompts, features, strict=True):
        assert torch.equal(texts[prompt]["text"], expected["text"])
        assert torch.equal(texts[prompt]["mask"], expected["mask"])
    warning = "is cut: words reads 5 of its 7 tokens (loses 2); shorten it"
    assert capfd.readouterr().err.count(warning) == 1


def test_each_encoder_is_freed_before_the_next(encoding: WordEncoding, raw_project: Project) -> None:
    (features,) = encode_prompts_one_by_one(raw_project.load().train.model, ["a star"], torch.device("cpu"))
    assert features["text"][:2, 0].tolist() == [1, 4]
    assert encoding.closed == ["words"]


def test_a_unit_collects_what_the_encoders_return(encoding: WordEncoding) -> None:
    encoders = encoding.encoders(None, torch.device("cpu"), 4)
    members: Any = [
        SimpleNamespace(
            identity=number,
            captions=captions,
            row=SimpleNamespace(key=str(number), image="image", mask="", rejected=""),
            fingerprints={"image": str(number)},
        )
        for number, captions in enumerate([("a star",), ("a star", "two stars")])
    ]
    tokens: Future[Any] = Future()
    tokens.set_result([encoders.tokenize(["a star", "two stars"])])
    unit = UnitInProgress(SimpleNamespace(flip=False), members, tokens)  # type: ignore[arg-type]
    pixels = np.full((64, 32, 3), 7, np.uint8)
    unit.add([Decoded(pixels), Decoded(pixels)], encoders)
    unit.encode_text(encoders)
    encoders.waiter()()
    assert unit.vae_dtype == "float32"
    assert [moments.shape for moments in unit.images["moments"]] == [(2, 1, 3, 2, 1)]
    ((group, text),) = unit.texts
    assert (group.captions, group.columns) == (["a star", "two stars"], None)
    assert text["mask"].sum(1).tolist() == [2, 2]
    assert text["text"][1, :2, 0].tolist() == [3, 5]
    assert unit.counts == ValueCounts(2, 0, 2, 0)


def test_captions_are_counted_with_the_limits_of_the_family(encoding: WordEncoding) -> None:
    limits = encoding.text_limits(Path(), {"words": 5})
    cut = count_cut_captions(["a star", "one two three four five six", "1 2 3 4 5 6 7"], limits)
    assert cut is not None
    assert cut.sentence() == (
        "of 3 captions 2 exceed 5 words: the rest of each is cut (shorten them); the longest has 7 words tokens: "
        "'1 2 3 4 5 6 7'"
    )
    assert cut_prompts(["a star"], limits) == []
    assert count_cut_captions(["a star"], []) is None
