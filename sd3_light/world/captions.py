"""Scene <-> caption: one short English and Chinese sentence per scene, and a parser for both."""

import difflib
import re
from collections.abc import Iterable

from sd3_light.config.faults import UserError
from sd3_light.world.scene import BACKGROUNDS, COLOURS, OBJECT_SIZES, RELATIONS, SHAPES, Item, Scene

LANGUAGES: tuple[str, ...] = ("en", "zh")

EN_PLURALS = {shape: shape + ("es" if shape.endswith("s") else "s") for shape in SHAPES}
EN_COUNTS = {2: "two", 3: "three", 4: "four"}

ZH_SHAPES = dict(zip(SHAPES, ("圆形", "正方形", "三角形", "星形", "十字形", "圆环", "菱形"), strict=True))
ZH_COLOURS = dict(zip(COLOURS, ("红色", "绿色", "蓝色", "黄色", "紫色", "橙色", "青色"), strict=True))
ZH_BACKGROUNDS = {"white": "白色", "black": "黑色", "grey": "灰色", "pink": "粉色"}
ZH_SIZES = {"small": "小的", "large": "大的"}
ZH_COUNTS = {2: "两个", 3: "三个", 4: "四个"}
ZH_RELATIONS = {"left of": "左边", "right of": "右边", "above": "上方", "below": "下方"}


def scene_captions(scene: Scene) -> dict[str, str]:
    """Return the caption of a scene in each language of `LANGUAGES`."""
    return {"en": _english(scene), "zh": _chinese(scene)}


def parse_caption(caption: str) -> Scene:
    """Return the scene that a caption describes. Raises a `UserError` that names unknown words."""
    text = caption.strip().rstrip(".。").lower()
    chinese = any("\u4e00" <= letter <= "\u9fff" for letter in text)
    text = re.sub(r"\s+", "", text).replace(",", "，") if chinese else " ".join(text.split())
    for kind, pattern in (_ZH_PATTERNS if chinese else _EN_PATTERNS).items():
        if match := pattern.fullmatch(text):
            return _scene(kind, match.groupdict(), caption)
    unknown = _unknown_chinese(text) if chinese else _unknown_english(text)
    raise UserError(f"caption {caption!r} is not a caption of the demo world: {unknown}")


def _english(scene: Scene) -> str:
    ground = f" on a {scene.background} background"
    first = scene.items[0]
    if scene.kind == "single":
        return f"a {first.size} {first.colour} {first.shape}{ground}"
    if scene.kind == "count":
        return f"{EN_COUNTS[scene.count]} {first.colour} {EN_PLURALS[first.shape]}{ground}"
    first_text, second_text = (
        f"{'an' if item.colour[0] in 'aeiou' else 'a'} {item.colour} {item.shape}" for item in scene.items
    )
    return f"{first_text} {scene.relation} {second_text}{ground}"


def _chinese(scene: Scene) -> str:
    ground = ZH_BACKGROUNDS[scene.background] + "背景上"
    first, *_ = names = [ZH_COLOURS[item.colour] + ZH_SHAPES[item.shape] for item in scene.items]
    if scene.relation is not None:
        return f"{ground}，{first}在{names[1]}的{ZH_RELATIONS[scene.relation]}"
    size = scene.items[0].size
    return f"{ground}有{'一个' + ZH_SIZES[size] if size else ZH_COUNTS[scene.count]}{first}"


# Word -> meaning for both languages, which share no word.
_MEANINGS: dict[str, str | int] = {
    **{word: word for words in (SHAPES, COLOURS, BACKGROUNDS, OBJECT_SIZES, RELATIONS) for word in words},
    **{plural: shape for shape, plural in EN_PLURALS.items()},
    **{word: count for table in (EN_COUNTS, ZH_COUNTS) for count, word in table.items()},
    **{
        word: name
        for table in (ZH_SHAPES, ZH_COLOURS, ZH_BACKGROUNDS, ZH_SIZES, ZH_RELATIONS)
        for name, word in table.items()
    },
}


