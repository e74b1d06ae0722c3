"""Tiny data and runs shared by the tests of this folder."""

import pytest

from tiny_run import write_tiny_data


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    return write_tiny_data(tmp_path_factory.mktemp("data") / "tiny")
