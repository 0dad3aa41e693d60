"""SD3's prompts, encoded for the denoiser and for the stock pipeline.

Shapes: B texts, T tokens, W width of a token, P width of a pooled vector, N image tokens.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from sd3_light.core.batch import LENGTH, Batch
from sd3_light.core.caption_lengths import TextLimit
from sd3_light.core.columns import Bucket
from sd3_light.core.sampling import UNSTATED, EncodedText, ImageRequest, OwnDrawing, PipelineInputs
from sd3_light.families.sd3.encoding import text_limits
from sd3_light.families.sd3.masked_attention import use_masked_attention
from sd3_light.families.sd3.text import Tokenizer, encode_clip, encode_t5, join_text
from sd3_light.sources.decode import read_fitted

if TYPE_CHECKING:
    from diffusers import StableDiffusion3Pipeline


@dataclass(frozen=True)
class TextPolicy(PipelineInputs):
    """How text was encoded in training, and must be in sampling.

    `uncond_text` is the unconditional input of guidance: zeros, or the encoded negative prompt (as in stock SD3).
    `references` is how many images the model sees beside the text.
    """

    t5_max_length: int
    uncond_text: Literal["zero", "empty"]
    text_tokens: Literal["padded", "real"]
    references: int = 0
    stated: OwnDrawing = UNSTATED

    def facts(self) -> dict[str, Any]:
        """See `PipelineInputs.facts`."""
        facts = {name: getattr(self, name) for name in ("t5_max_length", "uncond_text", "text_tokens")}
        return {**facts, "references": self.references} if self.references else facts

    @property
    def own_drawing(self) -> OwnDrawing:
        """See `PipelineInputs.own_drawing`."""
        return self.stated

    def stating(self, drawing: OwnDrawing) -> "TextPolicy":
        """See `PipelineInputs.stating`."""
        return replace(self, stated=drawing)

    def negative_fault(self) -> str | None:
        """See `PipelineInputs.negative_fault`."""
        if self.uncond_text == "empty":
            return None
        return 'the model was trained with uncond_text = "zero" and takes no negative prompt; leave it out'

    def size_fault(self, pipe: "StableDiffusion3Pipeline", width: int, height: int) -> str | None:
        """See `PipelineInputs.size_fault`."""
        step = _token_side(pipe)
        largest = step * pipe.transformer.config.pos_embed_max_size
        if all(side % step == 0 and step <= side <= largest for side in (width, height)):
            return None
        needed = f"multiples of {step} from {step} to {largest}"
        return f"image size {width}x{height}: this model needs sides that are {needed}"

    def references_fault(self, count: int) -> str | None:
        """See `PipelineInputs.references_fault`."""
        if not self.references:
            return super().references_fault(count)
        return None if count in (0, self.references) else f"{count} references: this model sees {self.references}"

    def text_limits(self, folder: Path) -> list[TextLimit]:
        """See `PipelineInputs.text_limits`."""
        return text_limits(folder, self.t5_max_length)

    def encode(self, pipe: "StableDiffusion3Pipeline", texts: Sequence[str]) -> list[EncodedText]:
        """Encode texts with the pipeline's encoders; equal ones are encoded once."""
        unique = list(dict.fromkeys(texts))
        encode = _encode_padded if self.text_tokens == "padded" else _encode_real
        by_text = dict(zip(unique, encode(pipe, unique, self.t5_max_length), strict=True))
        return [by_text[text] for text in texts]

    def arguments(
        self,
        pipe: "StableDiffusion3Pipeline",
        batch: Sequence[ImageRequest],
        encode: Callable[[Sequence[str]], list[EncodedText]],
    ) -> dict[str, Any]:
        """See `PipelineInputs.arguments`."""
        guidance = batch[0].guidance
        assert guidance is not None
        texts = encode([request.prompt for request in batch])
        if guidance > 1 and self.uncond_text == "zero":
            texts = [*(unconditional_text(text, self.text_tokens) for text in texts), *texts]
        elif guidance > 1:
            texts = [*encode([request.negative_prompt for request in batch]), *texts]
        # latents get the dtype of the text, and the VAE must accept it
        text = batch_texts(texts, pipe.vae.dtype)
        rows = {"prompt_embeds": text["prompt"], "pooled_prompt_embeds": text["pooled"]}
        embeds = {name: tensor[-len(batch) :] for name, tensor in rows.items()}
        if guidance > 1:
            embeds |= {f"negative_{name}": tensor[: len(batch)] for name, tensor in rows.items()}
        attention = None
        images = list(zip(*(request.references for request in batch), strict=True))
        if self.text_tokens == "real":
            attention = {"text_lengths": text.host["prompt" + LENGTH].to(text["prompt"].device)}
        arguments = {**embeds, "guidance_scale": guidance, "joint_attention_kwargs": attention}
        if not images:
            return arguments
        size = Bucket(batch[0].width, batch[0].height)
        return {**arguments, "image": [[read_fitted(path, size) for path in paths] for paths in images]}

    def prepared(self, pipe: "StableDiffusion3Pipeline") -> AbstractContextManager[None]:
        """Return a context in which the denoiser applies the mask of real text."""
        return use_masked_attention(pipe.transformer) if self.text_tokens == "real" else nullcontext()


