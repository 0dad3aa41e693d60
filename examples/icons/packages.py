"""The packages that the icon sets come from: fetched with `npm pack`, checked by hash, read without unpacking."""

import hashlib
import json
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Package:
    """One release of a package, the licence of what is used of it, and its makers."""

    name: str
    version: str
    sha256: str
    licence: str
    makers: str

    @property
    def file(self) -> str:
        """The name that `npm pack` gives its archive."""
        return f"{self.name.removeprefix('@').replace('/', '-')}-{self.version}.tgz"


@dataclass(frozen=True)
class Style:
    """One look of the same concepts: where its images are in the package, and how captions call it."""

    package: Package
    folder: str
    english: str
    chinese: str


FLUENT = "Microsoft (Fluent Emoji), packaged by LobeHub"
FLUENT_3D = Package(
    "@lobehub/fluent-emoji-3d",
    "1.1.0",
    "c1bb7eee7de090205a232518a9ab4adb3df458bfbe8a1f78232991194c8b2e58",
    "MIT",
    FLUENT,
)
FLUENT_FLAT = Package(
    "@lobehub/fluent-emoji-flat",
    "1.1.0",
    "8f9113c027c7c20eced0070354715a4093a459b8bef6332b91d45f38c9bdb147",
    "MIT",
    FLUENT,
)
FLUENT_MODERN = Package(
    "@lobehub/fluent-emoji-modern",
    "1.0.0",
    "080906de394ad8335c24f67e1b33f12a9ac1b6d99324d26ae63cad8d27359769",
    "MIT",
    FLUENT,
)
TWEMOJI = Package(
    "@twemoji/svg",
    "15.0.0",
    "1d2907557a422c7c4e3feca50ef915c39da1db3d76b4a4d7e73fb59bce4403c3",
    "CC-BY-4.0",
    "Twitter and other contributors (Twemoji)",
)
OPENMOJI = Package(
    "openmoji",
    "17.0.0",
    "55ee7d13485dec86e9f38c1f3a645a13382d33ff97c0cd845ee824b0aef45e68",
    "CC-BY-SA-4.0",
    "OpenMoji contributors, HfG Schwäbisch Gmünd",
)
NOTO = Package(
    "emoji-datasource-google",
    "16.0.0",
    "fb5fd131b362aab7a55542d2a147a79708cce0a8b1c1bbacd470172708b5c438",
    "Apache-2.0",
    "Google (Noto Emoji), packaged by Cal Henderson",
)
NAMES = Package(
    "cldr-annotations-full",
    "48.2.0",
    "28576e51225deb51e3ddd734b0f824a0079682cb5d8c27faa9f68149317a14d1",
    "Unicode-3.0",
    "Unicode (CLDR names)",
)
MORE_NAMES = Package(
    "cldr-annotations-derived-full",
    "48.2.0",
    "4be946ff5815f806ec78b50363d577a769f2fbfb90c6380a44e161a92436996e",
    "Unicode-3.0",
    "Unicode (CLDR names)",
)
ICONIFY = Package(
    "@iconify/json",
    "2.2.535",
    "1a545f86fa224d6531d8fb101dcbe83aac2b28689a21cbed6fc68318a5af4d91",
    "per set, below",
    "Iconify",
)

# fmt: off
STYLES = {
    "fluent_3d":     Style(FLUENT_3D,     "package/assets/",        "3d style",      "立体风格"),
    "fluent_flat":   Style(FLUENT_FLAT,   "package/assets/",        "flat style",    "扁平风格"),
    "fluent_modern": Style(FLUENT_MODERN, "package/assets/",        "modern style",  "现代风格"),
    "twemoji":       Style(TWEMOJI,       "package/",               "twemoji style", "推特风格"),
    "openmoji":      Style(OPENMOJI,      "package/color/svg/",     "outline style", "描边风格"),
    "noto":          Style(NOTO,          "package/img/google/64/", "noto style",    "谷歌风格"),
}
# fmt: on


def fetch(package: Package, folder: Path) -> Path:
    """Return the archive of a package in ``folder``; download it if it is not there. Another content is an error."""
    path = folder / package.file
    if not path.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        npm = shutil.which("npm")
        if npm is None:
            raise SystemExit(f"npm is not installed; install it, or put {package.file} into {folder}")
        print(f"downloading {package.name} {package.version}", flush=True)
        subprocess.run([npm, "pack", "--silent", f"{package.name}@{package.version}"], cwd=folder, check=True)
    check_hash(path, package)
    return path


def check_hash(path: Path, package: Package) -> None:
    """Exit unless a downloaded file is that of the package."""
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != package.sha256:
        raise SystemExit(f"{path} has sha256 {digest}, not {package.sha256}; delete it and run again")


def members(archive: Path, folder: str) -> Iterator[tuple[str, bytes]]:
    """Yield (name, content) of the files directly in a folder of an archive."""
    with tarfile.open(archive) as tar:
        for member in tar:
            name = member.name.removeprefix(folder)
            if member.isfile() and member.name.startswith(folder) and "/" not in name:
                file = tar.extractfile(member)
                assert file is not None
                yield name, file.read()


def read_json(archive: Path, name: str) -> Any:
    """Return the value of a JSON file in an archive."""
    folder, _, file = name.rpartition("/")
    return next(json.loads(content) for member, content in members(archive, f"{folder}/") if member == file)
