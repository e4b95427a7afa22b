"""Chaos: real servers and processes, a seeded schedule of faults, a checker that reads the logs.

`make chaos` runs `python -m tests.chaos run`; `--help` explains it. The parts: `schedule` (which fault,
when; pure), `stage` (servers, processes), `proxy` (the network, that can be cut), `faults` (what each
does), `observe` (what is in journals and topics), `judge` (the checker; pure), `report`, and `controls`
(kmqpy with a safeguard taken out, which the checker must catch).
"""
