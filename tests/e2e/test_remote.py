"""Training from a cache at a URL, on a local S3 server, equals training from a local cache."""

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
        files.mkdir("faraway")  # moto has one state per process: other tests use other buckets
        yield "s3://faraway"
        files.clear_instance_cache()
    server.stop()


@pytest.fixture
def remote(tmp_path: Path, cached_project: Project, bucket: str) -> Project:
    """A project without images or a local cache: the cache is in the bucket."""
    url = f"{bucket}/{tmp_path.name}"
    fsspec.filesystem("s3").put(str(cached_project.cache), url, recursive=True)
    project = cached_project.copy(tmp_path / "remote", without=("images", "cache"))
    text = project.train_toml.read_text().replace('cache_dir = "cache"', f'cache_dir = "{url}"')
    project.train_toml.write_text(f'stream_cache_dir = "downloaded"\n{text}')
    return project


@pytest.mark.usefixtures("unproven")
@pytest.mark.parametrize("workers", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_a_run_from_s3_equals_the_run_from_the_folder(remote: Project, project: Project, workers: int) -> None:
    project.train("max_steps=2")
    remote.train("max_steps=2", f"num_dataloader_workers={workers}")
    assert list(remote.losses()) == [1, 2]
    assert remote.losses() == project.losses()
    downloaded = list((remote.folder / "downloaded").glob("*.safetensors"))
    assert downloaded
    assert not (remote.folder / "cache").exists()


def test_what_cannot_train_is_reported_and_no_cache_is_built_at_a_url(remote: Project, bucket: str) -> None:
    with pytest.raises(UserError, match=r"stream_cache_gb = 1e-06 is too small for the shards .* set [\d.]+ or more"):
        remote.train("max_steps=2", "stream_cache_gb=1e-6")
    with pytest.raises(UserError, match="t5_max_length"):
        remote.train("model.t5_max_length=8")
    other = Path(shutil.copytree(remote.model, remote.folder / "other"))
    config = other / "vae" / "config.json"
    config.write_text(config.read_text().replace("{", '{\n  "note": "another",', 1))
    with pytest.raises(UserError, match="vae"):
        remote.train(f'model.diffusers_path="{other}"')
    with pytest.raises(UserError, match=r"no cache at s3://faraway/none.* build it with `sd3-light cache CONFIG`"):
        remote.train(f"cache_dir={bucket}/none")
    assert remote.build_cache() == []
