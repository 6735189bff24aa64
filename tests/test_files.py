"""Files that are whole or not there."""

from unitsphere.common.files import replacing


def test_writers_of_one_file_do_not_share_a_temporary_one(tmp_path):
    """Both have the same number as a process, as two containers may that share a folder."""
    path = tmp_path / "file"
    with replacing(path) as slow:
        slow.write_text("slow")
        with replacing(path) as quick:
            quick.write_text("quick")
        assert path.read_text() == "quick"
    assert path.read_text() == "slow" and list(tmp_path.iterdir()) == [path]
