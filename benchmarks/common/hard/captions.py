"""Harder scene <-> caption, in English and Chinese; every scene has its own caption in each language."""

import re

from common.hard.scene import HARD_RELATIONS, TEXTURES, Group, HardScene
from sd3_light.config.faults import UserError
from sd3_light.world.captions import (
    EN_COUNTS,
    EN_PLURALS,
    ZH_BACKGROUNDS,
    ZH_COLOURS,
    ZH_COUNTS,
    ZH_RELATIONS,
    ZH_SHAPES,
    ZH_SIZES,
    ZH_WORDS,
    any_of,
)
from sd3_light.world.scene import BACKGROUNDS, COLOURS, OBJECT_SIZES, SHAPES

_EN_COUNTS = {**EN_COUNTS, 5: "five", 6: "six"}
_ZH_COUNTS = {1: "一个", **ZH_COUNTS, 5: "五个", 6: "六个"}
_ZH_TEXTURES = {"striped": "条纹", "dotted": "圆点"}
_ZH_RELATIONS = {**ZH_RELATIONS, "in front of": "前面", "behind": "后面"}
ZH_HARD_WORDS = tuple(
    sorted({*ZH_WORDS, *_ZH_COUNTS.values(), *_ZH_TEXTURES.values(), *_ZH_RELATIONS.values(), "、", "和"})
)
"""The words of the Chinese captions of harder scenes."""


def hard_captions(scene: HardScene) -> dict[str, str]:
    """Return the caption of a scene by language."""
    return {"en": _english(scene), "zh": _chinese(scene)}


def _english(scene: HardScene) -> str:
    names = [_english_group(group) for group in scene.groups]
    ground = f" on a {scene.background} background"
    if scene.relation is not None:
        return f"{names[0]} {scene.relation} {names[1]}{ground}"
    return (", ".join(names[:-1]) + " and " if names[1:] else "") + names[-1] + ground


def _english_group(group: Group) -> str:
    words = [group.size, None if group.texture == "plain" else group.texture, group.colour]
    words.append(group.shape if group.count == 1 else EN_PLURALS[group.shape])
    text = " ".join(filter(None, words))
    if group.count > 1:
        return f"{_EN_COUNTS[group.count]} {text}"
    return f"{'an' if text[0] in 'aeiou' else 'a'} {text}"


def _chinese(scene: HardScene) -> str:
    names = [_chinese_group(group) for group in scene.groups]
    ground = f"{ZH_BACKGROUNDS[scene.background]}背景上"
    if scene.relation is not None:
        return f"{ground}，{names[0]}在{names[1]}的{_ZH_RELATIONS[scene.relation]}"
    return f"{ground}有" + ("、".join(names[:-1]) + "和" if names[1:] else "") + names[-1]


def _chinese_group(group: Group) -> str:
    size = ZH_SIZES[group.size] if group.size else ""
    name = ZH_COLOURS[group.colour] + ZH_SHAPES[group.shape]
    return _ZH_COUNTS[group.count] + size + _ZH_TEXTURES.get(group.texture, "") + name


def parse_hard_caption(caption: str) -> HardScene:
    """Return the scene that a caption describes."""
    text = caption.strip().rstrip(".。").lower()
    chinese = any("\u4e00" <= letter <= "\u9fff" for letter in text)
    pattern, group = (_ZH, _ZH_GROUP) if chinese else (_EN, _EN_GROUP)
    match = pattern.fullmatch(text)
    if match is None:
        raise UserError(f"caption {caption!r} is not a caption of the harder scenes; write it as {_EXAMPLE!r}")
    groups = tuple(_group(part.groupdict()) for part in group.finditer(match["groups"]))
    relation = next((word for word in _RELATION_WORDS if word in match["groups"]), None)
    return HardScene(groups, _MEANINGS[match["background"]], None if relation is None else _MEANINGS[relation])


_EXAMPLE = "two small striped red circles and a blue star on a white background"
_COUNTS = {"a": 1, "an": 1} | {word: count for table in (_EN_COUNTS, _ZH_COUNTS) for count, word in table.items()}
_MEANINGS: dict[str, str] = {
    **{word: word for word in (*SHAPES, *COLOURS, *BACKGROUNDS, *OBJECT_SIZES, *HARD_RELATIONS, *TEXTURES)},
    **{plural: shape for shape, plural in EN_PLURALS.items()},
    **{
        word: name
        for table in (ZH_SHAPES, ZH_COLOURS, ZH_BACKGROUNDS, ZH_SIZES, _ZH_RELATIONS, _ZH_TEXTURES)
        for name, word in table.items()
    },
}
_RELATION_WORDS = (*HARD_RELATIONS, *_ZH_RELATIONS.values())


def _group(words: dict[str, str | None]) -> Group:
    meaning = {name: _MEANINGS[word] for name, word in words.items() if word and name != "count"}
    return Group(**meaning, count=_COUNTS[words["count"] or ""])


def _patterns() -> tuple[re.Pattern[str], re.Pattern[str], re.Pattern[str], re.Pattern[str]]:
    shapes = sorted((*SHAPES, *EN_PLURALS.values()), key=len, reverse=True)  # a plural before its singular
    en_group = (
        f"{any_of('count', ('an', 'a', *_EN_COUNTS.values()))} (?:{any_of('size', OBJECT_SIZES)} )?"
        f"(?:{any_of('texture', TEXTURES[1:])} )?{any_of('colour', COLOURS)} {any_of('shape', shapes)}"
    )
    zh_group = (
        f"{any_of('count', _ZH_COUNTS.values())}{any_of('size', ZH_SIZES.values())}?"
        f"{any_of('texture', _ZH_TEXTURES.values())}?{any_of('colour', ZH_COLOURS.values())}"
        f"{any_of('shape', ZH_SHAPES.values())}"
    )
    en_any, zh_any = (re.sub(r"\?P<\w+>", "?:", group) for group in (en_group, zh_group))
    en_link = f", | and | (?:{'|'.join(HARD_RELATIONS)}) "
    zh_link = "、|和|在"
    en = f"(?P<groups>{en_any}(?:(?:{en_link}){en_any})*) on a {any_of('background', BACKGROUNDS)} background"
    zh_relations = "|".join(_ZH_RELATIONS.values())
    zh_groups = f"(?P<groups>{zh_any}(?:(?:{zh_link}){zh_any})*(?:的(?:{zh_relations}))?)"
    zh = f"{any_of('background', ZH_BACKGROUNDS.values())}背景上(?:有|，){zh_groups}"
    return re.compile(en), re.compile(en_group), re.compile(zh), re.compile(zh_group)


_EN, _EN_GROUP, _ZH, _ZH_GROUP = _patterns()
