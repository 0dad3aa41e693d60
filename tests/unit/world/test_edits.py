"""Edits: every one is right in its own image, wrong in the image before it, and what it keeps is judged apart."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sd3_light.world.edits import AFTER, BEFORE, EDIT_KINDS, Edit, Layout, draw_edits, judge_edit, write_edits
from sd3_light.world.scene import HELD_OUT_PAIRS, Item

Objects = dict[tuple[int, int], Item | None]
SIDES = [64, 96]
RED = Item("circle", "red", "small")
BLUE = Item("star", "blue", "large")
GREEN = replace(RED, colour="green")
CYAN = replace(RED, colour="cyan")
LARGE = replace(RED, size="large")
TOP = (0, 0)


def pairs(layout: Layout) -> set[tuple[str, str]]:
    return {(item.colour, item.shape) for _, item in layout.objects}


@pytest.mark.parametrize("held_out", [False, True])
@pytest.mark.parametrize("side", SIDES)
def test_an_edit_is_right_after_it_and_only_kept_before_it(held_out: bool, side: int) -> None:
    edits = draw_edits(240, 3, held_out)
    assert {edit.kind for edit in edits} == set(EDIT_KINDS)
    for edit in edits:
        after = judge_edit(edit.after.render(side), edit)
        before = judge_edit(edit.before.render(side), edit)
        assert (after.changed, after.kept) == (True, True), edit
        assert (before.changed, before.kept) == (False, True), edit


def test_edits_differ_and_show_held_out_pairs_only_where_they_may() -> None:
    edits = draw_edits(240, 3, held_out=False)
    shifted = zip(edits, edits[1:] + edits[:1], strict=True)
    others = [judge_edit(other.after.render(64), edit) for edit, other in shifted]
    assert sum(verdict.all for verdict in others) == 0
    assert sum(verdict.kept for verdict in others) < 5
    for edit in draw_edits(300, 1, held_out=False):
        assert not HELD_OUT_PAIRS & (pairs(edit.before) | pairs(edit.after))
    for edit in draw_edits(300, 1, held_out=True):
        all_pairs = pairs(edit.before) | pairs(edit.after)
        named = {pair for pair in all_pairs if " ".join(pair) in edit.instruction}
        if edit.kind == "recolour":
            named |= pairs(edit.after) - pairs(edit.before)
        assert HELD_OUT_PAIRS & (all_pairs if edit.kind == "background" else named), edit
    edits = draw_edits(24, 5, held_out=False)
    assert draw_edits(12, 5, held_out=False) == edits[:12]
    assert draw_edits(24, 6, held_out=False) != edits
    assert draw_edits(24, 5, held_out=True) != edits
    assert len({edit.instruction for edit in draw_edits(600, 5, held_out=False)}) > 200


def both(kind: str, after: tuple[tuple[tuple[int, int], Item], ...]) -> Edit:
    """An edit of a red circle at the top left, with a blue star at the bottom right."""
    before = Layout("white", (((0, 0), RED), ((1, 1), BLUE)), (0.0, 0.0))
    return Edit(kind, before, replace(before, objects=after), "")


@pytest.mark.parametrize(
    ("kind", "after", "shown", "changed", "kept"),
    [
        ("recolour", {TOP: GREEN}, {TOP: CYAN}, False, True),
        ("recolour", {TOP: GREEN}, {TOP: Item("cross", "green", "small")}, True, False),
        ("recolour", {TOP: GREEN}, {TOP: replace(GREEN, size="large")}, True, False),
        ("recolour", {TOP: GREEN}, {TOP: None}, False, False),
        ("resize", {TOP: LARGE}, {TOP: LARGE, (1, 1): None}, True, False),
        ("remove", {TOP: None}, {TOP: None, (1, 1): None}, True, False),
        ("remove", {TOP: None}, {TOP: CYAN}, False, True),
        ("remove", {TOP: None}, {TOP: None, (1, 0): RED}, True, False),
        ("move", {TOP: None, (1, 0): RED}, {(1, 0): RED}, False, True),
        ("move", {TOP: None, (1, 0): RED}, {TOP: None, (1, 0): LARGE}, True, False),
        ("add", {(1, 0): RED}, {}, False, True),
        ("add", {(1, 0): RED}, {(1, 0): LARGE}, False, True),
        ("add", {(1, 0): RED}, {(1, 0): RED, (0, 1): BLUE}, True, False),
    ],
)  # fmt: skip
def test_what_changes_and_what_is_kept(kind: str, after: Objects, shown: Objects, changed: bool, kept: bool) -> None:
    edit = both(kind, ())
    edit = replace(edit, after=_with(edit.before, after))
    verdict = judge_edit(_with(edit.before, shown).render(64), edit)
    assert (verdict.changed, verdict.kept) == (changed, kept)


def _with(layout: Layout, objects: Objects) -> Layout:
    for place, item in objects.items():
        layout = layout.with_object(place, item)
    return layout


def test_what_changes_unasked_is_not_kept() -> None:
    edit = both("remove", (((1, 1), BLUE),))
    verdict = judge_edit(replace(edit.after, background="pink").render(64), edit)
    assert (verdict.changed, verdict.kept) == (True, False)
    ground = Edit("background", edit.before, replace(edit.before, background="pink"), "")
    verdict = judge_edit(replace(edit.before, background="grey").render(64), ground)
    assert (verdict.changed, verdict.kept) == (False, True)
    moved = replace(edit.after, offset=(6.0, 0.0))
    assert not judge_edit(moved.render(64), edit).kept
    assert judge_edit(replace(edit.after, offset=(2.0, 0.0)).render(64), edit).all


def test_pairs_are_written_with_their_instructions(tmp_path: Path) -> None:
    edits = draw_edits(3, 1, held_out=False)
    write_edits(tmp_path, edits, 64)
    captions = json.loads((tmp_path / AFTER / "captions.json").read_text(encoding="utf-8"))
    assert list(captions.values()) == [edit.instruction for edit in edits]
    for name, layout in ((BEFORE, edits[1].before), (AFTER, edits[1].after)):
        written = np.asarray(Image.open(tmp_path / name / "000001.png"))
        assert np.array_equal(written, np.asarray(layout.render(64)))
