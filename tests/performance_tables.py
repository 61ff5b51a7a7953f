"""Tables of the documents, made from the records: `python tests/performance_tables.py` writes them into the pages.

A page has `<!-- table: NAME ARGUMENTS -->` and `<!-- end -->`; what stands between them is what `TABLES[NAME]` gives, which
tests/test_performance_tables.py sees to. Captions with commit and links come from the records, too.
"""

import json
import re
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from measured_records import (
    COLLECTIVES,
    FEW,
    HEADLINE,
    MEASURED,
    MODES,
    NODES,
    NONE,
    OPS,
    ROOT,
    SIDE_BY_SIDE,
    Record,
    headline,
    hidden,
    linked,
    ratios,
    read,
    spread,
    table,
    us,
)

PLACE = re.compile(r"(?<=<!-- table: )([^\n]*?)( -->\n).*?(?=<!-- end -->)", re.DOTALL)


def summary(*machines: str) -> str:
    """Of all machines, if none is named."""
    rows: list[list[str]] = []
    for machine in machines or HEADLINE:
        for op in OPS:
            for mode, record in zip(("eager", "graph"), headline(machine, op), strict=True):
                commit, against = record.commit.split(",")[0], [spread(ratios(record, peer)) for peer in ("torch", "async_tp")]
                rows.append([f"{machine.replace('-', ' ')}, {commit}", op, f"[{mode}]({record.link})", *against])
    return table("GPUs, commit | op | calls | × torch + NCCL: least / median / most | × async TP: least / median / most", rows, 3)


def landing() -> str:
    """Of all headline shapes of both operations."""
    rows: list[list[str]] = []
    for machine in ("4×H100", "2×H100", "2×H200"):
        for i, calls in enumerate(("eager", "in CUDA graphs")):
            records, cells = [headline(machine, op)[i] for op in OPS], []
            for peer in ("torch", "async_tp"):
                found = [ratio for record in records for ratio in ratios(record, peer)]
                cells.append(f"{statistics.median(found):.2f}× ({min(found):.2f} to {max(found):.2f})")
            rows.append([f"{machine} ({records[0].commit}), {calls}", *cells])
    return table("GPUs (commit), calls | torch.matmul + NCCL | torch's async TP", rows)


def caption(op: str, machine: str, *records: Record) -> str:
    links = ", ".join(f"[{'graph' if 'graph' in record.name else 'eager'}]({record.link})" for record in records)
    return f"{op}, {machine.replace('-', ' ')}, commit {records[0].commit} ({links}), µs:\n\n"


def shapes(machine: str, op: str) -> str:
    rows: list[list[str]] = []
    eager, graph = headline(machine, op)
    for shape in eager.times:
        for mode, record in (("eager", eager), ("graph", graph)):
            times = record.times[shape]
            chosen = record.paths[shape]
            rows.append([shape if mode == "eager" else "", mode, *(us(times[method]) for method in ("gemm", "torch", "async_tp"))])
            rows[-1] += [us(times["auto"]) + (f" {chosen}" if chosen != NONE else "")]
            rows[-1] += [f"{times[peer] / times['auto']:.2f}" for peer in ("torch", "async_tp")] + [hidden(times)]
    heads = "M×N×K | calls | cuBLAS | torch + NCCL | async TP | auto, its schedule | × torch | × async TP | E"
    return caption(op, machine, eager, graph) + table(heads, rows, 2)


def schedules(machine: str, op: str) -> str:
    eager, graph = headline(machine, op)
    rows: list[list[str]] = []
    methods = list(next(iter(eager.times.values())))
    for shape in eager.times:
        for mode, record in (("eager", eager), ("graph", graph)):
            rows.append([shape if mode == "eager" else "", mode, *(us(record.times[shape].get(method)) for method in methods)])
    return caption(op, machine, eager, graph) + table(" | ".join(["M×N×K", "calls", *methods]), rows, 2)


