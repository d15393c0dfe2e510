"""Files of recorded loads."""

import gzip

import numpy as np
import pytest

from services.simulation.traces import WorkloadError, read_counts, read_times


@pytest.mark.parametrize("name", ["plain.txt", "packed.txt.gz"])
@pytest.mark.parametrize(("read", "values"), [(read_counts, [3, 0, 12]), (read_times, [0, 0.25, 1e3])])
def test_lines_are_read_with_comments_and_blank_lines_between(tmp_path, name, read, values):
    text = "# about this file\n" + "\n\n".join(f" {value} " for value in values) + "\r\n"
    path = tmp_path / name
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    found = read(path)
    assert found.dtype == np.float64
    assert found.tolist() == values


@pytest.mark.parametrize(
    ("read", "text", "reason"),
    [
        (read_counts, b"1\n\n-4\n", "line 3: '-4' is no count"),
        (read_counts, b"1\n2.5\n", "line 2: '2.5' is no count"),
        (read_counts, "1\n²\n".encode(), "line 2: '²' is no count"),
        (read_counts, b"1\n99999999999999999999\n", "line 2: '9{20}' is no count"),
        (read_counts, b"1 2 3\n", "line 1: '1 2 3' is no count"),
        (read_counts, b"", "no arrivals"),
        (read_counts, b"# 5\n0\n0\n", "no arrivals"),
        (read_counts, b"\xff\xfe\n", "cannot read"),
        (read_times, b"0.5\nnan\n", "line 2: 'nan' is no time"),
        (read_times, b"0.5\ninf\n", "line 2: 'inf' is no time"),
        (read_times, b"-1\n", "line 1: '-1' is no time"),
        (read_times, b"soon\n", "line 1: 'soon' is no time"),
        (read_times, b"2\n\n1.5\n", "line 3: 1.5 comes after 2: sort"),
        (read_times, b"\n# 1\n", "no arrivals"),
    ],
)
def test_a_bad_file_is_refused_with_its_name_and_line(tmp_path, read, text, reason):
    path = tmp_path / "bad.txt"
    path.write_bytes(text)
    with pytest.raises(WorkloadError, match=reason) as raised:
        read(path)
    assert str(path) in str(raised.value)


@pytest.mark.parametrize("read", [read_counts, read_times])
def test_a_file_that_cannot_be_opened_or_unpacked_is_refused(tmp_path, read):
    whole = gzip.compress(b"1\n1\n" * 100)
    (tmp_path / "cut.gz").write_bytes(whole[:-9])
    (tmp_path / "spoilt.gz").write_bytes(whole[:12] + b"\xff\xff\xff" + whole[15:])
    (tmp_path / "plain.gz").write_bytes(b"1\n2\n")
    for name in ("missing.txt", "cut.gz", "spoilt.gz", "plain.gz", "", "/dev/zero"):
        with pytest.raises(WorkloadError, match="cannot read the trace"):
            read(tmp_path / name)
