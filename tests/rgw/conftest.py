"""Tests against Ceph RGW. They start a small Ceph cluster, so they run only when asked for: `make test-s3`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session")
def rgw(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
    pytest.importorskip("obstore", reason="needs obstore and boto3")
    from s3_servers import Rgw

    if "rgw" not in pytestconfig.getoption("markexpr"):
        pytest.skip("make test-s3 runs it")
    if missing := Rgw.missing():
        pytest.skip(f"not installed: {', '.join(missing)} (Debian: radosgw ceph-osd ceph-mon ceph-common)")
    server = Rgw(tmp_path_factory.mktemp("rgw"))
    try:
        server.start()
        yield server
    finally:
        server.stop()
