"""Tokenizer speed beside tiktoken: `python benchmarks/tokenizer.py RANK_FILE [--megabytes 4]`.

One thread, one process, same texts, same cuts of long texts, ids compared. Processor seconds, so
that other programs on the machine disturb less. `cold` is the first pass over a text, `warm` the
best of the later ones. Also timed: loading, decoding, and the chat format.
"""

import argparse
import os
import platform
import pydoc_data.topics
import random
import sysconfig
import time
from collections.abc import Callable
from datetime import date
from importlib.metadata import version
from pathlib import Path

os.environ["TOKENIZERS_PARALLELISM"] = "false"

from openk3.text import xtml
from openk3.text.pretokenize import K3_PATTERN, split_long
from openk3.text.ranks import read_ranks
from openk3.text.tokenizer import Tokenizer, load


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def timed(call: Callable[[], object]) -> float:
    start = time.process_time()
    call()
    return time.process_time() - start


def texts(num_bytes: int, tokenizer: Tokenizer) -> dict[str, str]:
    """Code and prose of the standard library; Han and mixed text drawn from the vocabulary."""
    folder = Path(sysconfig.get_path("stdlib"))
    code = "".join(path.read_text("utf-8", "replace") for path in sorted(folder.glob("*.py")))
    prose = "".join(pydoc_data.topics.topics.values())
    rng = random.Random(0)
    words = [tokenizer.token_bytes(i).decode("utf-8", "ignore") for i in range(160_000)]
    han = [word for word in words if word and all("一" <= char <= "龥" for char in word)]
    han_text = "".join(rng.choice(han) + rng.choice(["", "", "，", "。\n"]) for _ in range(300_000))
    mixed = "".join(rng.choices(words, k=600_000))
    kinds = {"code": code, "prose": prose, "Han": han_text, "mixed scripts": mixed}
    return {
        name: text.encode()[:num_bytes].decode("utf-8", "ignore") for name, text in kinds.items()
    }


def encode_rows(tokenizer: Tokenizer, peer, num_bytes: int, repeats: int) -> None:
    columns = ("size MB", "ours cold", "warm", "tiktoken cold", "warm", "ours/tiktoken")
    print(f"{'encode, MB/s':16}" + "".join(f"{column:>15}" for column in columns))
    for name, text in texts(num_bytes, tokenizer).items():

        def ours(text: str = text) -> list[int]:
            return tokenizer.encode(text)

        def theirs(text: str = text) -> list[int]:
            return [i for piece in split_long(text) for i in peer.encode_ordinary(piece)]

        size = len(text.encode()) / 1e6
        rates = []
        for call in (ours, theirs):
            seconds = [timed(call) for _ in range(1 + repeats)]
            rates += [size / seconds[0], size / min(seconds[1:])]
        assert ours() == theirs(), name
        cells = (size, *rates, rates[1] / rates[3])
        print(f"{name:16}" + "".join(f"{cell:15.2f}" for cell in cells))


def other_rows(tokenizer: Tokenizer, peer) -> None:
    ids = tokenizer.encode("".join(pydoc_data.topics.topics.values()))
    decoder = tokenizer.stream_decoder()
    reply = f"{'word ' * 20_000}<|close|>think<|sep|><|open|>response<|sep|>{'answer ' * 20_000}"
    reply_ids = tokenizer.encode(reply, allow_special=True)

    def parse_stream():
        parser = xtml.StreamParser(tokenizer)
        for token_id in reply_ids:
            parser.feed(token_id)

    turns = [{"role": role, "content": "What now?"} for role in ("user", "assistant")] * 500
    rendered = xtml.render(turns)
    rows = {
        "decode": (len(ids), lambda: tokenizer.decode(ids)),
        "decode, tiktoken": (len(ids), lambda: peer.decode(ids)),
        "decode as a stream": (len(ids), lambda: [decoder.feed(i) for i in ids]),
        "parse a reply as a stream": (len(reply_ids), parse_stream),
        "render 1000 messages": (len(rendered), lambda: xtml.render(turns)),
        "encode their segments": (len(rendered), lambda: tokenizer.encode_segments(rendered)),
    }
    print(f"\n{'':28}{'items':>9}{'million/s':>11}")
    for name, (count, call) in rows.items():
        best = min(timed(call) for _ in range(3))
        print(f"{name:28}{count:9}{count / best / 1e6:11.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ranks", help="the published tiktoken rank file")
    parser.add_argument("--megabytes", type=float, default=4.0, help="at most, of each text")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    import tiktoken

    packages = ", ".join(f"{name} {version(name)}" for name in ("tokenizers", "tiktoken"))
    print(f"{cpu_name()}, Python {platform.python_version()}, {packages}, {date.today()}")
    seconds = min(timed(lambda: load(args.ranks)) for _ in range(3))
    tokenizer = load(args.ranks)

    def load_peer():
        ranks = {token: rank for rank, token in enumerate(read_ranks(args.ranks))}
        return tiktoken.Encoding("k3", pat_str=K3_PATTERN, mergeable_ranks=ranks, special_tokens={})

    peer_seconds = min(timed(load_peer) for _ in range(3))
    print(f"load the rank file: ours {seconds:.2f} s, tiktoken {peer_seconds:.2f} s\n")
    peer = load_peer()
    encode_rows(tokenizer, peer, int(args.megabytes * 1e6), args.repeats)
    other_rows(tokenizer, peer)


if __name__ == "__main__":
    main()
