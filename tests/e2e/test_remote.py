"""Training from a cache at a URL: an S3 server is started, and the run is the one that a local cache gives."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from sd3_light.config.faults import UserError
from tests.project import Project


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    """The URL of an empty bucket; endpoint and credentials are in the environment."""
    pytest.importorskip("s3fs", reason="the S3 tests need s3fs")
    moto = pytest.importorskip("moto.server", reason="the S3 tests need moto[server]")
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        patch.setenv("AWS_ACCESS_KEY_ID", "testing")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        files = fsspec.filesystem("s3")
        files.mkdir("faraway")  # moto keeps one state a process: other tests have buckets of their own
        yield "s3://faraway"
        files.clear_instance_cache()
    server.stop()


@pytest.fixture
def far(tmp_path: Path, cached_project: Project, bucket: str) -> Project:
    """A project of a machine that has neither pictures nor cache: the cache lies in the bucket."""
    url = f"{bucket}/{tmp_path.name}"
    fsspec.filesystem("s3").put(str(cached_project.cache), url, recursive=True)
    project = cached_project.copy(tmp_path / "far", without=("images", "cache"))
    text = project.train_toml.read_text().replace('cache_dir = "cache"', f'cache_dir = "{url}"')
    project.train_toml.write_text(f'stream_cache_dir = "kept"\n{text}')
    return project


@pytest.mark.usefixtures("unproven")
@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_from_s3_is_the_run_from_the_folder(far: Project, project: Project, workers: int) -> None:
    project.train("max_steps=2")
    far.train("max_steps=2", f"num_dataloader_workers={workers}")
    assert list(far.losses()) == [1, 2]
    assert far.losses() == project.losses()
    kept = list((far.folder / "kept").glob("*.safetensors"))
    assert kept
    assert not (far.folder / "cache").exists()


def test_a_limit_that_is_too_small_is_said_before_training(far: Project) -> None:
    with pytest.raises(UserError, match=r"stream_cache_gb = 1e-06 is too small for the shards .* set [\d.]+ or more"):
        far.train("max_steps=2", "stream_cache_gb=1e-6")


def test_a_cache_of_other_encoders_is_refused(far: Project) -> None:
    with pytest.raises(UserError, match="t5_max_length"):
        far.train("model.t5_max_length=8")
    other = Path(shutil.copytree(far.model, far.folder / "other"))
    config = other / "vae" / "config.json"
    config.write_text(config.read_text().replace("{", '{\n  "note": "another",', 1))
    with pytest.raises(UserError, match="vae"):
        far.train(f'model.diffusers_path="{other}"')


def test_a_cache_is_not_built_at_a_url(far: Project, bucket: str) -> None:
    with pytest.raises(UserError, match=r"no cache at s3://faraway/none.* build it with a local cache_dir"):
        far.train(f"cache_dir={bucket}/none")
    with pytest.raises(UserError, match="is a URL, and a cache is built in a folder"):
        far.build_cache(regenerate=True)
    assert far.build_cache() == []
