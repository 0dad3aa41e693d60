"""Prompt files: valid rows are read, invalid ones are reported with file and line."""

from pathlib import Path

import pytest

from sd3_light.config.faults import UserError
from sd3_light.sample.image_requests import PromptRow, read_prompt_rows


def write(folder: Path, text: str, name: str = "prompts.csv") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_prompt_files_have_rows_or_faults(tmp_path: Path) -> None:
    path = write(tmp_path, "\ufeffa star, red\n\n  两个圆  \n", "prompts.txt")
    expected = [PromptRow("a star, red", where=f"{path}:1"), PromptRow("两个圆", where=f"{path}:3")]
    assert read_prompt_rows(path) == expected
    path = write(tmp_path, "prompt,seed,steps\n" + "a,x,0\n" * 7)
    with pytest.raises(UserError) as error:
        read_prompt_rows(path)
    lines = str(error.value).splitlines()
    assert lines[0].startswith(f"{path}:2: seed")
    assert lines[1].startswith(f"{path}:2: steps")
    assert lines[2].startswith(f"{path}:3: seed")
    assert lines[10:] == ["... and 4 more"]
    with pytest.raises(UserError, match="does not exist"):
        read_prompt_rows(tmp_path / "none.csv")
    (tmp_path / "x.txt").write_bytes(b"abc\xff\xfe")
    with pytest.raises(UserError, match=r"is not UTF-8 \(byte 3\)"):
        read_prompt_rows(tmp_path / "x.txt")


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("prompt\na star\n", [(2, PromptRow("a star"))]),
        ("\ufeffprompt,seed\r\na star,7\r\n", [(2, PromptRow("a star", 7))]),
        ("seed, prompt\n0,a\n,b\n", [(2, PromptRow("a", 0)), (3, PromptRow("b"))]),
        (
            "prompt,seed,negative_prompt,width,height,steps,guidance\na,1,blur,64,48,9,1.5\n",
            [(2, PromptRow("a", 1, "blur", 64, 48, 9, 1.5))],
        ),
        ('prompt,steps\n"a star, red",3\n\n"two\nlines",4\nlast,\n', None),
        ("prompt,guidance\na,0\n", [(2, PromptRow("a", guidance=0.0))]),
        ("prompt,seed\n", []),
        (f"prompt,seed\na,{2**63 - 1}\n", [(2, PromptRow("a", 2**63 - 1))]),
    ],
)
def test_valid_csv(tmp_path: Path, text: str, rows: list[tuple[int, PromptRow]] | None) -> None:
    path = write(tmp_path, text)
    if rows is None:  # blank lines and lines inside quotes count
        rows = [(2, PromptRow("a star, red", steps=3)), (4, PromptRow("two\nlines", steps=4)), (6, PromptRow("last"))]
    expected = [PromptRow(**{**vars(row), "where": f"{path}:{line}"}) for line, row in rows]
    assert read_prompt_rows(path) == expected


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("", 1, "no column `prompt`"),
        ("seed\n1\n", 1, "no column `prompt`"),
        ("prompt,sed\na,1\n", 1, "unknown column 'sed'; did you mean seed?"),
        ("prompt,zzz\na,1\n", 1, "unknown column 'zzz'; the columns are prompt, seed"),
        ("prompt,seed,seed\na,1,2\n", 1, "the column seed appears twice"),
        ("prompt,seed\na,x\n", 2, "seed is 'x'; it must be an integer from 0"),
        ("prompt,seed\na,-1\n", 2, "seed is '-1'"),
        (f"prompt,seed\na,{2**63}\n", 2, "seed is '9223372036854775808'"),
        ("prompt,seed\na,1.5\n", 2, "seed is '1.5'"),
        ("prompt,steps\na,0\n", 2, "steps is '0'; it must be an integer from 1 to 1000"),
        ("prompt,guidance\na,nan\n", 2, "guidance is 'nan'; it must be a number from 0"),
        ("prompt,guidance\na,-1\n", 2, "guidance is '-1'"),
        ("prompt,width\na,0\n", 2, "width is '0'; it must be an integer, in pixels"),
        ("prompt,height\na,tall\n", 2, "height is 'tall'"),
        ("prompt,seed\na,1\n ,2\n", 3, "the prompt is empty"),
        ("prompt,seed\na star, red,1\n", 2, "3 cells for 2 columns; put text with a comma in quotes"),
        ("prompt,seed\na\n", 2, "1 cells for 2 columns"),
        ('prompt,seed\nb,1\n"a"x,1\n', 3, "not valid CSV"),
    ],
)
def test_invalid_csv_names_file_and_line(tmp_path: Path, text: str, line: int, message: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(UserError) as error:
        read_prompt_rows(path)
    assert str(error.value).startswith(f"{path}:{line}: ")
    assert message in str(error.value)
    assert "\n" not in str(error.value)