def few(commit: str) -> str:
    machine, name = FEW[commit]
    rows: list[list[str]] = []
    peers: list[str] = []
    for op in OPS:
        record = read(name.format(op))
        assert record.commit == commit
        for shape, times in record.times.items():
            peers = [peer for peer in ("torch", "async_tp") if peer in times]
            rows.append([linked(op, record, rows), shape, us(times["gemm"]), *(us(times[peer]) for peer in peers)])
            rows[-1] += [us(times["auto"]), *(f"{times[peer] / times['auto']:.2f}" for peer in peers)]
    timed, over = ("torch + NCCL | async TP", "× torch | × async TP") if len(peers) == 2 else ("torch + NCCL", "× torch")
    text = f"{machine}, commit {commit}, in a CUDA graph, µs:\n\n"
    return text + table(f"op | M×N×K | cuBLAS | {timed} | auto | {over}", rows, 2)


def few_h100() -> str:
    rows: list[list[str]] = []
    for op in OPS:
        known, before = read(f"2026-11-26-{op}-out-H100-R2.json"), read(f"2026-11-24-{op}-suites-H100-R2.json")
        graph = read(f"2026-11-24-{op}-suites-H100-R2-graph.json")
        bands = ((16, 64), (256, 512), (1024, 1024)), ((2048, 16384),)
        measured = [("eager", known, bands[0]), ("eager", before, bands[1]), ("graph", graph, (*bands[0], *bands[1]))]
        for mode, record, least, most in [(mode, record, *band) for mode, record, some in measured for band in some]:
            inside = [t for shape, t in record.times.items() if least <= int(shape.split("×")[0]) <= most]
            better = [min(times["torch"], times["async_tp"]) / times["auto"] for times in inside]
            lines = f"{least} to {most}" if least < most else str(most)
            rows.append([linked(op, record, rows), f"{mode}, {record.commit}", lines, str(len(better)), spread(better)])
    text = "2×H100, `auto` against the better of torch + NCCL and async TP, at the MLPs of four models:\n\n"
    return text + table("op | calls, commit | M | shapes | ×: least / median / most", rows, 3)


def again() -> str:
    rows: list[list[str]] = []
    for op in OPS:
        record = read(f"2026-11-25-{op}-again-H100-R2.json")
        for shape, times in record.times.items():
            if int(shape.split("×")[0]) <= 512:
                host, methods = record.host[shape], ("torch", "anew", "auto")
                rows.append([linked(op, record, rows), shape, *(us(times[method]) for method in methods)])
                rows[-1] += [f"{times['torch'] / times[method]:.2f}" for method in methods[1:]]
                rows[-1] += [us(host[method]) for method in methods]
    return table("op | M×N×K | torch + NCCL | anew | auto | anew × torch | auto × torch | host: torch | anew | auto", rows, 2)


def again_host() -> str:
    data = json.loads((MEASURED / "2026-11-25-again-host-H100-R2.json").read_text())
    rows: list[list[str]] = []
    for found in data["found"]:
        methods = found["methods"]
        for name, facts in methods.items():
            anew = methods.get(f"{name}, anew")
            if anew is not None:
                first = [found["op"], found["shape"].replace("x", "×")] if len(rows) % 2 == 0 else ["", ""]
                cells = [us(each[key]) for key in ("us", "host_us") for each in (methods["torch"], anew, facts)]
                rows.append([*first, name, *cells])
    heads = "op | M×N×K, or elements | call | torch + NCCL | anew | known | host: torch | anew | known"
    return table(heads, rows, 3)


def out_host() -> str:
    """ag_gemm alone; gemm_rs had `out` before."""
    data = json.loads((MEASURED / "2026-11-26-out-host-H100-R2.json").read_text())
    rows: list[list[str]] = []
    for found in data["found"]:
        if found["op"] == "ag_gemm":
            methods = [found["methods"][name] for name in ("torch", "context", "context, out", "no context, n")]
            rows.append([found["shape"].replace("x", "×"), *(us(each[key]) for key in ("us", "host_us") for each in methods)])
    ways = "torch + NCCL | context | context, out | no context, n"
    return table(f"M×N×K | {ways} | host: {ways}", rows, 1)


