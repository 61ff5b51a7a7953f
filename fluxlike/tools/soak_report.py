"""What comes of a `soak`: whether memory grew, the table, the JSON."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..runtime.wording import counted
from .soak_machine import Sample
from .soak_plan import OPS, kinds

#: What a quantity may grow by, from the largest of the first quarter's samples to the largest of the last quarter's: so much, or
#: this share of the first if that is more. The allocators of the C library and of the CUDA driver keep some for later; the heap,
#: and what is asked of torch's allocator, are counted exactly.
ALLOWED: dict[str, tuple[float, float]] = {
    "host MiB": (48.0, 0.03),
    "file descriptors": (2, 0.0),
    "threads": (2, 0.0),
    "heap in use MiB": (0.0, 0.0),
    "heap MiB": (0.0, 0.0),
    "device requested MiB": (1.0, 0.0),
    "device used MiB": (96.0, 0.01),
}
#: Fewer samples say nothing.
FEWEST_SAMPLES = 8
Growth = dict[str, dict[str, float]]


def growth(samples: Sequence[Sample]) -> Growth:
    """For each quantity the largest value in the first and in the last quarter, and what it may grow by."""
    if len(samples) < FEWEST_SAMPLES:
        return {}
    quarter = len(samples) // 4
    found = {}
    for name in samples[0]:
        first, last = (max(sample[name] for sample in part) for part in (samples[:quarter], samples[-quarter:]))
        fixed, share = ALLOWED[name]
        found[name] = {"first": first, "last": last, "allowed": max(fixed, share * first)}
    return found


def worst_of(ranks: Sequence[Growth]) -> Growth:
    """For each quantity what the rank says that is furthest above what it may grow by, which is not the same on every rank."""
    found = {}
    for name in ranks[0]:
        over = [said[name]["last"] - said[name]["first"] - said[name]["allowed"] for said in ranks]
        rank = over.index(max(over))
        found[name] = ranks[rank][name] | {"rank": rank}
    return found


def table(result: dict[str, Any], modes: Sequence[str]) -> str:
    """What rank 0 says at the end."""
    modes, width = sorted(set(modes)), 1 + max(map(len, OPS))
    lines = ["", f"{'calls':<{width + 12}}" + "".join(f"{name:>10}" for name in (*modes, "all"))]
    for op, schedule in kinds(0):
        counts = [result["calls_by_kind"].get(f"{op}/{schedule}/{mode}", 0) for mode in modes]
        lines.append(f"{op:<{width}}{schedule:<12}" + "".join(f"{count:>10}" for count in (*counts, sum(counts))))
    lines += [
        "",
        f"{result['minutes']:.1f} minutes on {counted(result['ranks'], 'rank')}, heap {result['heap']}, seed {result['seed']}, "
        f"after {result['warm_up']['seconds']:.0f} s of warm-up{', ended by a signal' if result['interrupted'] else ''}",
        f"{counted(result['calls'], 'call')} in {counted(result['steps'], 'step')} and {counted(result['bursts'], 'burst')}, "
        f"{counted(result['launches'], 'kernel launch', 'kernel launches')} of all ranks, "
        f"{counted(result['contexts_remade'], 'context')} made again, {counted(result['compiled_after_warm_up'], 'kernel')} "
        "compiled after the warm-up",
        f"{counted(result['compared_bitwise'], 'call')} compared bit for bit, {counted(result['compared_with_reference'], 'step')} "
        "with the reference",
        "",
    ]
    if result["memory"]:
        lines.append(f"{'largest value':<22}{'1st quarter':>14}{'4th quarter':>14}{'may grow by':>14}  worst rank")
        for name, found in result["memory"].items():
            numbers = "".join(f"{found[key]:>14.1f}" for key in ("first", "last", "allowed"))
            lines.append(f"{name:<22}{numbers}{found['rank']:>6}{'  GROWN' if name in result['grown'] else ''}")
    else:
        lines.append(f"memory was not judged: there are fewer than {FEWEST_SAMPLES} samples")
    if not result["calls"]:
        lines.append("no calls were made, so nothing was shown")
    grown = f", grown: {', '.join(result['grown'])}" if result["grown"] else ""
    return "\n".join([*lines, "", f"failures {len(result['failures'])}{grown}"])


def save(result: dict[str, Any], folder: Path) -> Path:
    """The JSON; whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"soak-R{result['ranks']}.json"
    scratch = path.with_suffix(".json.part")
    scratch.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    os.replace(scratch, path)
    return path
