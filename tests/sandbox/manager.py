"""A manager process for the crash tests: creates, runs, pauses, resumes, forks and kills for ever.

Prints one JSON line for each promise the pool made to it, so that the test can hold it to them.
"""

import asyncio
import json
import sys

from openk3.errors import OpenK3Error
from openk3.sandbox import Pool, Sandbox


def say(**row: object) -> None:
    print(json.dumps(row), flush=True)


async def main(home: str) -> None:
    pool = Pool(home)
    number = 0
    while True:
        number += 1
        box = await Sandbox.create(pool=pool, timeout=600)
        say(created=box.id)
        await box.run(f"echo {number} > f; echo {number} >> log")
        await box.pause()
        say(paused=box.id, content=str(number))
        await box.resume()
        say(resumed=box.id)
        (copy,) = await box.fork(1, timeout=600)
        say(created=copy.id)
        await copy.pause()
        say(paused=copy.id, content=str(number))
        if number % 2:
            say(killing=box.id)
            await box.kill()
        else:
            await box.pause()
            say(paused=box.id, content=str(number))


if __name__ == "__main__":
    try:
        asyncio.run(main(sys.argv[1]))
    except OpenK3Error as error:
        say(failed=str(error))
        raise