def out() -> str:
    rows: list[list[str]] = []
    for name, run in (("out", "all shapes"), ("out-short", "fifteen rounds")):
        record = read(f"2026-11-26-ag_gemm-{name}-H100-R2.json")
        first = len(rows)
        for shape, times in record.times.items():
            if int(shape.split("×")[0]) <= 512:
                cells = [times.get("anew"), times["said"], times["auto"]]
                rows.append([linked(run, record, rows[first:]), shape, *(us(t) if t else NONE for t in (times["torch"], *cells))])
                rows[-1] += [f"{times['torch'] / times[method]:.2f}" for method in ("said", "auto")]
                rows[-1] += [us(record.host[shape][method]) for method in ("torch", "auto")]
    return table("run | M×N×K | torch + NCCL | anew | said | auto | said × torch | auto × torch | host: torch | auto", rows, 2)


def said() -> str:
    rows: list[list[str]] = []
    for op, model in [(op, model) for op in OPS for model in ("8b", "70b")]:
        record = read(f"2026-11-25-{op}-said-{model}-H100-R2.json")
        for shape, times in list(record.times.items())[1:]:
            rows.append([linked(op, record, rows), shape, *(us(times[name]) for name in ("torch", "unsaid", "said", "auto"))])
            rows[-1] += [f"{times['unsaid'] / times['said']:.2f}", f"{times['auto'] / times['said']:.2f}"]
    return table("op | M×N×K | torch + NCCL | unsaid | said | on a context | unsaid / said | on a context / said", rows, 2)


def host() -> str:
    rows: list[list[str]] = []
    for op in OPS:
        record = read(f"2026-11-21-{op}-host-R4.json")
        for shape, times in record.host.items():
            copies = us(times["copy_engine"]) if op == "gemm_rs" else NONE  # by a graph of copies, which is taken back
            rows.append([linked(op, record, rows), f"4×H200, {record.commit}", shape, us(times["torch"]), us(times["async_tp"])])
            rows[-1] += [us(times["in_kernel"]), copies, NONE]
    of_h100s = [(op, "2×H100", headline("2×H100", op)[0], "shapes") for op in OPS]
    of_h100s += [(op, "2×H100", read(f"2026-11-26-{op}-out-H100-R2.json"), "shapes of few rows") for op in OPS]
    of_h100s += [(op, "4×H100", headline("4×H100", op)[0], "shapes") for op in OPS]
    for op, machine, record, what in of_h100s:
        cells = [[times[method] for times in record.host.values()] for method in ("torch", "async_tp", "auto")]
        told = [f"{us(min(cell))} to {us(max(cell))}" for cell in cells]
        rows.append([linked(op, record, rows), f"{machine}, {record.commit}", f"{len(cells[0])} {what}", *told[:2]])
        rows[-1] += [NONE, NONE, told[2]]
    return table("op | GPUs, commit | M×N×K | torch + NCCL | async TP | in_kernel | copy_engine | auto", rows, 3)


def size(nbytes: int) -> str:
    return f"{nbytes >> 10} KB" if nbytes < 1 << 20 else f"{nbytes >> 20} MB"


#: all_reduce and gemm_ar in graphs.
OF_ALL_REDUCE = {"4×H100": "2026-11-26-all_reduce-H100-R4-graph.json", "2×H200": "2026-11-26-all_reduce-sets-R2-graph.json"}
OF_GEMM_AR = {"4×H100": "2026-11-26-gemm_ar-H100-R4-graph.json", "2×H200": "2026-11-26-gemm_ar-sets-R2-graph.json"}
#: Before launches took what fits into sets of 64 MB.
OF_GEMM_AR |= {"2×H200,-smaller-launches": "2026-11-26-gemm_ar-R2-graph.json"}
#: Runs of the operations of one trip and of lists, by what the records' names have, and their machines.
RUNS = {"R2": "2×H200", "sets-R2": "2×H200", "H100-R4": "4×H100"}
#: Operations of such a run that have been measured again since, and the run that has them.
AGAIN = {("reduce", "H100-R4"): "relay-H100-R4", ("broadcast", "H100-R4"): "relay-H100-R4"}


def all_reduce(machine: str) -> str:
    record = read(OF_ALL_REDUCE[machine])
    rows: list[list[str]] = []
    for nbytes, times in record.times.items():
        best = min(times["torch_one_shot"], times["torch_two_shot"])
        rows.append([size(int(nbytes)), us(times["torch"]), us(best), f"{us(times['auto'])} {record.paths[nbytes]}"])
        rows[-1] += [f"{times['torch'] / times['auto']:.2f}", f"{best / times['auto']:.2f}"]
    text = f"{machine}, bfloat16, in a CUDA graph, µs, commit {record.commit} ([record]({record.link})):\n\n"
    return text + table("size | NCCL | torch's best | auto, its algorithm | × NCCL | × torch's best", rows)


