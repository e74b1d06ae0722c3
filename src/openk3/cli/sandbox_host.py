"""`k3 sandbox setup` and `k3 sandbox serve`: what concerns the machine, not one sandbox."""

import argparse
import asyncio
import time

from openk3.errors import BackendError
from openk3.sandbox import Pool


async def setup(options: argparse.Namespace, pool: Pool) -> int:
    """Says what it does and why."""
    from openk3.sandbox import engines
    from openk3.sandbox.probe import probe
    from openk3.sandbox.templates import sources

    try:
        engine = engines.find(options.backend)
        print(f"{options.backend}: {engine.program}, version {engine.version}")
    except BackendError as error:
        print(f"{error}\nfetching it from this machine's Debian mirror ...", flush=True)
        engine = await asyncio.to_thread(engines.fetch, options.backend)
        print(f"{options.backend}: {engine.program}, version {engine.version}")
    found = await probe(pool, options.backend, fresh=True)
    if not found.ok:
        raise BackendError(f"the self-test failed: {found.reason}")
    able = ", ".join(name for name, value in found.capabilities.items() if value)
    print(f"self-test passed in {found.seconds:.1f} s: {able}")
    name = options.template or "python"
    if options.source:
        template = await asyncio.to_thread(sources.add, pool.home, name, options.source)
        print(f"template {name}: {template.id} from {options.source}")
    if options.backend == "gvisor":
        started = time.perf_counter()
        template_id = await pool.warm(name)
        print(f"template {template_id} is warm ({time.perf_counter() - started:.1f} s)")
    return 0


def serve(options: argparse.Namespace) -> int:
    """Until interrupted. Prints the three settings that the stock SDK needs."""
    from openk3.api.auth import ApiKeys, load_keys, own_key
    from openk3.api.e2b.app import create_app
    from openk3.api.serving import serve as serve_app

    pool = Pool(options.home, prewarm=options.prewarm, max_running=options.max_running)
    shown = "$E2B_API_KEY"
    if options.no_key:
        keys, shown = ApiKeys(), "e2b_" + "0" * 40
    elif options.key_file:
        keys = load_keys([], options.key_file)
    else:
        shown = own_key(pool.home.path / "api.key", "e2b_")
        keys = ApiKeys([shown])

    def ready(url: str) -> None:
        print(f"export E2B_API_URL={url} E2B_SANDBOX_URL={url} E2B_API_KEY={shown}", flush=True)

    app = create_app(pool, keys, backend=options.backend, files_only=options.files_only)
    serve_app(app, host=options.host, port=options.port, keys=keys, on_ready=ready)
    return 0
