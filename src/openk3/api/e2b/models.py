"""Requests and answers of the REST half, as the OpenAPI document shows them."""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

MAX_FORKS = 20
MAX_TIMEOUT_S = 30 * 86400


class Wire(BaseModel):
    """Unknown fields are kept out of the way: newer SDKs send more than is known here."""

    model_config = ConfigDict(extra="allow", populate_by_name=True)


class NewSandbox(Wire):
    template_id: str = Field("python", alias="templateID", description="`base` means `python`")
    timeout: int = Field(default=300, ge=0, le=MAX_TIMEOUT_S, description="seconds; 0 for never")
    auto_pause: bool = Field(False, alias="autoPause", description="pause when time is up")
    auto_pause_memory: bool = Field(default=True, alias="autoPauseMemory")
    metadata: dict[str, str] = Field(default_factory=dict)
    env_vars: dict[str, str] = Field(default_factory=dict, alias="envVars")
    allow_internet_access: bool | None = Field(None, description="accepted; there is no network")
    network: dict[str, Any] | None = Field(None, description="allowOut and rules are refused")
    volume_mounts: list[Any] | None = Field(None, alias="volumeMounts", description="refused")
    mcp: Any = Field(None, description="refused")
    iam: Any = Field(None, description="refused")
    limits: dict[str, Any] | None = Field(
        None, description="cpus, memory_mb, disk_mb, processes, commands, output_bytes"
    )


class Timeout(Wire):
    timeout: int = Field(default=300, ge=0, le=MAX_TIMEOUT_S, description="seconds; 0 for never")
    memory: bool = True


class Fork(Wire):
    timeout: int = Field(default=300, ge=0, le=MAX_TIMEOUT_S, description="seconds; 0 for never")
    count: int = Field(default=1, ge=1, le=MAX_FORKS)


class Pause(Wire):
    memory: bool = Field(
        default=True, description="false keeps the files only and ends all processes"
    )


class Snapshot(Wire):
    name: str | None = None


class CreatedSandbox(Wire):
    template_id: str = Field(alias="templateID")
    sandbox_id: str = Field(alias="sandboxID")
    client_id: str = Field(alias="clientID")
    envd_version: str = Field(alias="envdVersion")
    envd_access_token: str = Field(
        alias="envdAccessToken", description="X-Access-Token of calls that go inside"
    )
    traffic_access_token: str = Field(alias="trafficAccessToken")
    domain: str | None


class SandboxDetail(Wire):
    template_id: str = Field(alias="templateID")
    sandbox_id: str = Field(alias="sandboxID")
    client_id: str = Field(alias="clientID")
    started_at: str = Field(alias="startedAt")
    end_at: str = Field(alias="endAt")
    cpu_count: int = Field(alias="cpuCount")
    memory_mb: int = Field(alias="memoryMB")
    disk_size_mb: int = Field(alias="diskSizeMB")
    state: str = Field(description="running or paused")
    envd_version: str = Field(alias="envdVersion")
    envd_access_token: str = Field(alias="envdAccessToken")
    metadata: dict[str, str]


class Failure(Wire):
    """What every refused call answers."""

    code: int
    message: str


class ForkItem(Wire):
    """A copy, or why there is none."""

    sandbox: CreatedSandbox | None = None
    error: Failure | None = None


class SavedSnapshot(Wire):
    snapshot_id: str = Field(alias="snapshotID")
    names: list[str]


class Template(Wire):
    template_id: str = Field(alias="templateID")
    aliases: list[str]
    public: bool


class Usage(Wire):
    """One moment of a running sandbox."""

    timestamp: str
    timestamp_unix: int = Field(alias="timestampUnix")
    cpu_count: int = Field(alias="cpuCount")
    cpu_used_pct: float = Field(alias="cpuUsedPct")
    mem_used: int = Field(alias="memUsed", description="bytes")
    mem_total: int = Field(alias="memTotal", description="bytes")
    mem_cache: int = Field(alias="memCache", description="bytes")
    disk_used: int = Field(alias="diskUsed", description="bytes")
    disk_total: int = Field(alias="diskTotal", description="bytes")


FAILURES: dict[int | str, dict[str, Any]] = {
    "4XX": {
        "model": Failure,
        "description": "400 wrong argument, 401 key, 403 refused, 404 unknown, 409 wrong state or "
        "busy, 413 too large, 429 a quota is used up",
    },
    "5XX": {
        "model": Failure,
        "description": "501 not offered by this backend, 502 not running, 507 no space",
    },
}
