"""huey's consumer with one thread, run with the Python of a venv that has it: `huey_worker.py FILE MESSAGES`

Prints JSON: tasks handled a second, after a tenth of them.
"""

import itertools
import json
import logging
import sys
import threading
import time

from huey import SqliteHuey


def main(file: str, messages: str) -> None:
    count, numbers, done = int(messages), itertools.count(1), threading.Event()
    times: dict[int, float] = {}
    logging.disable(logging.CRITICAL)
    huey = SqliteHuey(filename=file, fsync=True, results=False)
    quick = SqliteHuey(filename=file, fsync=False).storage  # fills the same queue

    @huey.task()
    def work(_: str) -> None:
        number = next(numbers)
        if number in (count // 10, count):
            times[number] = time.perf_counter()
        if number == count:
            done.set()

    for _ in range(count):
        quick.enqueue(huey.serialize_task(work.s("x" * 100)))
    consumer = huey.create_consumer(workers=1, periodic=False)
    consumer.start()
    if not done.wait(300):
        raise TimeoutError(f"{next(numbers) - 1} of {count} tasks, and no more")
    consumer.stop(graceful=True)
    rate = (count - count // 10) / (times[count] - times[count // 10])
    sys.stdout.write(json.dumps({"handled_per_s": rate}) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
