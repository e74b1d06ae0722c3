"""`k3 generate` continues a text."""

import sys
import time
from pathlib import Path

from openk3.cli import common, speak


def main(argv: list[str]) -> int:
    """Run `k3 generate`. Returns the exit code."""
    parser = common.parser("generate", 'Continue a text: k3 generate runs/quickstart "def "')
    speak.add_options(parser, max_tokens=128)
    parser.add_argument("prompt", nargs="?", default="", help="the text; - reads standard input")
    picture = "a picture to look at before the text; may be given several times"
    parser.add_argument("--image", action="append", type=Path, metavar="FILE", help=picture)
    common.add_threads(parser)
    common.add_json(parser)
    options = parser.parse_args(argv)
    common.use_threads(options.threads)
    prompt = sys.stdin.read() if options.prompt == "-" else options.prompt

    speaker = speak.open_speaker(
        options.model, options.device, options.dtype, expert_cache_gb=options.expert_cache_gb
    )
    images = speaker.look(options.image) if options.image else None
    segments = [(text, True) for text in images.prompts] if images else []
    ids = speaker.tokenizer.encode_segments([*segments, (prompt, False)])
    pieces: list[str] = []

    def say(piece: str) -> None:
        pieces.append(piece)
        if not options.json:
            sys.stdout.write(piece)
            sys.stdout.flush()

    if not options.json:
        sys.stdout.write(prompt)
    started = time.perf_counter()
    new = speaker.complete(ids, options, say, images)
    seconds = time.perf_counter() - started
    streamed = speaker.stream_stats()
    if options.json:
        facts = {"prompt": prompt, "text": "".join(pieces), "tokens": len(new), "seconds": seconds}
        if streamed is not None:
            facts["experts"] = {**vars(streamed), "hit_rate": streamed.hit_rate}
        sys.stdout.write(common.json_text(facts))
    else:
        sys.stdout.write("\n")
        if streamed is not None:
            print(f"expert cache: {streamed}", file=sys.stderr)
    return 0
