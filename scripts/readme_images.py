"""Makes the images of the README and of docs/reference/ui.md, `docs/images/*.png`, from a demo folder: a
grid of samples, and pages in Chromium.

    sd3-light demo --out demo_run
    python scripts/readme_images.py demo_run

The run on the page of a run continues the shipped base with sample images, a minute or two on two CPU cores.
"""

import argparse
import base64
import os
import re
import shutil
import subprocess
import sys
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from PIL import Image

from sd3_light.world.dataset import draw_prompts

if TYPE_CHECKING:
    from tests.e2e.browser import Browser

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "images"
MAX_BYTES = 200_000
WIDTH, HEIGHT, SHOWN_WIDTH = 1280, 880, 800
PROMPTS = '["two red stars on a white background", "a blue circle left of a green square on a white background"]'
NUM_GRID_PROMPTS = 16
PLAIN_PAGE = """
document.documentElement.style.overflow = "hidden";
const lastTwo = path => path.split("/").slice(-2).join("/");
document.querySelectorAll(".key.soft").forEach(node => { node.textContent = lastTwo(node.textContent) });
"""
DOCUMENTED = """
document.querySelector('#faults')?.innerText === 'None.' && (() => {
  const text = document.querySelector('#text');
  const place = text.value.indexOf('warmup_steps');
  text.setSelectionRange(place, place);
  text.dispatchEvent(new Event('click'));
  return document.querySelector('#doc').innerText.includes('warmup_steps');
})()
"""
LISTED = """
document.querySelectorAll('.sample').length > 0 && !document.querySelector('#job p')
&& [...document.querySelectorAll('.sample img')].slice(0, 5).every(image => image.naturalWidth)
"""
LIST_IMAGES = "document.querySelector('.sample') ?? document.querySelector('form[action$=\"/list\"] button')?.click()"
SAMPLED = (
    f"sampling.prompts={PROMPTS}",
    "sampling.every_n_steps=20",
    "sampling.before_first_step=true",
    "sampling.steps=12",
    "sampling.guidance=2.0",
    "max_steps=60",
    "eval_every_n_steps=20",
    "logging_steps=1",
)


def command(*arguments: object) -> None:
    """Run `sd3-light` of this working tree."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-P", "-m", "sd3_light", *map(str, arguments)], check=True, env=environment)


def save_small(image: Image.Image, path: Path) -> None:
    """Write a PNG of at most MAX_BYTES, with fewer colours if needed."""
    for colours in (None, 256, 128, 64, 32):
        data = BytesIO()
        (image if colours is None else image.quantize(colours)).save(data, "PNG", optimize=True)
        if data.tell() <= MAX_BYTES:
            path.write_bytes(data.getvalue())
            print(f"{path.relative_to(ROOT)}: {data.tell() // 1000} kB, {image.width} x {image.height}")
            return
    raise SystemExit(f"{path}: more than {MAX_BYTES} bytes with 32 colours; make the image smaller")


def grid(demo: Path) -> None:
    """Draw the shipped model's images of some prompts, without selection."""
    out = demo / "readme"
    shutil.rmtree(out, ignore_errors=True)
    prompts = [prompt.text for prompt in draw_prompts(NUM_GRID_PROMPTS, 0, True, language="en")]
    command("sample", demo / "model", *prompts, "--out", out, "--guidance", 2, "--steps", 20)
    with Image.open(out / "grid.png") as image:
        save_small(image.convert("RGB"), IMAGES / "grid.png")


def page(browser: "Browser", name: str, address: str, ready: str = "true", first: str = "") -> None:
    """Save the top of a page, in light and dark colours, when a condition is true in it."""
    from tests.waiting import wait_until

    for scheme in ("light", "dark"):
        browser.open_address(address, width=WIDTH, scheme=scheme)
        browser.evaluate(first)
        wait_until(
            lambda: browser.evaluate(f"Boolean({ready})"),
            lambda: f"{name}: {browser.evaluate('document.body.innerText')}",
            pause=0.2,
        )
        browser.evaluate(PLAIN_PAGE)
        clip = {"x": 0, "y": 0, "width": WIDTH, "height": HEIGHT, "scale": 1}
        png = browser.call("Page.captureScreenshot", format="png", clip=clip)["data"]
        image = Image.open(BytesIO(base64.b64decode(png))).convert("RGB")
        size = SHOWN_WIDTH, round(SHOWN_WIDTH * HEIGHT / WIDTH)
        save_small(image.resize(size, Image.Resampling.LANCZOS), IMAGES / f"{name}-{scheme}.png")


def live_pages(browser: "Browser", demo: Path, run: Path) -> None:
    """Save pages of `sd3-light ui`: a cache, a dataset, a project, and the queue while one run trains and one waits."""
    from sd3_light.ui.folders import folder_id
    from sd3_light.ui.job import DONE, Job, write_jobs
    from sd3_light.ui.run_queue import RunQueue

    config = demo / "sampled.toml"
    shutil.copy(run / "config.toml", config)
    with TemporaryDirectory() as state:
        queue = RunQueue(Path(state, "sd3_light"), [demo])
        queue.slots = list  # the server starts what waits
        waiting = [_longer(config, name) for name in ("first_try", "second_try")]
        for each in waiting:
            queue.add(each)
        finished = Job("done", str(config), str(run), state=DONE, added=1.0, begun=1.0, ended=2.0)
        write_jobs(queue.file, [*queue.jobs(), finished])
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_STATE_HOME": state}
        arguments = [sys.executable, "-P", "-m", "sd3_light", "ui", str(demo), "--port", "0"]
        with subprocess.Popen(arguments, env=environment, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            address = server.stdout.readline().split()[1]  # open ADDRESS (...)
            dataset = f"{address}datasets/{folder_id(demo / 'data.toml')}"
            try:
                page(browser, "ui", f"{address}data/{folder_id(demo / 'cache')}")
                page(
                    browser,
                    "ui-queue",
                    f"{address}queue",
                    "document.querySelector('main section:nth-of-type(1) .track') !== null",
                )
                for each in waiting:
                    queue.stop(demo / each.stem)
                page(browser, "ui-project", f"{address}projects/{folder_id(demo / 'continue.toml')}", DOCUMENTED)
                page(browser, "ui-dataset", dataset, LISTED, LIST_IMAGES)
            finally:
                server.terminate()


def _longer(config: Path, name: str) -> Path:
    """Write a copy of a config for another run."""
    text = config.read_text(encoding="utf-8")
    path = config.with_name(f"{name}.toml")
    path.write_text(
        re.sub(r"(?m)^output_dir = .*$", f"output_dir = '{config.with_name(name)}'", text), encoding="utf-8"
    )
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("demo", type=Path, help="the folder of `sd3-light demo`")
    demo = parser.parse_args().demo.resolve()
    IMAGES.mkdir(exist_ok=True)
    run = demo / "sampled"
    if not run.exists():
        overrides = [part for key in (f'output_dir="{run}"', *SAMPLED) for part in ("--set", key)]
        command("train", demo / "continue.toml", *overrides)
    command("report", run, "--out", demo / "report.html")
    command("inspect", demo / "cache", "--out", demo / "cache.html")
    grid(demo)
    sys.path.insert(0, str(ROOT))
    from tests.e2e.browser import start_browser

    with TemporaryDirectory(ignore_cleanup_errors=True) as profile:  # the browser may still write
        browser = start_browser(Path(profile))
        page(browser, "report", (demo / "report.html").as_uri())
        page(browser, "dataset", (demo / "cache.html").as_uri())
        live_pages(browser, demo, run)
        browser.close()


if __name__ == "__main__":
    main()
