"""Ring names from messages: a shard accepts only file names of one directory."""

import pytest

from ringlog.actors.wal_shard.io.rings import Rings
from ringlog.errors import RingError


@pytest.mark.parametrize(
    ("ring", "bell"),
    [
        ("a\0b", "b.bell"), ("a.ring", "b\0"), ("", ""), ("../x.ring", "b.bell"), ("/etc/passwd", "b.bell"),
        ("..", "b.bell"), ("a/b", "b.bell"), ("a" * 300, "b.bell"), ("a.ring", "../b.bell"),
    ],
)  # fmt: skip
def test_a_name_that_is_no_file_of_the_directory_is_refused(tmp_path, ring, bell):
    """A NUL character in a name once ended the shard."""
    rings = Rings(str(tmp_path), 0, "0" * 32)
    with pytest.raises(RingError, match="invalid ring or bell file name"):
        rings.attach(ring, bell)
    assert len(rings) == 0