def words() -> str:
    """all_reduce in graphs before words were exchanged in turns, and now."""
    before, now = read("2026-11-26-all_reduce-before-R2-graph.json"), read("2026-11-26-all_reduce-R2-graph.json")
    rows: list[list[str]] = []
    for nbytes, times in now.times.items():
        was = before.times[nbytes]
        cells = [us(min(times[peer] for peer in ("torch", "torch_one_shot", "torch_two_shot")))]
        cells += [us(found[algo]) for algo in ("one_shot", "two_shot", "bulk", "auto") for found in (was, times)]
        rows.append([size(int(nbytes)), *cells])
    heads = "size | best peer, now | one_shot before | now | two_shot before | now | bulk before | now | auto before | now"
    return f"Before: {before.commit} ([record]({before.link})); now: {now.commit} ([record]({now.link})):\n\n" + table(heads, rows)


def looks() -> str:
    """all_reduce in graphs before who waits for words looked less often at the clock, and since."""
    before, now = (read(f"2026-11-28-all_reduce-{name}-R2-graph.json") for name in ("waits-before", "waits"))
    rows: list[list[str]] = []
    for nbytes, times in now.times.items():
        was = before.times[nbytes]
        cells = [us(was["torch"]), us(times["torch"])]
        cells += [f"{found[algo]:.2f}" for algo in ("one_shot", "two_shot", "auto") for found in (was, times)]
        cells += [f"{1 - times['auto'] / was['auto']:.0%}", f"{times['torch'] / times['auto']:.2f}"]
        rows.append([size(int(nbytes)), *cells])
    heads = "size | NCCL, first run | second | one_shot before | now | two_shot before | now | auto before | now | less | × NCCL"
    return f"Before: {before.commit} ([record]({before.link})); now: {now.commit} ([record]({now.link})):\n\n" + table(heads, rows)


def turns() -> str:
    """A program that waits for what was pushed one turn before, or two."""
    one, two = (read(f"2026-11-26-all_reduce-ahead-{number}-R2-graph.json") for number in (1, 2))
    rows: list[list[str]] = []
    for nbytes, times in one.times.items():
        cells = times["torch_two_shot"], times["two_shot"], two.times[nbytes]["two_shot"], times["trees"]
        rows.append([size(int(nbytes)), *map(us, cells)])
    heads = f"size | torch two_shot | two_shot, [one turn]({one.link}) | [two]({two.link}) | trees"
    return table(heads, rows)


def bursts(run: str = "R2") -> str:
    """Two H200s have a run from before, too."""
    rows: list[list[str]] = []
    for mode, suffix in (("eager", ""), ("graph", "-graph")):
        now = read(f"2026-11-26-resnet50-{run}{suffix}.json")
        before = read(f"2026-11-26-resnet50-before-R2{suffix}.json") if RUNS[run] == "2×H200" else None
        for keys, times in now.times.items():
            cells = [us(times[method]) for method in ("torch", "torch_coalesced", "each")]
            cells += [us(before.times[keys]["list"])] if before else []
            cells += [us(times["list"]), f"{times['torch_coalesced'] / times['list']:.2f}"]
            shown = mode if any(row[0].startswith(f"[{mode}]") for row in rows) else f"[{mode}]({now.link})"
            rows.append([shown, keys, *cells])
    lists, which = "of the list", f", commit {now.commit}"
    if before:
        lists, which = "of the list, before | now", f"; before: {before.commit}, now: {now.commit}"
    heads = f"calls | keys | NCCL, one call each | coalesced | all_reduce_ of each | {lists} | × coalesced"
    return f"{RUNS[run]}, bfloat16, µs{which}:\n\n" + table(heads, rows)


