"""Prompts for the samples of a new project: texts that are not training captions. Pure.

A sample that repeats a training caption looks right even if the model has only memorised its image.
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence

_SHARE = 0.75  # of the captions that name the concept
_LONGEST = 4  # words of the concept
_COUNT = 4  # prompts without a concept
_COMMON = re.compile(
    r"an?|the|of|in|on|at|with|and|or|to|by|for|from|is|are|its|his|her|this|that|some|one|two|three|four|"
    r"photo|photograph|pic\w+|image|drawing|painting|illustration|icon"
)
_CHINESE = re.compile(r"[\u3400-\u9fff]")
_WORD = re.compile(r"[\u3400-\u9fff]|[^\W_\u3400-\u9fff]+(?:[-'][^\W_\u3400-\u9fff]+)*")
_CUT = re.compile(r",\s*|，|。|\s+(?=(?:in|on|at|with|under|over|beside|near|behind|below|above|next to|and)\b)|(?=在)")
_SUBJECTS = (
    ("moon", "{} on the surface of the moon"),
    ("library", "a watercolour painting of {} in a library"),
    ("market", "{} at a night market, seen from above"),
    ("snow", "{} in deep snow"),
)
_STYLES = (
    ("lighthouse", "a lighthouse on a cliff, {}"),
    ("bicycle", "a bicycle in front of a bakery, {}"),
    ("owl", "an owl reading a book, {}"),
)
_OTHERS = (("fruit", "a bowl of fruit on a wooden table"), ("harbour", "boats in a harbour at dawn"))
_SUBJECTS_ZH = (("月", "月球表面的{}"), ("书", "图书馆里的{}，水彩画"), ("雪", "雪地里的{}"))
_STYLES_ZH = (("灯塔", "悬崖上的灯塔，{}"), ("自行车", "面包店门前的自行车，{}"), ("猫头鹰", "看书的猫头鹰，{}"))
_OTHERS_ZH = (("水果", "木桌上的一碗水果"), ("港", "黎明时港口里的小船"))


def sample_prompts(captions: Sequence[str], has_concept: bool) -> tuple[str, ...]:
    """Return prompts that are none of the captions, which are spread over the set.

    If most captions name a concept: two with it in a context that no caption has, and one without it. Otherwise a
    prompt has the beginning of one caption and the end of another.
    """
    texts = list(dict.fromkeys(text.strip() for text in captions if text.strip()))
    concept = find_concept(texts) if has_concept else ""
    if not concept:
        return tuple(_recombined(texts))
    is_chinese = _is_chinese(concept)
    is_style = "style" in concept.lower() or concept.endswith(("风格", "风"))
    contexts = (_STYLES_ZH if is_style else _SUBJECTS_ZH) if is_chinese else (_STYLES if is_style else _SUBJECTS)
    with_concept = [text.format(concept) for text in _unused(contexts, texts)[:2]]
    return (*with_concept, _unused(_OTHERS_ZH if is_chinese else _OTHERS, texts)[0])


def find_concept(captions: Sequence[str]) -> str:
    """Return the words that most captions share, such as "sks dog"; "" if they share only common words."""
    found: Counter[tuple[str, ...]] = Counter()
    spelled: dict[tuple[str, ...], str] = {}
    for caption in captions:
        words = _WORD.findall(caption)
        stems = [_stem(word) for word in words]
        separator = "" if _is_chinese(caption) else " "
        longest = 2 * _LONGEST if separator == "" else _LONGEST  # a Chinese word has several characters
        phrases = {}
        for start in range(len(words)):
            for stop in range(start + 1, min(start + longest, len(words)) + 1):
                phrases[tuple(stems[start:stop])] = separator.join(words[start:stop])
        found.update(phrases.keys())
        spelled = phrases | spelled  # the first spelling
    needed = max(2, _SHARE * len(captions))
    shared = [phrase for phrase, count in found.items() if count >= needed and _is_telling(phrase)]
    best = max(shared, key=lambda phrase: (found[phrase], len(phrase)), default=())
    return spelled[best] if best else ""


def _is_telling(phrase: tuple[str, ...]) -> bool:
    """Return whether a phrase begins and ends with words that are not common; one Chinese character says too little."""
    is_short = len(phrase) == 1 and bool(_CHINESE.match(phrase[0]))
    return not (is_short or any(_COMMON.fullmatch(word) for word in (phrase[0], phrase[-1])))


def _stem(word: str) -> str:
    """Return a word without its case and a plural's ending."""
    lower = word.lower()
    return lower[:-1] if len(lower) > 3 and lower.endswith("s") else lower


def _unused(contexts: Sequence[tuple[str, str]], captions: Sequence[str]) -> list[str]:
    """Return the contexts whose word is in the fewest captions first."""
    lower = [caption.lower() for caption in captions]
    return [text for _, text in sorted(contexts, key=lambda context: sum(context[0] in text for text in lower))]


def _recombined(captions: Sequence[str]) -> Iterator[str]:
    """Yield beginnings of captions with the ends of others, for captions that are spread over the set."""
    known = set(captions)
    lengths = [len(_WORD.findall(caption)) for caption in captions]
    median = sorted(lengths)[len(lengths) // 2] if lengths else 0
    # long ones may not fit a text encoder
    usual = [caption for caption, length in zip(captions, lengths, strict=True) if length <= median]
    distance = max(1, len(usual) // _COUNT)
    for number in range(0, min(len(usual), distance * _COUNT), distance):
        first = usual[number]
        others = [usual[(number + len(usual) // 2 + step) % len(usual)] for step in range(len(usual))]
        others = [other for other in others if other != first and _is_chinese(other) == _is_chinese(first)]
        swapped = (_with_end_of(first, other) for other in others)
        joined = (f"{first}{'，' if _is_chinese(first) else ' and '}{other}" for other in others)
        from_above = f"{first}，俯视" if _is_chinese(first) else f"{first}, seen from above"
        text = next((text for text in (*swapped, *joined) if text and text not in known), from_above)
        known.add(text)
        yield text


def _is_chinese(text: str) -> bool:
    return bool(_CHINESE.search(text))


def _with_end_of(first: str, second: str) -> str:
    """Return the beginning of a text with the end of another; "" if one of them cannot be cut."""
    head = _first_cut(first)
    tail = _first_cut(second)
    return first[:head] + second[tail:] if head and tail else ""


def _first_cut(text: str) -> int:
    """Return where the first part of a text ends; 0 if it has one part."""
    return next((found.start() for found in _CUT.finditer(text) if 0 < found.start() < len(text) - 1), 0)
