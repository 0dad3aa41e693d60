"""The script that builds sets of icons, on small archives in the packages' layouts."""

import hashlib
import importlib
import io
import json
import sys
import tarfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from sd3_light.cli import app
from sd3_light.config.load_dataset import load_directories
from sd3_light.evaluate.against import SHUFFLED, TRUE
from sd3_light.evaluate.nearest import BY_CAPTION, BY_CAPTION_IN_GROUP, ORACLE
from sd3_light.sources.preprocess import make_thumbnail

FOLDER = Path(__file__).parents[3] / "examples" / "icons"
NAMES = {"🐼": ("panda", "熊猫"), "👍": ("thumbs up", "拇指向上"), "👍🏽": ("thumbs up: medium", "拇指向上: 中等")}
EMOJI = {**NAMES, **{chr(0x1F400 + index): (f"animal {index}", f"动物{index}") for index in range(60)}}


@pytest.fixture(scope="module")
def build() -> Iterator[Any]:
    sys.path.insert(0, str(FOLDER))
    try:
        yield importlib.import_module("build")
    finally:
        sys.path.remove(str(FOLDER))
        for name in ("build", "packages"):
            sys.modules.pop(name, None)


def icon_png(colour: tuple[int, int, int, int]) -> bytes:
    data = io.BytesIO()
    Image.new("RGBA", (48, 32), colour).save(data, "PNG")
    return data.getvalue()


def drawing(seed: str) -> bytes:
    """Return an image that is similar to no other."""
    pixels = np.random.default_rng(list(seed.encode())).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    data = io.BytesIO()
    Image.fromarray(pixels).resize((48, 36), Image.Resampling.NEAREST).save(data, "PNG")
    return data.getvalue()


def archive(path: Path, files: dict[str, bytes]) -> str:
    with tarfile.open(path, "w:gz") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return hashlib.sha256(path.read_bytes()).hexdigest()


def stem(emoji: str) -> str:
    return "-".join(f"{ord(character):x}" for character in emoji)