def _scene(kind: str, words: dict[str, str], caption: str) -> Scene:
    """Build the scene of a matched caption; `words` are the named groups of the pattern."""
    meaning = {name: _MEANINGS[word] for name, word in words.items()}
    first = Item(str(meaning["shape"]), str(meaning["colour"]), str(meaning["size"]) if "size" in meaning else None)
    items: tuple[Item, ...] = (first,)
    relation = None
    if kind == "pair":
        items += (Item(str(meaning["other_shape"]), str(meaning["other_colour"])),)
        relation = str(meaning["relation"])
        if items[0] == items[1]:
            raise UserError(f"caption {caption!r} relates two equal objects; change the colour or shape of one")
    count = int(meaning.get("count", len(items)))
    return Scene(kind, items, relation, count, str(meaning["background"]))


def any_of(name: str, words: Iterable[str]) -> str:
    """Return a named regex group that matches one of the words."""
    return f"(?P<{name}>{'|'.join(words)})"


def _en_patterns() -> dict[str, re.Pattern[str]]:
    ground = f" on a {any_of('background', BACKGROUNDS)} background"
    colour = any_of("colour", COLOURS)
    shape = any_of("shape", SHAPES)
    other = f"an? {any_of('other_colour', COLOURS)} {any_of('other_shape', SHAPES)}"
    return {
        "single": re.compile(f"a {any_of('size', OBJECT_SIZES)} {colour} {shape}{ground}"),
        "count": re.compile(
            f"{any_of('count', EN_COUNTS.values())} {colour} {any_of('shape', EN_PLURALS.values())}{ground}"
        ),
        "pair": re.compile(f"an? {colour} {shape} {any_of('relation', RELATIONS)} {other}{ground}"),
    }


def _zh_patterns() -> dict[str, re.Pattern[str]]:
    ground = f"{any_of('background', ZH_BACKGROUNDS.values())}背景上"
    item = any_of("colour", ZH_COLOURS.values()) + any_of("shape", ZH_SHAPES.values())
    other = any_of("other_colour", ZH_COLOURS.values()) + any_of("other_shape", ZH_SHAPES.values())
    return {
        "single": re.compile(f"{ground}有一个{any_of('size', ZH_SIZES.values())}{item}"),
        "count": re.compile(f"{ground}有{any_of('count', ZH_COUNTS.values())}{item}"),
        "pair": re.compile(f"{ground}，{item}在{other}的{any_of('relation', ZH_RELATIONS.values())}"),
    }


_EN_PATTERNS = _en_patterns()
_ZH_PATTERNS = _zh_patterns()
_EN_EXAMPLE = "a large red circle on a white background"
_ZH_EXAMPLE = "白色背景上有一个大的红色圆形"
_EN_WORDS = sorted(
    {"a", "an", "on", "background"} | {part for word in _MEANINGS if word.isascii() for part in word.split()}
)
ZH_WORDS = tuple(
    sorted({"背景上", "，", "有", "一个", "在", "的"} | {word for word in _MEANINGS if not word.isascii()})
)
"""The words of the Chinese captions."""


def _unknown_english(text: str) -> str:
    """Explain why an English sentence matches no pattern."""
    known = set(_EN_WORDS)
    hints = [_hint(word, _EN_WORDS) for word in text.split() if word not in known]
    return "; ".join(hints) or f"write it as {_EN_EXAMPLE!r}"


def _unknown_chinese(text: str) -> str:
    """Explain why a Chinese sentence matches no pattern: the parts that no known word covers."""
    longest_first = sorted(ZH_WORDS, key=len, reverse=True)
    rest = re.split("|".join(map(re.escape, longest_first)), text)
    hints = [_hint(part, ZH_WORDS) for part in rest if part]
    return "; ".join(hints) or f"write it as {_ZH_EXAMPLE!r}"


def _hint(word: str, words: Iterable[str]) -> str:
    near = difflib.get_close_matches(word, list(words), n=2, cutoff=0.3)
    return f"unknown word {word!r}" + (f", nearest: {', '.join(near)}" if near else "")
