"""The stock `e2b` SDK, unchanged, against our server over gVisor sandboxes."""

import asyncio
import io
import json
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest

e2b = pytest.importorskip("e2b", reason="the sandbox extra is not installed")
uvicorn = pytest.importorskip("uvicorn", reason="the serve extra is not installed")

from openk3.api.auth import ApiKeys, load_keys, own_key, require_safe_binding  # noqa: E402
from openk3.errors import ConfigError  # noqa: E402
from openk3.sandbox import events, recovery  # noqa: E402
from sandbox_server import running_server  # noqa: E402

KEY = "e2b_" + "ab" * 20


@pytest.fixture(scope="module")
def url(home, gvisor) -> Iterator[str]:
    with running_server(home, KEY, max_upload_bytes=32 << 20) as url:
        yield url


@pytest.fixture(scope="module")
def sdk(url, monkeypatch_module) -> type:
    monkeypatch_module.setenv("E2B_API_URL", url)
    monkeypatch_module.setenv("E2B_SANDBOX_URL", url)
    monkeypatch_module.setenv("E2B_API_KEY", KEY)
    return e2b.Sandbox


@pytest.fixture(scope="module")
def monkeypatch_module() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.fixture(scope="module")
def box(sdk) -> Iterator["e2b.Sandbox"]:
    box = sdk.create("base", timeout=600, metadata={"a": "1"}, envs={"GREETING": "hello"})
    yield box
    box.kill()


def test_commands(box):
    done = box.commands.run("echo $GREETING; echo e >&2; id -un; pwd")
    assert (done.stdout, done.stderr) == ("hello\nuser\n/home/user\n", "e\n")
    assert box.commands.run("id -u", user="root").stdout == "0\n"
    with pytest.raises(e2b.CommandExitException) as failed:
        box.commands.run("exit 7")
    assert failed.value.exit_code == 7
    with pytest.raises(e2b.TimeoutException):
        box.commands.run("sleep 600", timeout=1)
    while [p for p in box.commands.list() if "sleep 600" in p.args]:
        time.sleep(0.05)


def test_background_input_list_connect_and_kill(box):
    handle = box.commands.run("while read x; do echo got $x; done", background=True, stdin=True)
    box.commands.send_stdin(handle.pid, "one\n")
    stdout = next(out for out, _, _ in handle if out)
    assert stdout == "got one\n"
    assert handle.pid in [process.pid for process in box.commands.list()]
    handle.disconnect()
    again = box.commands.connect(handle.pid)
    box.commands.send_stdin(handle.pid, "two\n")
    box.commands.close_stdin(handle.pid)
    assert again.wait().stdout.endswith("got two\n")
    sleeper = box.commands.run("sleep 1000", background=True)
    assert box.commands.kill(sleeper.pid)
    assert not box.commands.kill(999_999)
    with pytest.raises(e2b.NotFoundException):
        box.commands.connect(999_999)


def test_files(box):
    info = box.files.write("dir/ü.txt", "text")
    assert info.path == "/home/user/dir/ü.txt"
    assert box.files.read("dir/ü.txt") == "text"
    data = bytes(range(256)) * 4000
    box.files.write_files([{"path": "a.bin", "data": data}, {"path": "b.bin", "data": b"2"}])
    assert bytes(box.files.read("a.bin", format="bytes")) == data
    assert b"".join(box.files.read("a.bin", format="stream")) == data
    box.files.write("s.bin", io.BytesIO(data))
    assert bytes(box.files.read("s.bin", format="bytes")) == data
    box.files.write("z.bin", data, gzip=True)
    assert bytes(box.files.read("z.bin", format="bytes")) == data
    assert {entry.name for entry in box.files.list(".")} >= {"a.bin", "b.bin", "dir"}
    found = box.files.get_info("a.bin")
    assert (found.size, found.owner, str(found.type)) == (len(data), "user", "FileType.FILE")
    assert box.files.make_dir("new")
    assert not box.files.make_dir("new")
    assert box.files.rename("a.bin", "new/c.bin").path == "/home/user/new/c.bin"
    assert box.files.exists("new/c.bin")
    assert not box.files.exists("a.bin")
    box.files.remove("new")
    with pytest.raises(e2b.NotFoundException):
        box.files.read("new/c.bin")


def test_signed_urls_work_without_a_token_and_only_as_signed(box, url):
    box.files.write("signed.txt", "content")
    link = box.download_url("signed.txt", use_signature_expiration=300)
    link = link.replace(link.split("/files")[0], url)
    ask = urllib.request.Request(link, headers={"E2b-Sandbox-Id": box.sandbox_id})
    assert urllib.request.urlopen(ask).read() == b"content"
    wrong = urllib.request.Request(
        link.replace("signed.txt", "other.txt"), headers={"E2b-Sandbox-Id": box.sandbox_id}
    )
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(wrong)
    strange = urllib.request.Request(
        f"{url}/files?path=signed.txt&signature=v1_%C3%BC",
        headers={"E2b-Sandbox-Id": box.sandbox_id},
    )
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(strange)