@pytest.fixture
def packages(build: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Archives of the names and of two styles; the script's hashes follow."""
    folder = tmp_path / "packages"
    folder.mkdir()
    for name, kind in (("NAMES", "annotations"), ("MORE_NAMES", "annotationsDerived")):
        files = {}
        for index, language in enumerate(("en", "zh")):
            table = {key: {"tts": [texts[index]]} for key, texts in EMOJI.items()}
            files[f"package/{kind}/{language}/annotations.json"] = json.dumps({kind: {"annotations": table}}).encode()
        package = getattr(build, name)
        monkeypatch.setattr(build, name, replace(package, sha256=archive(folder / package.file, files)))
    for name in ("fluent_3d", "noto"):
        style = build.STYLES[name]
        files = {f"{style.folder}{stem(key)}.png": drawing(f"{name}/{key}") for key in EMOJI}
        files |= {f"{style.folder}readme.png": b"", f"{style.folder}sub/1f600.png": b"", "package/LICENSE": b"MIT"}
        package = replace(style.package, sha256=archive(folder / style.package.file, files))
        monkeypatch.setitem(build.STYLES, name, replace(style, package=package))
    return folder


def run(build: Any, monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> None:
    monkeypatch.setattr(build, "find_spec", lambda name: name, raising=False)
    monkeypatch.setattr(sys, "argv", ["build.py", *map(str, arguments), "--processes", "1", "--size", "32"])
    build.main()


def test_a_build_can_be_repeated(build: Any, packages: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = (tmp_path / "icons", "--packages", packages, "--styles", "noto", "--every", "20")
    with monkeypatch.context() as patch:
        patch.setattr(build, "write_attribution", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run(build, patch, *arguments)
    assert not (tmp_path / "icons").exists()
    run(build, monkeypatch, *arguments)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["icons", "packages"]


def test_a_missing_renderer_is_reported_first(build: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "find_spec", lambda _: None, raising=False)
    monkeypatch.setattr(build, "emoji_names", lambda _: pytest.fail("it reads the packages"))
    monkeypatch.setattr(sys, "argv", ["build.py", str(tmp_path / "icons")])
    with pytest.raises(SystemExit, match="pip install resvg_py"):
        build.main()
    assert not (tmp_path / "icons").exists()


def test_a_set_of_two_styles(build: Any, packages: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "icons"
    run(build, monkeypatch, out, "--packages", packages, "--styles", "fluent_3d", "noto")
    cells = json.loads((out / "cells.json").read_text(encoding="utf-8"))
    assert len(cells) == 2 * len(EMOJI)
    panda = next(cell for cell in cells if cell["file"] == "fluent_3d/1f43c.png")
    assert panda["captions"] == ["panda, 3d style", "熊猫，立体风格"]
    held_out = [cell for cell in cells if cell["held_out"]]
    assert 0 < len(held_out) < len(cells) // 8
    trained = {cell["concept"] for cell in cells if not cell["held_out"]}
    assert all(cell["concept"] in trained for cell in held_out)
    for cell in cells:
        path = out / ("held_out" if cell["held_out"] else "train") / cell["file"]
        assert Image.open(path).size == (32, 32)
        captions = json.loads((path.parent / "captions.json").read_text(encoding="utf-8"))
        assert captions[path.name] == cell["captions"]
    for toml in ("data.toml", "held_out.toml"):
        directories, faults = load_directories(out / toml)
        assert not faults
        assert all(directory.path.is_dir() for directory in directories)
    text = (out / "ATTRIBUTION.md").read_text(encoding="utf-8")
    assert "| @lobehub/fluent-emoji-3d | 1.1.0 | MIT |" in text
    assert "openmoji" not in text


def test_a_model_from_icons_alone(build: Any, packages: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands of docs/start/own-images.md, smaller still."""
    run(build, monkeypatch, tmp_path / "trial", "--packages", packages, "--styles", "fluent_3d", "noto", "--every", "3")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sd3_light.export.diffusers_folder.prove", lambda *_: {})
    smaller = {
        "parts": "--vae-steps 2 --text-steps 2 --judge-steps 2 --vae-batch 4 --text-batch 8",
        "train": "--set max_steps=2 --set cooldown_steps=1 --set micro_batch_size_per_gpu=2 "
        "--set num_dataloader_workers=0 --set sampling.steps=2",
        "evaluate": "--prompts 8 --steps 1 --out scores.json",
    }
    commands = [line for line in trial_commands() if line.startswith("sd3-light")]
    assert [line.split()[1] for line in commands] == ["parts", "new", "train", "evaluate"]
    for line in commands:
        _, verb, *arguments = line.split()
        result = CliRunner().invoke(app, [verb, *arguments, *smaller.get(verb, "").split()])
        assert result.exit_code == 0, result.output
        if verb == "parts":
            assert f"next: {commands[1]}" in " ".join(result.output.split()), "the page has the command that it prints"
    rows = json.loads((tmp_path / "scores.json").read_text(encoding="utf-8"))["rows"]
    assert list(rows) == [TRUE, SHUFFLED, BY_CAPTION, BY_CAPTION_IN_GROUP, ORACLE, "runs/icons"]
    assert rows["runs/icons"]["images"] == 8


def trial_commands() -> list[str]:
    """Return the commands of the last block of docs/start/own-images.md."""
    page = (FOLDER.parents[1] / "docs" / "start" / "own-images.md").read_text(encoding="utf-8")
    return page.split("```bash\n")[-1].split("```")[0].splitlines()


def test_skin_tones_and_a_trial(build: Any, packages: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(build, monkeypatch, tmp_path / "a", "--packages", packages, "--styles", "noto", "--no-skin-tones")
    cells = json.loads((tmp_path / "a" / "cells.json").read_text(encoding="utf-8"))
    assert len(cells) == len(EMOJI) - 1
    assert not any(cell["held_out"] for cell in cells)  # no concept has another style
    run(build, monkeypatch, tmp_path / "b", "--packages", packages, "--styles", "noto", "--every", "8")
    assert len(json.loads((tmp_path / "b" / "cells.json").read_text(encoding="utf-8"))) == -(-len(EMOJI) // 8)


def test_a_changed_archive_fails(build: Any, packages: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = packages / build.STYLES["noto"].package.file
    path.write_bytes(path.read_bytes() + b"x")
    with pytest.raises(SystemExit, match="sha256"):
        run(build, monkeypatch, tmp_path / "out", "--packages", packages, "--styles", "noto")
    assert not (tmp_path / "out").exists()


def test_drawings_in_millimetres_have_a_size(build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The renderer counts pixels per inch from 0 unless it is asked otherwise, and then refuses such drawings."""

    def render(svg_string: str, width: int, dpi: int = 0, skip_system_fonts: bool = False) -> list[int]:
        assert dpi == 96
        return list(icon_png((0, 0, 0, 255)))

    monkeypatch.setitem(sys.modules, "resvg_py", SimpleNamespace(svg_to_bytes=render))
    assert build.open_image(b'<svg width="210mm" height="297mm"/>', 32).size == (48, 32)


def test_iconify_sets_are_chosen_by_licence(build: Any, tmp_path: Path) -> None:
    def facts(licence: str, **more: Any) -> dict[str, Any]:
        return {"name": "Set", "author": {"name": "A"}, "license": {"spdx": licence}, "palette": True, **more}

    sets = {
        "good": facts("MIT"), "share": facts("CC-BY-SA-4.0"), "grey": facts("MIT", palette=False),
        "brands": facts("MIT", category="Logos"), "noto": facts("Apache-2.0"),
    }  # fmt: skip
    table = {"icons": {"arrow-left": {"body": "<path/>"}, "big": {"body": "<g/>", "width": 32}}, "height": 24}
    files = {f"package/json/{name}.json": json.dumps(table).encode() for name in (*sets, "retired")}
    path = tmp_path / "iconify.tgz"
    archive(path, {"package/collections.json": json.dumps(sets).encode(), **files})
    chosen = [icon for _, icons in build.iconify_icons(path, logos=False) for icon in icons]
    assert [icon.cell.file for icon in chosen] == ["good/arrow-left.png", "good/big.png"]
    assert chosen[0].cell.captions == ["arrow left, Set style"]
    assert b'viewBox="0 0 32 24"' in chosen[1].content
    assert len(list(build.iconify_icons(path, logos=True))) == 2
    cell = build.Cell("a/b.png", "b", "a", ["b"])
    assert not build.draw(build.Icon(cell, icon_png((255, 255, 255, 255))), tmp_path, 32)
    assert not build.draw(build.Icon(cell, icon_png((0, 0, 0, 0))), tmp_path, 32)
    assert not build.draw(build.Icon(cell, b"nonsense"), tmp_path, 32)
    assert build.draw(build.Icon(cell, icon_png((0, 0, 0, 255))), tmp_path, 32)


@pytest.mark.parametrize(
    ("concept", "figure"),
    [
        ("man farmer: medium-light skin tone", "farmer"),
        ("woman: red hair", ""),
        ("person in manual wheelchair facing right", "in manual wheelchair"),
        ("left-facing fist", "fist"),
        ("kiss: woman, man, light skin tone, dark skin tone", "kiss"),
        ("manual", "manual"),
        ("merman: dark skin tone", "mer"),
        ("mermaid", "mer"),
        ("merperson: medium skin tone", "mer"),
        ("princess: light skin tone", "prince"),
        ("Mrs. Claus", "claus"),
        ("mx claus: dark skin tone", "claus"),
        ("old woman", ""),
        ("older person: medium-dark skin tone", ""),
        ("woman and man holding hands", "holding hands"),
        ("people holding hands", "holding hands"),
        ("rightwards hand: light skin tone", "hand"),
        ("up-left arrow", "arrow"),
        ("counterclockwise arrows button", "arrows button"),
        ("person: curly hair", ""),
        ("sandwich", "sandwich"),
        ("merge", "merge"),
    ],
)
def test_variants_of_a_figure_are_one(build: Any, concept: str, figure: str) -> None:
    assert build.figure(concept) == figure


def test_whole_groups_are_held_out(build: Any) -> None:
    """Variants in one style, shared files and similar drawings are on one side, whatever the style."""
    styles = list(build.STYLES)[:3]
    icons = []
    for index in range(300):
        for number, style in enumerate(styles):
            art = drawing(f"{index % 250 if number == 1 else index}/{style}")  # some drawings of a style are the same
            art = drawing(f"{index}/{styles[0]}") if number == 2 and index % 7 == 0 else art  # some are shared
            for variant in ("man", "woman"):
                cell = build.Cell(f"{style}/{variant}-{index}.png", f"{variant} thing{index}", style, [])
                icons.append(build.Icon(cell, art + variant.encode()))
    cells = build.hold_out(icons, [make_thumbnail(icon.content, None) for icon in icons])
    held = [icon for icon, cell in zip(icons, cells, strict=True) if cell.held_out]
    trained = [icon for icon, cell in zip(icons, cells, strict=True) if not cell.held_out]
    assert 0.01 < len(held) / len(icons) < 0.08
    assert not {icon.content for icon in held} & {icon.content for icon in trained}
    groups = [{(icon.cell.style, build.figure(icon.cell.concept)) for icon in side} for side in (held, trained)]
    assert not groups[0] & groups[1]
    assert {icon.cell.concept for icon in held} <= {icon.cell.concept for icon in trained}, "each can be answered"
    assert build.characters("0023-fe0f-20e3") == "#\u20e3"


def test_groups_with_an_iconify_icon_are_trained_on(build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "HELD_OUT_SHARE", 0.5)
    one, other = list(build.STYLES)[:2]
    icons = [
        build.Icon(build.Cell(f"{style}/{index}.png", f"thing{index}", style, []), drawing(f"{style}{index}"))
        for index in range(50)
        for style in (one, other)
    ]
    thumbnails = [make_thumbnail(icon.content, None) for icon in icons]
    held = [icon for icon, cell in zip(icons, build.hold_out(icons, thumbnails), strict=True) if cell.held_out]
    assert held
    copy = build.Icon(build.Cell("set/copy.png", "copy", "set", []), held[0].content)
    cells = build.hold_out([*icons, copy], [*thumbnails, make_thumbnail(copy.content, None)])
    assert not cells[-1].held_out
    assert not cells[icons.index(held[0])].held_out


@pytest.mark.parametrize(
    ("name", "emoji"), [("1f43c", "🐼"), ("1F44D-1F3FD", "👍🏽"), ("readme", None), ("fffffff", None)]
)
def test_file_names_of_emoji(build: Any, name: str, emoji: str | None) -> None:
    assert build.characters(name) == emoji