def collectives(run: str = "R2") -> str:
    rows: list[list[str]] = []
    records = {op: read(f"2026-11-26-{op}-{AGAIN.get((op, run), run)}-graph.json") for op in COLLECTIVES[3:]}
    methods = list(next(iter(records["broadcast"].times.values())))  # that op has all of them
    for op, record in records.items():
        for nbytes, times in record.times.items():
            cells = [us(times.get(method)) for method in methods]
            rows.append([linked(op, record, rows), size(int(nbytes)), *cells, f"{times['torch'] / times['auto']:.2f}"])
    usual, *others = dict.fromkeys(record.commit for record in records.values())
    which = "".join(f", {' and '.join(op for op in records if records[op].commit == commit)} {commit}" for commit in others)
    text = f"{RUNS[run]}, bfloat16, in a CUDA graph, µs, commit {usual}{which}; the size is that of all parts together:\n\n"
    return text + table(" | ".join(["op", "size", "NCCL", *methods[1:], "× NCCL"]), rows, 2)


def relay() -> str:
    """reduce and broadcast on four H100s, where they went in one trip at every size, and since."""
    rows: list[list[str]] = []
    for op, run in AGAIN:
        before, now = (read(f"2026-11-26-{op}-{name}-graph.json") for name in (run, AGAIN[op, run]))
        for nbytes, times in now.times.items():
            was = before.times.get(nbytes)
            cells = [us(times[method]) for method in ("torch", "words", "two_shot", "bulk")]
            cells += [f"{us(times['auto'])} {now.paths[nbytes]}", f"{times['torch'] / times['auto']:.2f}"]
            cells += [us(was["auto"]), f"{was['torch'] / was['auto']:.2f}"] if was else [NONE] * 2
            rows.append([linked(op, now, rows), size(int(nbytes)), *cells])
    text = f"4×H100, bfloat16, in a CUDA graph, µs; before: {before.commit}, now: {now.commit}:\n\n"
    heads = "op | size | NCCL | words | two_shot | bulk | auto, its algorithm | × NCCL | auto before | × NCCL before"
    return text + table(heads, rows, 2)


def sets() -> str:
    """all_reduce and its family before launches took what fits into sets of 64 MB, and since: large tensors, by auto."""
    rows: list[list[str]] = []
    for op in ("all_reduce", *COLLECTIVES[3:]):
        before, now = (read(f"2026-11-26-{op}-{name}R2-graph.json") for name in ("", "sets-"))
        for nbytes, times in now.times.items():
            if int(nbytes) >= 16 << 20:
                best = min(times[peer] for peer in ("torch", "torch_one_shot", "torch_two_shot") if peer in times)
                cells = [us(best), us(before.times[nbytes]["auto"]), us(times["auto"]), f"{best / times['auto']:.2f}"]
                rows.append([linked(op, now, rows), size(int(nbytes)), *cells])
    text = f"2×H200, bfloat16, in a CUDA graph, µs; before: {before.commit}, now: {now.commit}:\n\n"
    return text + table("op | size | best peer, now | before | now | × best peer", rows, 2)


def launches() -> str:
    """Large tensors by the bytes of a part that a launch takes."""
    rows: list[list[str]] = []
    for op in ("reduce", "broadcast", "all_gather"):
        names = ("16", "32", "64") if op == "all_gather" else ("16", "32", "64", "32-words-1024")
        some = [read(f"2026-11-26-{op}-launches-{name}-R2-graph.json") for name in names]
        for nbytes, times in some[0].times.items():
            first = op not in {row[0] for row in rows}
            cells = [us(record.times[nbytes]["words"]) for record in some]
            cells = [f"[{cell}]({record.link})" if first else cell for cell, record in zip(cells, some, strict=True)]
            rows.append([op, size(int(nbytes)), us(times["torch"]), *cells, *[NONE] * (4 - len(some))])
    return table("op | size | NCCL | 16 MB | 32 MB | 64 MB | 32 MB, blocks of 1024 words", rows, 2)


def llama_8b() -> str:
    record = read("2026-11-27-ag_gemm-llama-8b-R2.json")
    rows: list[list[str]] = []
    for shape, times in record.times.items():
        cells = [us(times["gemm"]), us(times["torch"]), us(times["async_tp"]), f"{us(times['auto'])} {record.paths[shape]}"]
        rows.append([shape, *cells, f"{min(times['torch'], times['async_tp']) / times['auto']:.2f}"])
        rows[-1] += [us(record.host[shape][method]) for method in ("torch", "async_tp", "auto")]
    text = f"2×H200, commit {record.commit}, eager, µs ([record]({record.link})):\n\n"
    heads = "cuBLAS | torch + NCCL | async TP | auto, its schedule | × the better peer | host: torch | async TP | auto"
    return text + table(f"ag_gemm, M×N×K | {heads}", rows)