def test_upload_beyond_the_limit_is_refused(box):
    with pytest.raises(e2b.SandboxException, match="413"):
        box.files.write("big", b"x" * (33 << 20))


def test_watching(box):
    box.files.make_dir("watched")
    watch = box.files.watch_dir("watched")
    box.files.write("watched/f", "x")
    seen: list[str] = []
    while "f" not in seen:
        seen += [event.name for event in watch.get_new_events()]
    watch.stop()


def test_terminal(box):
    out = bytearray()
    terminal = box.pty.create(e2b.PtySize(rows=20, cols=90), timeout=60)
    box.pty.send_stdin(terminal.pid, b"stty size; exit\n")
    for _, _, piece in terminal:
        out += piece or b""
    assert b"20 90" in out


def test_the_async_sdk_watches_by_stream_and_resizes_its_terminal(sdk, box):
    async def go() -> None:
        inside = await e2b.AsyncSandbox.connect(box.sandbox_id, timeout=600)
        await inside.files.make_dir("seen")
        names: asyncio.Queue[str] = asyncio.Queue()
        watch = await inside.files.watch_dir(
            "seen", on_event=lambda event: names.put_nowait(event.name), recursive=True
        )
        await inside.files.write("seen/late", "x")
        while await names.get() != "late":
            pass
        await watch.stop()

        shown: asyncio.Queue[bytes] = asyncio.Queue()
        terminal = await inside.pty.create(
            e2b.PtySize(rows=20, cols=90), on_data=shown.put_nowait, timeout=60
        )
        await inside.pty.send_stdin(terminal.pid, b"stty size\n")
        await _until(shown, b"20 90")
        await inside.pty.resize(terminal.pid, e2b.PtySize(rows=31, cols=70))
        await inside.pty.send_stdin(terminal.pid, b"stty size\n")
        await _until(shown, b"31 70")
        assert await inside.pty.kill(terminal.pid)
        done = await inside.commands.run("echo $A; pwd", envs={"A": "b"}, cwd="/tmp")
        assert done.stdout == "b\n/tmp\n"

    async def _until(shown: "asyncio.Queue[bytes]", wanted: bytes) -> None:
        seen = b""
        while wanted not in seen:
            seen += await shown.get()

    asyncio.run(go())


def test_life(sdk, box):
    assert box.is_running()
    assert box.get_info().metadata == {"a": "1"}
    assert box.get_info().state == e2b.SandboxState.RUNNING
    box.set_timeout(900)
    counter = box.commands.run(
        "for i in $(seq 600); do echo $i > n; sleep 0.05; done", background=True
    )
    box.files.write("kept", "kept")
    for _ in range(2):
        box.pause()
        assert not box.is_running()
        with pytest.raises(e2b.SandboxException):
            box.commands.run("true")
        assert sdk.get_info(box.sandbox_id).state == e2b.SandboxState.PAUSED
        again = sdk.connect(box.sandbox_id, timeout=900)
        assert again.files.read("kept") == "kept"
        assert counter.pid in [process.pid for process in again.commands.list()]
    listed = sdk.list(query=e2b.SandboxQuery(metadata={"a": "1"})).next_items()
    assert [item.sandbox_id for item in listed] == [box.sandbox_id]


def test_fork_and_snapshot(sdk, box):
    box.files.write("who", "parent")
    copies = box.fork(count=2, timeout=300)
    assert len({copy.sandbox_id for copy in copies} | {box.sandbox_id}) == 3
    for copy in copies:
        assert copy.files.read("who") == "parent"
        copy.files.write("who", "copy")
    assert box.files.read("who") == "parent"
    assert len({copy._envd_access_token for copy in [box, *copies]}) == 3
    saved = box.create_snapshot()
    again = sdk.create(saved.snapshot_id, timeout=300)
    assert again.files.read("who") == "parent"
    for extra in [*copies, again]:
        assert extra.kill()
        assert not extra.kill()


def test_keys_and_tokens_are_needed(sdk, box, url):
    with pytest.raises(e2b.AuthenticationException):
        sdk.create(api_key="e2b_" + "00" * 20)
    for headers in ({}, {"X-Access-Token": "f" * 64}):
        ask = urllib.request.Request(
            f"{url}/files?path=/etc/passwd", headers={"E2b-Sandbox-Id": box.sandbox_id, **headers}
        )
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(ask)
    with pytest.raises(e2b.NotFoundException):
        sdk.connect("0" * 20)
    with pytest.raises(e2b.SandboxException, match="no template"):
        sdk.create("no-such-template")
    with pytest.raises(e2b.SandboxException, match="no network"):
        sdk.create(network={"allow_out": ["10.0.0.0/8"]})


