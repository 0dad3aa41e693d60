"""How much of a caption or prompt SD3's text encoders read: counted from the tokenizers' files, without torch."""

from functools import partial
from pathlib import Path

from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from sd3_light.core.caption_lengths import TextLimit
from sd3_light.inputs import TEXT_BYTES, require_regular
from sd3_light.model.folder import CLIP_TOKENS, tokenizer_length

_CLIP_WORDS = r"""<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"""
_LONGEST_T5 = 512  # the highest value of the config's key


def text_limits(folder: Path, t5_max_length: int) -> list[TextLimit]:
    """Return how many tokens CLIP and T5 read, for those whose tokenizer can be read."""
    clip = _load(folder / "tokenizer")
    t5 = _load(folder / "tokenizer_3")
    limits = []
    if clip is not None:
        read = tokenizer_length(folder / "tokenizer") or CLIP_TOKENS
        remedies = ("T5 still reads what CLIP does not", "T5 reads it completely")
        limits.append(TextLimit("CLIP", read, f"CLIP's {read} tokens", *remedies, partial(_length, clip)))
    if t5 is not None:
        remedy = _t5_remedy(t5_max_length, tokenizer_length(folder / "tokenizer_3"))
        title = f"t5_max_length = {t5_max_length}"
        limits.append(TextLimit("T5", t5_max_length, title, remedy, "shorten it", partial(_length, t5)))
    return limits


def _t5_remedy(t5_max_length: int, tokenizer_maximum: int | None) -> str:
    maximum = min(_LONGEST_T5, tokenizer_maximum or _LONGEST_T5)
    if t5_max_length < maximum:
        return "shorten them, or raise t5_max_length"
    if maximum == _LONGEST_T5:
        return f"t5_max_length is at most {_LONGEST_T5}: shorten them"
    return f"this tokenizer allows at most {maximum}: shorten them, or use another model"


def _length(tokenizer: Tokenizer, text: str) -> int:
    # one by one: in batches the library starts threads, and warns when a process with them forks
    return len(tokenizer.encode(text).ids)


def _load(folder: Path) -> Tokenizer | None:
    """Return a tokenizer without truncation; None if this library cannot read its files (encoding reports damage)."""
    path, older = folder / "tokenizer.json", (folder / "vocab.json", folder / "merges.txt")
    try:
        if path.is_file():
            require_regular(path, TEXT_BYTES)
            tokenizer = Tokenizer.from_file(str(path))
        elif all(file.is_file() for file in older):
            tokenizer = _clip_tokenizer(*older)
        else:
            return None
    except Exception:  # the library raises no other class
        return None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _clip_tokenizer(vocab: Path, merges: Path) -> Tokenizer:
    """Return CLIP's tokenizer from its two older files, as transformers builds it."""
    require_regular(vocab, TEXT_BYTES)
    require_regular(merges, TEXT_BYTES)
    start, end = "<|startoftext|>", "<|endoftext|>"
    tokenizer = Tokenizer(BPE.from_file(str(vocab), str(merges), unk_token=end, end_of_word_suffix="</w>"))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Lowercase()]
    )
    split = pre_tokenizers.Split(Regex(_CLIP_WORDS), behavior="removed", invert=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    specials = [(token, tokenizer.token_to_id(token)) for token in (start, end)]
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{start} $A {end}", special_tokens=specials)
    return tokenizer