def _token_side(pipe: "StableDiffusion3Pipeline") -> int:
    """Return the pixels per image token in each direction."""
    return int(pipe.vae_scale_factor * pipe.patch_size)


def join_features(features: Mapping[str, Tensor]) -> EncodedText:
    """Join one caption's features (ENCODER -> tokens, ENCODER.pooled -> vector) to ``prompt`` and ``pooled``.

    The prompt [T, W] has CLIP's tokens, then T5's; the pooled vectors [P] are CLIP's.
    """
    tokens_BTW, pooled_BP, _ = join_text({name: [values] for name, values in features.items()})
    return {"prompt": tokens_BTW[0], "pooled": pooled_BP[0]}


def unconditional_text(like: EncodedText, text_tokens: str) -> EncodedText:
    """Return zeros in place of a text, for `uncond_text` "zero"; with real tokens a single token."""
    tokens_TW = torch.zeros_like(like["prompt"] if text_tokens == "padded" else like["prompt"][:1])
    return {"prompt": tokens_TW, "pooled": torch.zeros_like(like["pooled"])}


def batch_texts(texts: Sequence[EncodedText], dtype: torch.dtype) -> Batch:
    """Batch texts of any lengths: the prompt [B, T, W] is padded with zeros, and has lengths."""
    tokens_BTW = nn.utils.rnn.pad_sequence([text["prompt"] for text in texts], batch_first=True)
    pooled_BP = torch.stack([text["pooled"] for text in texts])
    lengths_B = torch.tensor([len(text["prompt"]) for text in texts])
    values = {"prompt": tokens_BTW.to(dtype), "pooled": pooled_BP.to(dtype)}
    return Batch(len(texts), values, {"prompt" + LENGTH: lengths_B})


def _encode_padded(pipe: "StableDiffusion3Pipeline", texts: list[str], t5_max_length: int) -> list[EncodedText]:
    """Encode as the stock pipeline does."""
    tokens_BTW, _, pooled_BP, _ = pipe.encode_prompt(
        prompt=texts,
        prompt_2=None,
        prompt_3=None,
        do_classifier_free_guidance=False,
        max_sequence_length=t5_max_length,
    )
    return [
        {"prompt": tokens_TW, "pooled": pooled_P} for tokens_TW, pooled_P in zip(tokens_BTW, pooled_BP, strict=True)
    ]


def _encode_real(pipe: "StableDiffusion3Pipeline", texts: list[str], t5_max_length: int) -> list[EncodedText]:
    """Encode as the cache does: real tokens only. One text at a time needs no padding and no mask."""
    max_length = int(pipe.tokenizer.model_max_length)  # for both CLIPs, as in the stock pipeline
    clips = {
        "clip_l": (Tokenizer(pipe.tokenizer, max_length), pipe.text_encoder),
        "clip_g": (Tokenizer(pipe.tokenizer_2, max_length), pipe.text_encoder_2),
    }
    t5 = Tokenizer(pipe.tokenizer_3, t5_max_length)
    encoded = []
    for text in texts:
        features: dict[str, Tensor] = {}
        for name, (tokenizer, model) in clips.items():
            tokens, pooled = encode_clip(model, torch.tensor(tokenizer([text], padded=False), device=model.device))
            features |= {name: tokens[0], f"{name}.pooled": pooled[0]}
        ids = torch.tensor(t5([text], padded=False), device=pipe.text_encoder_3.device)
        features["t5"] = encode_t5(pipe.text_encoder_3, ids)[0]
        encoded.append(join_features(features))
    return encoded
