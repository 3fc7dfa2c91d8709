"""`make fuzz SEEDS=10 MINUTES=60`: damaged and hostile input for everything that reads files, arguments or answers.

Each case runs in a process of its own. Ends with 1 if one raised something unexpected, hung, took too much memory, or
wrote outside of its folder.
"""

from __future__ import annotations

import argparse
import sys
import time

from tests.fuzz.harness import Finding, run_case
from tests.fuzz.targets import TARGETS, warm_up


def fuzz(
    names: list[str], seeds: list[int], seconds: float, first: int = 0, most: int = 10**9
) -> tuple[int, list[Finding]]:
    """Run cases of all targets in turn, for so long. → how many, and the findings."""
    end, count, findings = time.monotonic() + seconds, 0, []
    for case in range(first, first + most):
        for seed in seeds:
            for name in names:
                if time.monotonic() > end:
                    return count, findings
                count += 1
                finding = run_case(name, TARGETS[name], seed, case)
                if finding is not None:
                    findings.append(finding)
                    print(finding, flush=True)
    return count, findings


def main() -> int:
    wanted = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    wanted.add_argument("--seeds", type=int, default=1, help="how many seeds (1)")
    wanted.add_argument("--first", type=int, default=0, help="the first of them (0)")
    wanted.add_argument("--seed", type=int, help="one seed alone")
    wanted.add_argument("--case", type=int, help="one case alone")
    wanted.add_argument("--minutes", type=float, default=5, help="stop after so long (5)")
    wanted.add_argument("--only", choices=sorted(TARGETS), help="one target alone")
    asked = wanted.parse_args()
    warm_up()
    seeds = [asked.seed] if asked.seed is not None else list(range(asked.first, asked.first + asked.seeds))
    names = [asked.only] if asked.only else list(TARGETS)
    began = time.monotonic()
    most = 10**9 if asked.case is None else 1
    count, findings = fuzz(names, seeds, 60 * asked.minutes, asked.case or 0, most)
    print(
        f"{count} cases of {len(names)} targets with {len(seeds)} seeds in {time.monotonic() - began:.0f} s: {len(findings)} findings"
    )
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
