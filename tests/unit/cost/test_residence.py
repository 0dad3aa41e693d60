"""Where `cache_residence = "auto"` puts the cache."""

import pytest

from sd3_light.cost.residence import ResidenceChoice, Room, choose_residence

GIB = 1 << 30
H200 = Room(140 * GIB, 60 * GIB, 128 * GIB, 1)
"""Room for 68 GiB beside training, and for 64 GiB in half of the host memory."""


def chosen(cache: float, *rooms: Room, epochs: float = 10, **keys: object) -> ResidenceChoice:
    return choose_residence(int(cache * GIB), rooms or (H200,), epochs, **keys)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("cache", "room", "residence"),
    [
        (68, H200, "device"),
        (69, H200, "stream"),
        (69, H200._replace(host=139 * GIB), "host"),
        (69, H200._replace(host=None), "stream"),
        (69, H200._replace(host=2 * 139 * GIB, processes=2), "host"),
        (69, H200._replace(host=139 * GIB, processes=2), "stream"),
        (112, H200._replace(training=0), "device"),
        (113, H200._replace(training=0, host=1000 * GIB), "host"),  # explicit values are rejected above 80%, too
        (1, H200._replace(training=200 * GIB), "host"),
        (1, H200._replace(gpu=None), "stream"),
    ],
)
def test_the_fastest_memory_with_room_is_chosen(cache: int, room: Room, residence: str) -> None:
    assert chosen(cache, room).residence == residence


def test_it_must_fit_for_every_process() -> None:
    full, small = H200._replace(training=139 * GIB), H200._replace(host=GIB)
    assert chosen(2, H200, H200).residence == "device"
    assert chosen(2, H200, full).residence == chosen(2, full, H200).residence == "host"
    assert chosen(2, H200, full, small).residence == "stream"


def test_the_reason_has_the_numbers() -> None:
    assert chosen(1.5) == ("device", "it takes 1.5 GiB; GPU memory has room for 68.8 GiB beside training")
    assert chosen(80).reason == (
        "it takes 80 GiB; GPU memory has room for 68.8 GiB beside training; half of the free host memory is 64 GiB per "
        "process"
    )
    assert chosen(1, H200._replace(training=200 * GIB)).reason.startswith("it takes 1 GiB; GPU memory has room for 0 B")
    assert chosen(1, H200._replace(gpu=None)).reason == "on a CPU the model takes longer than reading"
    assert chosen(1, epochs=0.25) == ("stream", "the run reads only 25% of the cache")
    assert chosen(1, is_remote=True) == ("stream", "shards at a URL are fetched while the model trains")
    choice = chosen(1, why_not_device="pipelines")
    assert choice == ("host", "it takes 1 GiB; pipelines; half of the free host memory is 64 GiB per process")
