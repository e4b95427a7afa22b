"""`python -m tests.fuzz TARGET [--seconds N]`: coverage-guided fuzzing; TARGET `all`: one after the other.

What was found interesting is kept in .fuzz/<target> and where the next run begins; an input that breaks
a promise is .fuzz/<target>-crash-…, and `--input FILE` runs that one again.
"""

import argparse
import importlib.util
import json
import logging
import subprocess
import sys
from pathlib import Path

FOLDER = Path(".fuzz")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__.partition("\n")[0])
    parser.add_argument(
        "target",
        nargs="?",
        default="all",
        help="`all` [the default], or one of those that a wrong name lists",
    )
    parser.add_argument("--seconds", type=int, default=60, help="for each target [60]")
    parser.add_argument("--input", type=Path, help="run this input only")
    options = parser.parse_args()
    if options.input is None and importlib.util.find_spec("atheris") is None:
        print('Fuzzing needs atheris; run: pip install "kmqpy[fuzz]"', file=sys.stderr)
        return 2
    if options.target == "all":
        from tests.fuzz.targets import TARGETS

        command = [sys.executable, "-m", "tests.fuzz", "--seconds", str(options.seconds)]
        codes = [subprocess.run([*command, name], check=False).returncode for name in TARGETS]
        return int(any(codes))
    return fuzz(options.target, options.seconds, options.input)


def fuzz(name: str, seconds: int, only: Path | None) -> int:
    logging.disable()
    if only is not None:
        import tests.fuzz.targets as targets
    else:
        import atheris

        with atheris.instrument_imports(include=["kmqpy", "tracker"]):
            import tests.fuzz.targets as targets
    if name not in targets.TARGETS:
        print(f"{name}: no such target; there are all, {', '.join(targets.TARGETS)}", file=sys.stderr)
        return 2
    if only is not None:
        targets.TARGETS[name](only.read_bytes())
        return 0
    corpus = FOLDER / name
    corpus.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(targets.SEEDS[name]):
        (corpus / f"seed-{number}").write_bytes(seed)
    words = FOLDER / f"{name}.dict"
    words.write_text("".join(f"{json.dumps(word)}\n" for word in targets.WORDS.get(name, ["kmq"])))
    flags = {
        "max_total_time": seconds,
        "max_len": 4096,
        "timeout": 5,  # s for one input
        "rss_limit_mb": 1024,
        "dict": words,
        "artifact_prefix": f"{FOLDER / name}-",
        "print_final_stats": 1,
        "verbosity": 1,
    }
    print(f"fuzzing {name} for {seconds} s")
    atheris.Setup(
        ["fuzz", *(f"-{flag}={value}" for flag, value in flags.items()), str(corpus)], targets.TARGETS[name]
    )
    atheris.Fuzz()  # ends the process
    return 0


if __name__ == "__main__":
    sys.exit(main())
