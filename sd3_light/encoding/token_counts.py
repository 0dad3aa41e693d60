"""How many tokens a text has, counted from a tokenizer's files, without torch."""

from pathlib import Path

from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from sd3_light.inputs import TEXT_BYTES, require_regular

_CLIP_WORDS = r"""<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"""


def count_tokens(tokenizer: Tokenizer, text: str) -> int:
    """Return the tokens of a text, including those that the tokenizer adds."""
    # one by one: in batches the library starts threads, and warns when a process with them forks
    return len(tokenizer.encode(text).ids)


def load_counter(folder: Path) -> Tokenizer | None:
    """Return a tokenizer without truncation; None if this library cannot read its files (encoding reports damage)."""
    path = folder / "tokenizer.json"
    older = (folder / "vocab.json", folder / "merges.txt")
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
    start = "<|startoftext|>"
    end = "<|endoftext|>"
    tokenizer = Tokenizer(BPE.from_file(str(vocab), str(merges), unk_token=end, end_of_word_suffix="</w>"))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Lowercase()]
    )
    split = pre_tokenizers.Split(Regex(_CLIP_WORDS), behavior="removed", invert=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    specials = [(token, tokenizer.token_to_id(token)) for token in (start, end)]
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{start} $A {end}", special_tokens=specials)
    return tokenizer
