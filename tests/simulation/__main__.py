"""python -m tests.simulation --seed 7 --trace; --seeds 100000 [--from 0] [--late-requests] [--cut-logs]
[--collapse] [--lanes]; --first-seeds.
"""

import argparse
import sys
import time
from collections import Counter
from dataclasses import replace

from .catching import write_first_seeds
from .controls import CONTROLS
from .simulate import Controls, simulate


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation")
    parser.add_argument("--seed", type=int, help="run this one")
    parser.add_argument("--control", choices=CONTROLS, help="take out a safeguard")
    parser.add_argument(
        "--late-requests",
        action="store_true",
        help="have them in each seed, not in 30 %% of those without a control",
    )
    parser.add_argument(
        "--cut-logs",
        action="store_true",
        help="cut logs back in each seed, not in 20 %% of those without a control",
    )
    parser.add_argument(
        "--collapse",
        action="store_true",
        help="have a queue that collapses in each seed, not in 10 %% of those without a control",
    )
    parser.add_argument(
        "--lanes",
        action="store_true",
        help="have a retry lane in each seed, not in 30 %% of those without a control",
    )
    parser.add_argument("--trace", action="store_true", help="print every step of it")
    parser.add_argument("--seeds", type=int, default=1_000, help="how many to run")
    parser.add_argument("--from", dest="first", type=int, default=0, help="the first of them")
    parser.add_argument(
        "--first-seeds", action="store_true", help="find seeds that catch the controls, for first_seeds.json"
    )
    args = parser.parse_args()
    if args.first_seeds:
        write_first_seeds()
        return 0
    control = CONTROLS.get(args.control) or Controls()
    if args.late_requests:
        control = replace(control, late_requests=True)
    if args.cut_logs:
        control = replace(control, cut_logs=True)
    if args.collapse:
        control = replace(control, collapse=True)
    if args.lanes:
        control = replace(control, lanes=True)
    if args.seed is not None:
        result = simulate(args.seed, control, print if args.trace else None)
        print("\n".join(result.problems) or "no problems", dict(result.stats), result.steps, sep="\n")
        return bool(result.problems)
    failed = 0
    stats: Counter[str] = Counter()
    began = time.process_time()
    for seed in range(args.first, args.first + args.seeds):
        result = simulate(seed, control)
        stats += result.stats
        stats["steps"] += result.steps
        if result.problems:
            failed += 1
            print(f"seed {seed}: {result.problems[0]} ({len(result.problems)} problems)", flush=True)
    took_s = time.process_time() - began
    print(f"{args.seeds} seeds, {failed} failed, {60 * args.seeds / took_s:.0f} seeds per minute of one core")
    print(", ".join(f"{name} {count}" for name, count in sorted(stats.items())))
    return bool(failed)


sys.exit(main())
