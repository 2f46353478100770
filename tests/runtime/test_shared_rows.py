"""Rows of shared memory are apart, and everybody's."""

from pathlib import Path

from kvasir_runtime.shared_rows import SharedRows


def test_rows_do_not_overlap_and_are_seen_by_who_maps_the_file_too(tmp_path: Path) -> None:
    own, other = (SharedRows(tmp_path / "rows", num_rows=3, num_slots=2) for _ in range(2))
    for index in range(3):
        row = own.row(index)
        assert len(row) == 2
        row[0], row[1] = 10.0 * index, 10.0 * index + 1
    assert [list(other.row(index)) for index in range(3)] == [[0.0, 1.0], [10.0, 11.0], [20.0, 21.0]]
    assert (other.column(1).tolist(), other.total(1)) == ([1.0, 11.0, 21.0], 33.0)
