"""Which programs are taken, and where they would be fetched from."""

import pytest

from openk3.errors import BackendError
from openk3.sandbox import engines

STANZA = """Types: deb
# a comment
URIs: http://mirror.example/debian
Suites: bookworm bookworm-updates
Components: main
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg
"""
LIST = "deb [arch=amd64] http://mirror.example/debian bookworm main\ndeb http://x/other y z\n"


def test_mirror_of_this_machine_for_another_suite():
    key = "[signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] "
    wanted = f"deb {key}http://mirror.example/debian"
    assert engines._from_stanza(STANZA, "trixie") == [f"{wanted} trixie main"]
    assert engines._from_stanza(STANZA, None) == [f"{wanted} bookworm main"]
    assert engines._from_stanza(STANZA.replace("debian-archive", "vendor"), None) == []
    assert engines._from_list(LIST, "trixie") == [
        "deb [arch=amd64] http://mirror.example/debian trixie main"
    ]
    security = STANZA.replace("/debian\n", "/debian-security\n")
    assert engines._from_stanza(security, "trixie") == []


@pytest.mark.parametrize(
    ("said", "message"),
    [("runsc version 0.0~20221219.0", "works from 20240729"), ("", "does not run")],
)
def test_unusable_runsc_is_refused_with_the_reason(tmp_path, monkeypatch, said, message):
    program = tmp_path / "runsc"
    program.write_text(f"#!/bin/sh\necho '{said}'\n")
    program.chmod(0o755)
    monkeypatch.setenv("OPENK3_RUNSC", str(program))
    with pytest.raises(BackendError, match=message):
        engines.find("gvisor")
    monkeypatch.setenv("OPENK3_RUNSC", str(tmp_path / "missing"))
    with pytest.raises(BackendError, match="k3 sandbox setup"):
        engines.find("gvisor")


def test_newer_releases_are_taken(tmp_path, monkeypatch):
    program = tmp_path / "runsc"
    program.write_text("#!/bin/sh\necho runsc version release-20260101.0\n")
    program.chmod(0o755)
    monkeypatch.setenv("OPENK3_RUNSC", str(program))
    assert engines.find("gvisor").version == "release-20260101.0"
