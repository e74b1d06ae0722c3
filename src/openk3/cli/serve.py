"""`k3 serve` answers OpenAI's and Anthropic's clients with a model, and has a chat page."""

import os
import sys
from argparse import ArgumentParser, Namespace
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from openk3.api.openai.options import ServeOptions
from openk3.cli import common
from openk3.config.dump import describe
from openk3.config.load import resolve, take_flags
from openk3.engine.types import EngineConfig
from openk3.errors import OpenK3Error
from openk3.obs import log

if TYPE_CHECKING:
    from openk3.api.openai.state import Serving

KEY_VARIABLE = "OPENK3_API_KEY"
LAST_WORDS_S = 2.0
"""For the ends of answers that shutdown has cut, after the grace they had."""


@dataclass(frozen=True)
class ServeConfig:
    """All settings of a server."""

    engine: EngineConfig = field(default_factory=EngineConfig)
    """Memory, batching, cache, speculation."""
    limits: ServeOptions = field(default_factory=ServeOptions)
    """What callers may ask for."""


def main(argv: list[str]) -> int:
    """Run `k3 serve`. Returns the exit code; 1 if the engine failed."""
    parser = _parser()
    if {"-h", "--help"} & set(argv):
        parser.epilog = "Settings:\n\n" + describe(ServeConfig)
    settings, rest = take_flags(ServeConfig, argv, common.own_options(parser))
    options = parser.parse_args(rest)
    config = resolve(ServeConfig, [], settings)
    common.require_extra("serve", "fastapi", "uvicorn", "prometheus_client")
    from openk3.api.auth import load_keys, require_safe_binding
    from openk3.api.openai.app import create_app
    from openk3.api.serving import listen, serve

    given = [*options.api_key, *filter(None, [os.environ.get(KEY_VARIABLE)])]
    keys = load_keys(given, options.key_file)
    require_safe_binding(options.host, keys)
    sock = listen(options.host, options.port)  # a taken port is told before a model is loaded
    common.use_threads(options.threads)
    log.setup()
    state = open_state(options, config)
    state.keys = keys

    def say(url: str) -> None:
        seen = "text and pictures" if state.processor else "text"
        block = state.service.stats().hash_block
        print(f"{state.model} at {url} ({url}/v1 for clients, {url}/ for people): {seen}, "
              f"context {state.max_context} tokens, prefixes reused from {block}, "
              f"{keys.count} API key(s)",
              file=sys.stderr)  # fmt: skip

    serve(
        create_app(state),
        host=options.host,
        port=options.port,
        keys=keys,
        sock=sock,
        on_ready=say,
        on_interrupt=lambda: state.service.drain(config.limits.grace_s),
        grace_s=config.limits.grace_s + LAST_WORDS_S,
    )
    return 1 if state.service.failure else 0


def _parser() -> ArgumentParser:
    parser = common.parser("serve", "Serve a model: k3 serve runs/quickstart, then open the URL")
    parser.add_argument("model", type=Path, metavar="MODEL", help="a run folder or a model folder")
    parser.add_argument("--host", default="127.0.0.1", help="another one needs an API key")
    parser.add_argument("--port", type=int, default=8000, help="0 takes a free one")
    parser.add_argument("--name", help="what clients call the model (default: the folder's name)")
    parser.add_argument("--api-key", action="append", default=[], metavar="KEY",
                        help=f"a key that callers must show; better {KEY_VARIABLE} or --key-file, "
                        "which no list of processes shows")  # fmt: skip
    parser.add_argument("--key-file", help="a file with one key a line, readable by you alone")
    parser.add_argument("--device", default="auto", help="cpu, cuda, cuda:N or auto")
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), default="auto")
    parser.add_argument("--experts", choices=("auto", "packed", "dequant"), default="auto",
                        help="MXFP4 experts: as they are stored, or as ordinary weights "
                        "(auto: as stored on a GPU)")  # fmt: skip
    common.add_threads(parser)
    return parser


def open_state(options: Namespace, config: ServeConfig) -> "Serving":
    """The model, its engine, and what the routes need of them."""
    from openk3.api.openai.state import Serving
    from openk3.engine.engine import Engine
    from openk3.engine.folder import open_folder
    from openk3.engine.service import AsyncEngine

    opened = open_folder(
        options.model, device=options.device, dtype=options.dtype, experts=options.experts
    )
    engine = Engine(opened.model, config.engine)
    engine.warm_up()
    state = Serving(
        AsyncEngine(engine),
        opened.tokenizer,
        options.name or opened.name,
        opened.model.config.vocab_size,
        processor=opened.processor,
        options=config.limits,
    )
    if not state.tokenizer.can_chat:
        log.get("serve").warning("the vocabulary has no chat tokens: /v1/completions alone answers")
        return state
    try:
        _ = state.grammars
    except OpenK3Error as error:
        log.get("serve").warning("no constrained output: %s", error)
    return state
