"""Sandboxes of a remote service that speaks the E2B protocol: AgentENV on a cluster, or any other.

`E2B_API_URL` names the service, `E2B_SANDBOX_URL` the address of calls that go inside (default: the
same), `E2B_API_KEY` the key. Both generations of creation and connection (`/v2/sandboxes`, then
`/sandboxes`) are spoken; answers that differ between services become the same errors here.
"""

from openk3.sandbox.agentenv.box import RemoteSandbox
from openk3.sandbox.agentenv.service import Service

__all__ = ["RemoteSandbox", "Service"]