def large() -> str:
    rows: list[list[str]] = []
    for op in OPS:
        record = read(f"2026-11-26-{op}-large-R2.json")
        for shape, times in record.times.items():
            cells = [us(times["torch"]), us(times["async_tp"]), f"{us(times['auto'])} {record.paths[shape]}"]
            rows.append([linked(op, record, rows), shape, *cells, f"{min(times['torch'], times['async_tp']) / times['auto']:.2f}"])
    text = f"2×H200, commit {record.commit}, eager, µs:\n\n"
    return text + table("op | M×N×K | torch + NCCL | async TP | auto, its schedule | × the better peer", rows, 2)


def gemm_ar(machine: str) -> str:
    record = read(OF_GEMM_AR[machine])
    rows: list[list[str]] = []
    for shape, times in record.times.items():
        rows.append([shape, us(times["gemm"]), us(times["torch"]), f"{us(times['auto'])} {record.paths[shape]}"])
        rows[-1] += [f"{times['torch'] / times['auto']:.2f}"]
    text = f"{machine.split(',')[0]}, bfloat16, in a CUDA graph, µs, commit {record.commit} ([record]({record.link})):\n\n"
    return text + table("M×N×K | cuBLAS | torch + NCCL | auto, its algorithm | × torch", rows)


def whole(name: str) -> str:
    """All methods of a record of all_reduce or gemm_ar, by size or shape."""
    record = read(f"2026-11-26-{name}.json")
    timed = list(next(iter(record.times.values())))
    rows: list[list[str]] = []
    for where, times in record.times.items():
        rows.append([size(int(where)) if where.isdigit() else where, *(us(times[method]) for method in timed)])
        rows[-1][-1] += f" {record.paths[where]}"
    text = f"{'In a CUDA graph' if 'graph' in name else 'Eager'}, µs, commit {record.commit} ([record]({record.link})):\n\n"
    return text + table(" | ".join(["M×N×K" if "×" in rows[0][0] else "size", *timed]), rows)


def apart() -> str:
    rows: list[list[str]] = []
    for op in OPS:
        record = read(f"2026-11-25-{op}-apart-H100-2x1-graph.json")
        for shape, times in record.times.items():
            cells = [us(times[method]) for method in ("gemm", "torch", "apart", "together", "auto")]
            rows.append([linked(op, record, rows), shape, *cells, f"{times['torch'] / times['auto']:.2f}"])
    return table("op | M×N×K | cuBLAS | torch + NCCL | apart | together | auto | × torch", rows, 2)


def merged() -> str:
    """Few rows before and now; shapes that the later record before does not have are the earlier one's."""
    rows: list[list[str]] = []
    for op in OPS:
        record = read(f"2026-11-25-{op}-few-rows-merged-H100-2x1-graph.json")
        earlier, later = (read(f"2026-11-25-{op}-{name}-H100-2x1-graph.json").times for name in ("few-rows", "apart"))
        before = earlier | later
        for shape, times in record.times.items():
            cells = [us(times[method]) for method in ("gemm", "torch", "auto")]
            over = [f"{found['torch'] / found['auto']:.3f}" for found in (before[shape], times)]
            rows.append([linked(op, record, rows), shape, *cells, *over])
    return table("op | M×N×K | cuBLAS | torch + NCCL | auto | × torch before | × torch now", rows, 2)


def swing() -> str:
    rows: list[list[str]] = []
    shape = "8192×12288×49152"
    names = {"swing": "40 rounds of 5 calls", "swing-iters20": "12 rounds of 20 calls", "table": "5 rounds of 5 calls"}
    for name, rounds in names.items():
        record = read(f"2026-11-25-gemm_rs-{name}-H100-R2.json")
        times = record.times[shape]
        cells = [f"{times[method] / 1e3:.3f}" for method in ("gemm", "torch", "async_tp", "auto")]
        rows.append([f"[{rounds}]({record.link})", *cells, f"{min(times['torch'], times['async_tp']) / times['auto']:.3f}"])
    return table("gemm_rs 8192×12288×49152, eager, ms | cuBLAS | torch + NCCL | async TP | auto | × the better peer", rows)


