"""A real model answers a long prompt: cold, from host memory, and from disk in a new process.

Beside them stands transformers' own cache, kept in memory and cropped to the same length: the least
that any store can cost. All of them must give the same tokens; the exit status is 1 when they do not,
or when a hit that should happen did not.

    python examples/demo.py [--tokens 2400] [--new 24] [--repeats 5] [--picture .cache/demo.png]
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer

from lmkv_hf import CachedModel
from lmkv_hf.geometry import CACHE

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / ".cache" / "smollm2-135m-instruct"
MANUAL = ROOT / "examples" / "station_manual.txt"
QUESTION = "\n\nWhich four words can end the morning message, and what does each of them mean?"
BUDGET = "1GiB"


@dataclass
class Run:
    """One way to the answer. seconds: to the first token, one a repetition; hit: prompt tokens restored, by tier."""

    title: str
    color: str
    seconds: list[float] = field(default_factory=list)
    answer: list[int] = field(default_factory=list)
    hit: dict[str, int] = field(default_factory=dict)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread(self) -> str:
        return f"{min(self.seconds):.2f} to {max(self.seconds):.2f} s" if len(self.seconds) > 1 else ""


class Clock:
    """A streamer that notes when the first token comes: the first thing put is the prompt, the second that token."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, _value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def measure(generate: Callable[..., Any], ids: torch.Tensor, new: int, **arguments: Any) -> tuple[float, Any]:
    """Seconds to the first token, and what generate returns."""
    clock = Clock()
    start = time.perf_counter()
    result = generate(ids, max_new_tokens=new, do_sample=False, streamer=clock, **arguments)
    return clock.times[1] - start, result


def load() -> tuple[Any, Any]:
    """The model in fp32, woken up: its weights are mapped from disk when they are first touched."""
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model.generate(tokenizer("Good morning. " * 25, return_tensors="pt")["input_ids"], max_new_tokens=2)
    return model, tokenizer


def build_prompt(tokenizer: Any, count: int) -> torch.Tensor:
    """A chat of exactly ``count`` tokens: as much of the manual as fits, then a question."""
    template = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    head, tail = template.split("{}")
    manual, start, end = (tokenizer(text)["input_ids"] for text in (MANUAL.read_text(), head, QUESTION + tail))
    room = count - len(start) - len(end)
    if not 0 < room <= len(manual):
        sys.exit(f"--tokens must lie between {count - room + 1} and {count - room + len(manual)}")
    return torch.tensor([start + manual[:room] + end])


def from_disk(folder: str, ids: torch.Tensor, new: int, repeats: int) -> Run:
    """What the second process does: open the store that the first one left, and answer from it."""
    model, _ = load()
    run = Run("lmkv, disk, new process", "#2f6f9f")
    with CachedModel(model, cpu_budget=BUDGET, tiers=f"disk://{folder}") as cached:
        cached.engine.storage.arena.warmed.wait(60)
        for repeat in range(repeats):
            seconds, result = measure(cached.generate, ids, 2 if repeat else new)
            run.seconds.append(seconds)
            if not repeat:
                run.answer = result[0, ids.shape[1] :].tolist()
                run.hit = dict(cached.last.sequences[0].tiers)
            cached.engine.clear(tier="cpu")
    return run


