"""Where rows of results go."""

import os

import pytest

from peagle_jax.report.records import Records, check_records
from peagle_jax.types import InputError


def test_a_folder_for_rows_is_checked_and_not_made(tmp_path):
    out = tmp_path / "a" / "b"
    check_records(out)
    assert not (tmp_path / "a").exists()
    rows = Records(out)
    with pytest.raises(InputError, match="results.jsonl: one command adds rows at a time"):
        check_records(out)
    check_records(out, "load.jsonl")
    assert os.listdir(out) == ["results.jsonl"]
    rows.add({"a": 1})
    del rows
    check_records(out)
    assert (out / "results.jsonl").read_text() == '{"a": 1}\n'


def test_a_place_that_cannot_be_a_folder_of_rows(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="file/b: the output folder must be writable; got Not a"):
        check_records(tmp_path / "file" / "b")
    (tmp_path / "results.jsonl").mkdir()
    with pytest.raises(InputError, match="must be writable; got Is a directory"):
        check_records(tmp_path)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(InputError, match="new: the output folder must be .* Permission denied"):
        check_records(tmp_path / "new")