def fused(*ops: str) -> str:
    """Few rows by torch's product and an exchange, and in one kernel."""
    rows: list[list[str]] = []
    for op in ops:
        for mode in ("-graph", ""):
            was, now = (read(f"2026-11-27-{op}-{name}-R2{mode}.json") for name in ("unfused", "fused"))
            for shape, times in now.times.items():
                cells = [us(times["gemm"]), us(times["torch"]), *(us(found.times[shape]["auto"]) for found in (was, now))]
                cells += [f"{found.times[shape]['torch'] / found.times[shape]['auto']:.2f}" for found in (was, now)]
                host = [us(found.host[shape]["auto"]) for found in (was, now)] if not mode else [NONE, NONE]
                rows.append([linked(op, now, rows), shape, mode[1:] or "eager", *cells, *host])
    heads = "op | M×N×K | calls | cuBLAS | torch + NCCL | auto before | now | × torch before | now | host before | now"
    return table(heads, rows, 3)


def side_by_side(machine: str, *ops: str) -> str:
    """Few rows by torch's product and an exchange, and in one kernel, in one run; "–" where that cannot be."""
    rows: list[list[str]] = []
    for op in ops:
        for mode in ("-graph", ""):
            record = read(SIDE_BY_SIDE[machine][0].format(op, mode))
            for shape, times in record.times.items():
                for how in ("one_shot", "two_shot") if op == "gemm_ar" else ("sequential",):
                    ways = how if op == "gemm_ar" else f"{how}/torch", f"{how}/fused"
                    cells = [us(times.get(way)) for way in ("gemm", "torch", *ways)]
                    cells += [f"{times['torch'] / times[way]:.2f}" if way in times else NONE for way in ways]
                    cells += [us(record.host[shape].get(way)) if not mode else NONE for way in ways]
                    rows.append([linked(op, record, rows), shape, how, mode[1:] or "eager", *cells])
    heads = "op | M×N×K | exchange | calls | cuBLAS | torch + NCCL | by torch | in one kernel"
    return table(f"{heads} | × torch by torch | in one | host by torch | in one", rows, 4)


def nodes(what: str) -> str:
    rows: list[list[str]] = []
    for op in OPS:
        eager, graph = (read(NODES[what].format(op, mode)) for mode in MODES)
        rows.append([f"{op}, {eager.commit} ([eager]({eager.link}), [graph]({graph.link}))", *[""] * 9])
        for shape, times in eager.times.items():
            cells = [us(times["gemm"])]
            for record in (eager, graph):
                torch, auto = (record.times[shape][method] for method in ("torch", "auto"))
                hosts = [us(eager.host[shape][method]) for method in ("torch", "auto")] if record is eager else []
                cells += [us(torch), us(auto), f"{torch / auto:.2f}", *hosts]
            rows.append([shape, *cells])
    heads = "M×N×K | cuBLAS | torch + NCCL | fluxlike | × torch | host: torch | fluxlike | in a graph: torch | fluxlike | × torch"
    return table(heads, rows)


MADE = (summary, landing, shapes, schedules, few, few_h100, again, again_host, out_host, out, said, host)
MADE += (all_reduce, words, turns, bursts, collectives, relay, sets, launches, gemm_ar, whole, large, llama_8b)
MADE += (apart, merged, swing, fused, side_by_side, looks, nodes)
TABLES: dict[str, Callable[..., str]] = {made.__name__: made for made in MADE}


def filled(path: Path) -> str:
    """The page with its tables as the records have them."""

    def again(match: re.Match[str]) -> str:
        name, *arguments = match[1].split()
        made = TABLES[name](*arguments)
        if path.parent != MEASURED.parent:
            made = made.replace("](measured/", "](" if path.parent == MEASURED else "](docs/measured/")
        return f"{match[1]}{match[2]}{made}\n"

    return PLACE.sub(again, path.read_text())


def pages() -> list[Path]:
    return [path for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))) if "<!-- table: " in path.read_text()]


def main() -> Any:
    for path in pages():
        path.write_text(filled(path))
        print(path.relative_to(ROOT))


if __name__ == "__main__":
    sys.exit(main())