def in_new_process(folder: str, arguments: argparse.Namespace) -> Run:
    command = [sys.executable, __file__, "--child", folder, "--tokens", str(arguments.tokens)]
    command += ["--new", str(arguments.new), "--repeats", str(arguments.repeats)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return Run(**json.loads(done.stdout.splitlines()[-1]))


def measure_all(arguments: argparse.Namespace, say: Callable[[str], None]) -> Iterator[Run]:
    """All runs, in the order of the table."""
    new, columns = arguments.new, arguments.tokens
    say("loading SmolLM2-135M-Instruct")
    model, tokenizer = load()
    ids = build_prompt(tokenizer, columns)

    say(f"{columns} tokens through transformers, cold")
    plain = Run("transformers, cold", "#b9b4ac")
    seconds, output = measure(model.generate, ids, new, return_dict_in_generate=True)
    plain.seconds.append(seconds)
    plain.answer = output.sequences[0, columns:].tolist()
    yield plain

    with tempfile.TemporaryDirectory(prefix="lmkv-demo-", dir=MODEL.parent) as folder:
        with CachedModel(model, cpu_budget=BUDGET, tiers=f"disk://{folder}") as cached:
            say("the same through lmkv, cold")
            cold, warm = Run("lmkv, cold", "#8d867b"), Run("lmkv, host memory", "#d1603d")
            own = Run("transformers' own cache", "#6a9a78")
            for run in (cold, warm):
                seconds, result = measure(cached.generate, ids, new)
                run.seconds.append(seconds)
                run.answer = result[0, columns:].tolist()
                run.hit = dict(cached.last.sequences[0].tiers)
            restored = sum(warm.hit.values())
            yield cold

            say("from memory: lmkv and transformers' own cache in turn")
            kept = output[CACHE]
            kept.crop(restored - kept.get_seq_length())
            for repeat in range(arguments.repeats):
                cache = copy.deepcopy(kept)
                seconds, result = measure(model.generate, ids, 2 if repeat else new, **{CACHE: cache})
                own.seconds.append(seconds)
                own.answer = own.answer or result[0, columns:].tolist()
                if repeat:
                    warm.seconds.append(measure(cached.generate, ids, 2)[0])
            own.hit = {"in memory": restored}
            yield warm
            say("waiting for the disk")
            cached.engine.flush(60)
        say("a new process, from disk")
        yield in_new_process(folder, arguments)
    yield own


def faults(runs: list[Run], tokens: int) -> list[str]:
    """What did not come out as it should."""
    plain, cold, warm, disk, own = runs
    found = [f"{run.title}: other tokens than {plain.title}" for run in runs if run.answer != plain.answer]
    most = (tokens - 1) // 256 * 256
    if cold.hit:
        found.append(f"{cold.title}: {cold.hit} tokens restored from an empty store")
    for run, tier in ((warm, "cpu"), (disk, "disk"), (own, "in memory")):
        if run.hit != {tier: most}:
            found.append(f"{run.title}: {run.hit or 'nothing'} restored instead of {most} tokens from {tier}")
    return found


def table(runs: list[Run], tokens: int) -> Table:
    plain, own = runs[0], runs[-1]
    shown = Table(title=f"Time to the first token, {tokens}-token prompt, SmolLM2-135M fp32 on CPU", title_style="bold")
    for name, side in (("", "left"), ("prompt", "right"), ("restored", "right"), ("first token", "right"),
                       ("range", "right"), ("speed-up", "right"), ("of own cache", "right"), ("tokens", "left")):  # fmt: skip
        shown.add_column(name, justify=side)
    for run in runs:
        restored = ", ".join(f"{count} {tier}" for tier, count in run.hit.items()) or "-"
        same = "identical" if run.answer == plain.answer else "[bold red]DIFFERENT[/]"
        ratio = f"{run.median / own.median:.2f}" if run.hit else "-"
        speed = f"{plain.median / run.median:.1f}x"
        shown.add_row(run.title, str(tokens), restored, f"{run.median:.3f} s", run.spread, speed, ratio, same)
    return shown


def draw(runs: list[Run], tokens: int, path: Path) -> None:
    """Two panels: all runs on one scale, and the restored ones close up with every repetition."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
    figure, (left, right) = plt.subplots(1, 2, figsize=(11.5, 3.9), width_ratios=(1.25, 1), layout="constrained")
    plain, hits = runs[0], [run for run in runs if run.hit]
    for axes, shown in ((left, runs), (right, hits)):
        titles = [run.title for run in shown]
        axes.barh(titles, [run.median for run in shown], color=[run.color for run in shown], height=0.62)
        axes.invert_yaxis()
        axes.set_xlabel("seconds to the first token")
        axes.tick_params(axis="y", length=0)
    widest = max(run.median for run in runs)
    left.set_xlim(0, widest * 1.24)
    for place, run in enumerate(runs):
        speed = f"   {plain.median / run.median:.1f}x faster" if run.hit else ""
        left.text(run.median + widest * 0.015, place, f"{run.median:.2f} s{speed}", va="center")
    left.set_title(f"{tokens}-token prompt, {sum(runs[-1].hit.values())} tokens restored", loc="left", fontsize=10.5)
    right.set_xlim(0, max(max(run.seconds) for run in hits) * 1.3)
    for place, run in enumerate(hits):
        right.plot(run.seconds, [place] * len(run.seconds), "o", ms=4.5, mfc="white", mec="#333", mew=0.9)
        label = "1.00 (reference)" if run is runs[-1] else f"{run.median / runs[-1].median:.2f}"
        right.text(max(run.seconds) * 1.04, place, label, va="center")
    right.set_title("Close up: every repetition, and the ratio to transformers' own cache", loc="left", fontsize=10.5)
    figure.suptitle("SmolLM2-135M-Instruct, fp32, two CPU cores: prefill against restoring the KV cache",
                    fontsize=12.5, fontweight="bold", x=0.01, ha="left")  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=2400, help="length of the prompt")
    parser.add_argument("--new", type=int, default=24, help="tokens to generate and compare")
    parser.add_argument("--repeats", type=int, default=5, help="repetitions of what is fast")
    parser.add_argument("--picture", type=Path, default=ROOT / ".cache" / "demo.png")
    parser.add_argument("--child", metavar="FOLDER", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        ids = build_prompt(AutoTokenizer.from_pretrained(MODEL), arguments.tokens)
        print(json.dumps(asdict(from_disk(arguments.child, ids, arguments.new, arguments.repeats))))
        return 0
    console = Console()
    with console.status("") as status:
        runs = list(measure_all(arguments, status.update))
        draw(runs, arguments.tokens, arguments.picture)
    answer = AutoTokenizer.from_pretrained(MODEL).decode(runs[0].answer, skip_special_tokens=True)
    console.print(f'The answer begins: "{answer.strip()}"\n', highlight=False)
    console.print(table(runs, arguments.tokens))
    console.print(f"picture: {arguments.picture}", highlight=False)
    found = faults(runs, arguments.tokens)
    for fault in found:
        console.print(f"[bold red]FAILED[/] {fault}", highlight=False)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
