"""The memory that ranks of one node exchange over."""

import os

import pytest

from kvasir_runtime.parallel.shared_segment import SharedSegment, segment_bytes


@pytest.fixture
def segment():
    segment = SharedSegment.create(segment_bytes(2))
    yield segment
    segment.close()


def test_its_last_byte_is_the_same_memory_in_every_mapping(segment: SharedSegment) -> None:
    one, other = segment.map(), segment.map()
    one[-1] = 7
    assert (len(one), other[-1], other[0]) == (segment_bytes(2), 7, 0)


def test_dev_shm_may_be_as_small_as_it_likes(segment: SharedSegment) -> None:
    """The memory lies in another file system, one without a size: a full /dev/shm would end a rank with SIGBUS."""
    status = os.fstat(segment.fileno())
    assert status.st_dev != os.stat("/dev/shm").st_dev
    assert (status.st_nlink, status.st_size) == (0, segment_bytes(2)), "it has no name"
