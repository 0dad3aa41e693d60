"""Stable Diffusion 3 as the model in this folder was trained: on real text tokens, on reference images, or on both.

With real text each encoder contributes the prompt's real tokens, without padding; T5's tokens directly follow CLIP's.
Texts of different lengths share a batch: attention masks the rows after a text's end. The tokens of reference images
follow those of the image, at the same positions with a mark. Needs torch and diffusers (with transformers):

    DiffusionPipeline.from_pretrained(FOLDER, custom_pipeline="pipeline", trust_remote_code=True)

Shapes: B texts, T text rows, W width of a row, P width of a pooled vector, N image tokens.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from diffusers import StableDiffusion3Pipeline
from diffusers.models.attention_processor import JointAttnProcessor2_0
from torch import Tensor, nn

_ZERO = "negative_prompt is not supported: this model was trained with zeros as its unconditional text"
TextRows = tuple[Tensor, Tensor]
"""Rows [T, W] and the pooled vector [P] of one text."""


class RealTextAttention:
    """Stock joint attention; with ``text_lengths`` the text rows beyond a sample's length are masked."""

    def __init__(self) -> None:
        self.stock = JointAttnProcessor2_0()

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        text_lengths: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return (image, text), or only the image if there is no text."""
        if text_lengths is None or encoder_hidden_states is None:
            result: Tensor | tuple[Tensor, Tensor] = self.stock(attn, hidden_states, encoder_hidden_states)
            return result
        sizes = [hidden_states.shape[1], encoder_hidden_states.shape[1]]
        image = _heads(attn, hidden_states, (attn.to_q, attn.to_k, attn.to_v), (attn.norm_q, attn.norm_k))
        added = (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj)
        text = _heads(attn, encoder_hidden_states, added, (attn.norm_added_q, attn.norm_added_k))
        query, key, value = (torch.cat(pair, dim=2) for pair in zip(image, text, strict=True))
        lengths_B = text_lengths[-len(hidden_states) :]  # skip-layer guidance runs only the prompts: the last rows
        position = torch.arange(sum(sizes), device=lengths_B.device)
        mask = (position < sizes[0] + lengths_B[:, None])[:, None, None]
        joint = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        image_out, text_out = joint.transpose(1, 2).flatten(2).to(query.dtype).split(sizes, dim=1)
        image_out = attn.to_out[1](attn.to_out[0](image_out))
        return image_out, text_out if attn.context_pre_only else attn.to_add_out(text_out)


def _heads(attn: Any, stream: Tensor, projections: tuple[Any, ...], norms: tuple[Any, ...]) -> list[Tensor]:
    parts = [project(stream).unflatten(-1, (attn.heads, -1)).transpose(1, 2) for project in projections]
    for index, norm in enumerate(norms):
        if norm is not None:
            parts[index] = norm(parts[index])
    return parts


def marked(tokens: Sequence[Tensor]) -> list[Tensor]:
    """Return the tokens [B, N, D] of an image and its references, with a mark on those of each reference."""
    return [tokens[0], *(each + _mark(number, each) for number, each in enumerate(tokens[1:], start=1))]


def _mark(number: int, like: Tensor) -> Tensor:
    """Return the sines and cosines of a third axis, on which the image is at 0, less those of the image."""
    half = like.shape[-1] // 2
    angles = number * 10000 ** (-torch.arange(half, device=like.device, dtype=torch.float32) / half)
    return torch.cat([angles.sin(), angles.cos() - 1]).to(like.dtype)


@contextmanager
def seeing(transformer: Any, references: Sequence[Tensor]) -> Iterator[None]:
    """Let a stock denoiser see the latents [B, C, H, W] of references, inside the block and in this thread."""
    own_thread = threading.get_ident()
    count = 0

    def add(module: Any, inputs: tuple[Tensor, ...], tokens: Tensor) -> Tensor:
        nonlocal count
        if threading.get_ident() != own_thread:
            return tokens
        count = tokens.shape[1]
        images = (each.to(inputs[0]).repeat(len(tokens) // len(each), 1, 1, 1) for each in references)
        return torch.cat(marked([tokens, *(module.forward(image) for image in images)]), dim=1)

    def cut(_module: Any, _inputs: tuple[Tensor, ...], patches: Tensor) -> Tensor:
        return patches[:, :count] if threading.get_ident() == own_thread else patches

    hooks = [transformer.pos_embed.register_forward_hook(add), transformer.proj_out.register_forward_hook(cut)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class RealTextPipeline(StableDiffusion3Pipeline):
    """The stock pipeline with the inputs of training: text, its unconditional input for guidance, and references.

    ``image`` is the reference, or a list with one for each of several; each is an image, a list with one per prompt, or
    latents. Without it the model sees the text alone. With ``text_tokens`` "padded" text is that of the stock pipeline;
    with "real" T5 is truncated at ``t5_max_length``, and `max_sequence_length` is ignored. With ``uncond_text`` "zero",
    guidance uses zeros and a negative prompt is an error. All rows of custom `prompt_embeds` count as real unless
    `joint_attention_kwargs={"text_lengths": ...}` gives the number of real rows, negative ones first.
    """

    def __init__(
        self,
        transformer: Any,
        scheduler: Any,
        vae: Any,
        text_encoder: Any,
        tokenizer: Any,
        text_encoder_2: Any,
        tokenizer_2: Any,
        text_encoder_3: Any,
        tokenizer_3: Any,
        image_encoder: Any = None,
        feature_extractor: Any = None,
        t5_max_length: int = 256,
        uncond_text: str = "empty",
        text_tokens: str = "real",
        references: int = 0,
    ) -> None:
        super().__init__(
            transformer=transformer,
            scheduler=scheduler,
            vae=vae,
            text_encoder=text_encoder,
            tokenizer=tokenizer,
            text_encoder_2=text_encoder_2,
            tokenizer_2=tokenizer_2,
            text_encoder_3=text_encoder_3,
            tokenizer_3=tokenizer_3,
            image_encoder=image_encoder,
            feature_extractor=feature_extractor,
        )
        self.register_to_config(
            t5_max_length=t5_max_length, uncond_text=uncond_text, text_tokens=text_tokens, references=references
        )
        self._text_lengths: Tensor | None = None

    @torch.no_grad()
    def __call__(
        self, *args: Any, image: Any = None, joint_attention_kwargs: dict[str, Any] | None = None, **kwargs: Any
    ) -> Any:
        """Call the stock pipeline."""
        options = dict(joint_attention_kwargs or {})
        # a caller that passes a mask also sets the matching processor
        if self.config.text_tokens == "real" and "attention_mask" not in options:
            self.transformer.set_attn_processor(RealTextAttention())
        if image is None:
            return super().__call__(*args, joint_attention_kwargs=options, **kwargs)
        side = self.default_sample_size * self.vae_scale_factor
        references = self.encode_references(image, kwargs.get("width") or side, kwargs.get("height") or side)
        with seeing(self.transformer, references):
            return super().__call__(*args, joint_attention_kwargs=options, **kwargs)

    def encode_references(self, image: Any, width: int, height: int) -> list[Tensor]:
        """Return the latents of references at the size of the image."""
        images = image if isinstance(image, list) else [image]
        if len(images) != self.config.references:
            raise ValueError(f"this model sees {self.config.references} reference image(s), not {len(images)}")
        return [self._latents(each, width, height) for each in images]

    def _latents(self, image: Any, width: int, height: int) -> Tensor:
        if isinstance(image, Tensor) and image.shape[1] == self.vae.config.latent_channels:
            return image
        pixels = self.image_processor.preprocess(image, height=height, width=width)
        mean = self.vae.encode(pixels.to(self.vae.device, self.vae.dtype)).latent_dist.mode()
        latents: Tensor = (mean - (self.vae.config.shift_factor or 0.0)) * self.vae.config.scaling_factor
        return latents

    @property
    def joint_attention_kwargs(self) -> dict[str, Any]:
        """The caller's arguments for the denoiser's attention, plus the lengths of the texts."""
        options: dict[str, Any] = self._joint_attention_kwargs or {}
        if self._text_lengths is None or not {"attention_mask", "text_lengths"}.isdisjoint(options):
            return options
        return {"text_lengths": self._text_lengths, **options}

    def encode_prompt(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
        """Return rows and pooled vectors of prompts and negatives, as the stock method."""
        if self.config.text_tokens == "real":
            return self._encode_real(*args, **kwargs)
        rows, negative, pooled, negative_pooled = super().encode_prompt(*args, **kwargs)
        if negative is None or self.config.uncond_text != "zero" or kwargs.get("negative_prompt_embeds") is not None:
            return rows, negative, pooled, negative_pooled
        if kwargs.get("negative_prompt"):
            raise ValueError(_ZERO)
        return rows, torch.zeros_like(negative), pooled, torch.zeros_like(negative_pooled)

    def _encode_real(
        self,
        prompt: Any,
        prompt_2: Any = None,
        prompt_3: Any = None,
        device: torch.device | None = None,
        num_images_per_prompt: int = 1,
        do_classifier_free_guidance: bool = True,
        negative_prompt: Any = None,
        negative_prompt_2: Any = None,
        negative_prompt_3: Any = None,
        prompt_embeds: Tensor | None = None,
        negative_prompt_embeds: Tensor | None = None,
        pooled_prompt_embeds: Tensor | None = None,
        negative_pooled_prompt_embeds: Tensor | None = None,
        clip_skip: int | None = None,
        max_sequence_length: int = 256,
        lora_scale: float | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
        """Return real rows and pooled vectors; shorter texts end in zeros."""
        if clip_skip is not None:
            raise ValueError("clip_skip is not supported: this model was trained on CLIP's second-to-last layer")
        device = device or self._execution_device
        if prompt_embeds is None:
            texts = self._encode((prompt, prompt_2, prompt_3), 1, device)
        else:
            texts = _pairs(prompt_embeds, pooled_prompt_embeds)
        negatives: list[TextRows] = []
        if do_classifier_free_guidance and negative_prompt_embeds is not None:
            negatives = _pairs(negative_prompt_embeds, negative_pooled_prompt_embeds)
        elif do_classifier_free_guidance:
            negatives = self._negatives((negative_prompt, negative_prompt_2, negative_prompt_3), texts, device)
        all_texts = [text for text in (*negatives, *texts) for _ in range(num_images_per_prompt)]
        tokens = nn.utils.rnn.pad_sequence([text[0] for text in all_texts], batch_first=True).to(device)
        pooled = torch.stack([text[1] for text in all_texts]).to(device)
        self._text_lengths = torch.tensor([len(text[0]) for text in all_texts], device=device)
        count = len(negatives) * num_images_per_prompt
        if not negatives:
            return tokens, None, pooled, None
        return tokens[count:], tokens[:count], pooled[count:], pooled[:count]

    def _negatives(self, prompts: tuple[Any, ...], texts: list[TextRows], device: torch.device) -> list[TextRows]:
        if self.config.uncond_text != "zero":
            return self._encode(tuple(prompt or None for prompt in prompts), len(texts), device)
        if any(any(prompt) for prompt in prompts if prompt):  # a text or a list of texts
            raise ValueError(_ZERO)
        return [(torch.zeros_like(rows[:1]), torch.zeros_like(pooled)) for rows, pooled in texts]

    def _encode(self, prompts: tuple[Any, ...], count: int, device: torch.device) -> list[TextRows]:
        """Encode one text per prompt, equal ones once; a single prompt is repeated ``count`` times."""
        first = prompts[0] or ""
        columns = [
            [prompt or first] if isinstance(prompt or first, str) else list(prompt or first) for prompt in prompts
        ]
        count = max(count, *map(len, columns))
        prompt_triples = list(zip(*(column * (count if len(column) == 1 else 1) for column in columns), strict=True))
        encoded = {triple: self._encode_one(triple, device) for triple in dict.fromkeys(prompt_triples)}
        return [encoded[triple] for triple in prompt_triples]

    def _encode_one(self, texts: tuple[str, ...], device: torch.device) -> TextRows:
        clip_l, pooled_l = self._encode_clip(self.tokenizer, self.text_encoder, texts[0], device)
        clip_g, pooled_g = self._encode_clip(self.tokenizer_2, self.text_encoder_2, texts[1], device)
        width = self.transformer.config.joint_attention_dim
        t5 = clip_l.new_zeros(0, width)  # without T5 its tokens are left out, as training does when it drops T5
        if self.text_encoder_3 is not None:
            t5 = self.text_encoder_3(self._ids(self.tokenizer_3, texts[2], self.config.t5_max_length, device))[0][0]
        num_clip = max(len(clip_l), len(clip_g))
        width_l = clip_l.shape[-1]
        rows = t5.new_zeros(num_clip + len(t5), width)
        rows[: len(clip_l), :width_l] = clip_l
        rows[: len(clip_g), width_l : width_l + clip_g.shape[-1]] = clip_g
        rows[num_clip:] = t5
        dtype = self.transformer.dtype
        return rows.to(dtype), torch.cat([pooled_l, pooled_g]).to(dtype)

    def _encode_clip(self, tokenizer: Any, encoder: Any, text: str, device: torch.device) -> TextRows:
        output = encoder(self._ids(tokenizer, text, self.tokenizer_max_length, device), output_hidden_states=True)
        return output.hidden_states[-2][0], output.text_embeds[0]

    @staticmethod
    def _ids(tokenizer: Any, text: str, max_length: int, device: torch.device) -> Tensor:
        return torch.tensor([tokenizer(text, max_length=max_length, truncation=True)["input_ids"]], device=device)


def _pairs(rows_BTW: Tensor, pooled_BP: Tensor | None) -> list[TextRows]:
    assert pooled_BP is not None, "check_inputs requires it"
    return list(zip(rows_BTW, pooled_BP, strict=True))