def test_openapi_and_metrics(box, url):
    def get(path: str) -> str:
        ask = urllib.request.Request(url + path, headers={"X-API-Key": KEY})
        return urllib.request.urlopen(ask).read().decode()

    page = json.loads(get("/openapi.json"))
    assert page["components"]["securitySchemes"].keys() == {"ApiKey", "SandboxToken"}
    for path in ("/sandboxes", "/v2/sandboxes"):
        made = page["paths"][path]["post"]
        assert made["security"] == [{"ApiKey": []}]
        assert set(made["responses"]) == {"201", "4XX", "5XX"}
        reply = made["responses"]["201"]["content"]["application/json"]["schema"]["$ref"]
        shown = page["components"]["schemas"][reply.rpartition("/")[2]]["properties"]
        assert {"sandboxID", "templateID", "envdAccessToken"} <= shown.keys()
    inside = page["paths"]["/filesystem.Filesystem/{method}"]["post"]
    assert inside["security"] == [{"SandboxToken": []}]
    assert "CreateWatcher" in inside["description"]
    text = get("/metrics")
    assert 'k3_sandboxes{state="running"} 1.0' in text
    assert 'k3_sandbox_requests_total{operation="fork",status="201"}' in text


def _raw(url: str, head: str, body: bytes) -> socket.socket:
    """A request as bytes, for what no well-behaved client does."""
    host, port = url.removeprefix("http://").split(":")
    sock = socket.create_connection((host, int(port)))
    sock.sendall(f"{head}\r\nHost: x\r\nX-API-Key: {KEY}\r\n".encode() + body)
    return sock


def test_reported_both_generations_of_the_sdk_are_served(sdk, url):
    def post(path: str, **body: object) -> tuple[int, dict]:
        ask = urllib.request.Request(
            url + path,
            data=json.dumps(body).encode(),
            headers={"X-API-Key": KEY, "Content-Type": "application/json"},
        )
        with urllib.request.urlopen(ask) as answer:
            return answer.status, json.loads(answer.read())

    for generation in ("", "/v2"):
        status, made = post(f"{generation}/sandboxes", templateID="base", timeout=300)
        assert status == 201
        box_id = made["sandboxID"]
        path = f"{generation}/sandboxes/{box_id}/connect"
        assert post(path, timeout=300)[0] == 200
        sdk.pause(box_id)
        assert post(path, timeout=300)[0] == 201
        assert sdk.kill(box_id)


def test_reported_client_that_hangs_up_leaves_nothing_behind(home, box, url):
    """A creation nobody waits for is undone; half an upload changes no file."""
    body = b'{"templateID": "base", "timeout": 600}'
    head = "POST /v2/sandboxes HTTP/1.1\r\nContent-Type: application/json"
    known = {row["sandbox_id"] for row in events.read(home)}
    _raw(url, head, b"Content-Length: %d\r\n\r\n%s" % (len(body), body)).close()
    end = time.monotonic() + 60
    while "killed" not in [
        row["event"] for row in events.read(home) if row["sandbox_id"] not in known
    ]:
        assert time.monotonic() < end, "the creation was not undone"
        time.sleep(0.05)
    assert [record.id for record in recovery.records(home)] == [box.sandbox_id]

    box.files.write("whole/f", "old")
    head = (
        f"POST /files?path=whole/f HTTP/1.1\r\nE2b-Sandbox-Id: {box.sandbox_id}\r\n"
        f"X-Access-Token: {box._envd_access_token}\r\nContent-Type: application/octet-stream"
    )
    _raw(url, head, b"Content-Length: 9000000\r\n\r\n" + b"x" * 4_000_000).close()
    while names := [entry.name for entry in box.files.list("whole") if entry.name != "f"]:
        assert names[0].startswith(".k3-")
    assert box.files.read("whole/f") == "old"


def test_reported_full_disk_is_507(sdk, url):
    ask = urllib.request.Request(
        f"{url}/sandboxes",
        data=json.dumps({"timeout": 300, "limits": {"disk_mb": 20}}).encode(),
        headers={"X-API-Key": KEY, "Content-Type": "application/json"},
    )
    small = sdk.connect(json.loads(urllib.request.urlopen(ask).read())["sandboxID"], timeout=300)
    with pytest.raises(e2b.NotEnoughSpaceException):
        small.files.write("big", b"x" * (30 << 20))
    assert not small.files.exists("big")
    small.kill()


def test_an_open_server_is_loopback_only(tmp_path):
    with pytest.raises(ConfigError, match="without an API key"):
        require_safe_binding("0.0.0.0", ApiKeys())
    require_safe_binding("127.0.0.1", ApiKeys())
    require_safe_binding("0.0.0.0", ApiKeys(["k"]))
    file = tmp_path / "keys"
    file.write_text("one\ntwo\n")
    file.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        load_keys([], file)
    file.chmod(0o600)
    keys = load_keys(["three"], file)
    assert [keys.accept(word) for word in ("one", "three", "four", None)] == [
        True,
        True,
        False,
        False,
    ]
    key = own_key(tmp_path / "own", "e2b_")
    assert key == own_key(tmp_path / "own", "e2b_")
    assert (tmp_path / "own").stat().st_mode & 0o777 == 0o600
