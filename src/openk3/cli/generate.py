"""`k3 generate` continues a text."""

import sys
import time
from pathlib import Path

from openk3.cli import common, speak
from openk3.cli.screen import say, write


def main(argv: list[str]) -> int:
    """Run `k3 generate`. Returns the exit code."""
    parser = common.parser("generate", 'Continue a text: k3 generate runs/quickstart "def "')
    speak.add_options(parser, max_tokens=128)
    parser.add_argument("prompt", nargs="?", default="", help="the text; - reads standard input")
    picture = "a picture to look at before the text; may be given several times"
    parser.add_argument("--image", action="append", type=Path, default=[], metavar="FILE",
                        help=picture)  # fmt: skip
    common.add_threads(parser)
    common.add_json(parser)
    options = parser.parse_args(argv)
    params = speak.sampling(options)
    common.use_threads(options.threads)
    prompt = sys.stdin.read() if options.prompt == "-" else options.prompt

    llm = speak.open_llm(options)
    show = None if options.json else lambda _, delta: say(delta.text)
    if show:
        write(prompt)
    started = time.perf_counter()
    try:
        [answer] = llm.generate(prompt, params, images=options.image, on_delta=show)
    finally:
        if show:
            write("\n")
    seconds = time.perf_counter() - started
    streamed = speak.stream_stats(llm)
    if options.json:
        facts = {
            "prompt": prompt,
            "text": answer.text,
            "tokens": len(answer.ids),
            "seconds": seconds,
        }
        if streamed is not None:
            facts["experts"] = {**vars(streamed), "hit_rate": streamed.hit_rate}
        write(common.json_text(facts))
    elif streamed is not None:
        print(f"expert cache: {streamed}", file=sys.stderr)
    return 0
