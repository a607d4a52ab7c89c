"""A real model answers a long prompt: cold, from host memory, and from disk in a new process.

Beside them stands transformers' own cache, kept in memory and cropped to the same length: the least
that any store can cost. All of them must give the same tokens; the exit status is 1 when they do not,
or when a hit that should happen did not.

    python examples/demo.py [--tokens 2400] [--new 48] [--repeats 5] [--picture .cache/demo.png]
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
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.utils.logging import disable_progress_bar

from lmkv_hf import CachedModel, Report
from lmkv_hf.geometry import CACHE

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / ".cache" / "smollm2-135m-instruct"
MANUAL = ROOT / "examples" / "station_manual.txt"
QUESTION = "\n\nHow far from the harbour of Ellinsund is Skarven Rock, and why was the station built?"
BUDGET, CHUNK = "1GiB", 256
NOTHING = Report()


@dataclass
class Run:
    """One way to the answer. seconds: to the first token, one a repetition; reference: those of transformers' own cache
    beside them; answer: generated tokens; hit: prompt tokens restored, by tier."""

    title: str
    color: str
    seconds: list[float] = field(default_factory=list)
    reference: list[float] = field(default_factory=list)
    answer: list[int] = field(default_factory=list)
    hit: dict[str, int] = field(default_factory=dict)

    def note(self, seconds: float, sequences: torch.Tensor, ids: torch.Tensor, report: Report = NOTHING) -> None:
        """One repetition; the first one has the answer."""
        self.seconds.append(seconds)
        if len(self.seconds) == 1:
            self.answer = sequences[0, ids.shape[1] :].tolist()
            self.hit = dict(report.sequences[0].tiers) if report.sequences else {}

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def ratio(self) -> float:
        """Against transformers' own cache."""
        return self.median / statistics.median(self.reference)


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
    disable_progress_bar()
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


def compare(cached: CachedModel, ids: torch.Tensor, kept: DynamicCache | None, new: int, repeats: int, run: Run) -> Run:
    """Measure lmkv's hits into ``run`` and, in turn with them, transformers with a copy of ``kept``: both then saw the
    same load on the machine. Without ``kept`` every hit comes from disk. Returns the run of transformers."""
    own, disk = Run("transformers' own cache", "#6a9a78"), kept is None
    for repeat in range(repeats):
        tokens = 2 if repeat else new
        if disk:
            cached.engine.clear(tier="cpu")
        run.note(*measure(cached.generate, ids, tokens), ids, cached.last)
        if kept is None:
            kept = own_copy(cached, ids, sum(run.hit.values()))
        arguments = {CACHE: copy.deepcopy(kept)}
        own.note(*measure(cached.model.generate, ids, tokens, **arguments), ids)
        run.reference.append(own.seconds[-1])
    own.hit = {"memory": kept.get_seq_length()} if kept else {}
    own.reference = own.seconds
    return own


def own_copy(cached: CachedModel, ids: torch.Tensor, length: int) -> DynamicCache:
    """transformers' own cache with the first ``length`` tokens of what lmkv restores."""
    result = cached.generate(ids, max_new_tokens=1, do_sample=False, return_dict_in_generate=True)
    own = DynamicCache(config=cached.model.config)
    for index, layer in enumerate(result[CACHE].layers):
        own.update(layer.keys[:, :, :length].clone(), layer.values[:, :, :length].clone(), index)
    return own


def from_disk(folder: str, ids: torch.Tensor, new: int, repeats: int) -> Run:
    """What the second process does: open the store that the first one left, and answer from it."""
    model, _ = load()
    run = Run("lmkv, disk, new process", "#2f6f9f")
    with CachedModel(model, cpu_budget=BUDGET, tiers=[f"disk://{folder}"]) as cached:
        cached.engine.storage.arena.warmed.wait(60)
        compare(cached, ids, None, new, repeats, run)
    return run


def in_new_process(folder: str, arguments: argparse.Namespace) -> Run:
    command = [sys.executable, __file__, "--child", folder, "--tokens", str(arguments.tokens)]
    command += ["--new", str(arguments.new), "--repeats", str(arguments.repeats)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return Run(**json.loads(done.stdout.splitlines()[-1]))


def measure_all(arguments: argparse.Namespace, say: Callable[[str], None]) -> list[Run]:
    """All runs, in the order of the table."""
    new = arguments.new
    say("loading SmolLM2-135M-Instruct")
    model, tokenizer = load()
    ids = build_prompt(tokenizer, arguments.tokens)
    plain, cold = Run("transformers, cold", "#b9b4ac"), Run("lmkv, cold", "#8d867b")
    warm = Run("lmkv, host memory", "#d1603d")

    say(f"{arguments.tokens} tokens through transformers, cold")
    seconds, output = measure(model.generate, ids, new, return_dict_in_generate=True)
    plain.note(seconds, output.sequences, ids)
    with tempfile.TemporaryDirectory(prefix="lmkv-demo-", dir=MODEL.parent) as folder:
        with CachedModel(model, cpu_budget=BUDGET, tiers=[f"disk://{folder}"]) as cached:
            say("the same through lmkv, cold")
            cold.note(*measure(cached.generate, ids, new), ids, cached.last)
            say("lmkv from host memory and transformers' own cache, in turn")
            kept = output[CACHE]
            kept.crop((arguments.tokens - 1) // CHUNK * CHUNK - kept.get_seq_length())
            own = compare(cached, ids, kept, new, arguments.repeats, warm)
            say("waiting for the disk")
            cached.engine.flush(60)
        say("lmkv from disk, in a new process")
        disk = in_new_process(folder, arguments)
    return [plain, cold, warm, disk, own]


def faults(runs: list[Run], tokens: int) -> list[str]:
    """What did not come out as it should."""
    plain, cold, warm, disk, own = runs
    found = [f"{run.title}: other tokens than {plain.title}" for run in runs if run.answer != plain.answer]
    most = (tokens - 1) // CHUNK * CHUNK
    if cold.hit:
        found.append(f"{cold.title}: {cold.hit} tokens restored from an empty store")
    for run, tier in ((warm, "cpu"), (disk, "disk"), (own, "memory")):
        if run.hit != {tier: most}:
            found.append(f"{run.title}: {run.hit or 'nothing'} restored instead of {most} tokens from {tier}")
    return found


def fastest_cold(runs: list[Run]) -> float:
    """What speed-ups are counted from: the first long prefill of a process is slower than the second."""
    return min(run.median for run in runs if not run.hit)


def table(runs: list[Run], tokens: int) -> Table:
    """The runs as rows; ``vs own`` is against transformers' own cache, measured in turn with the run."""
    title = f"{tokens}-token prompt, SmolLM2-135M-Instruct, fp32, {torch.get_num_threads()} CPU threads"
    shown = Table(title=title, box=SIMPLE_HEAD, pad_edge=False)
    shown.add_column("", no_wrap=True)
    for name in ("restored", "TTFT", "faster", "vs own", "same"):
        shown.add_column(name, justify="right", no_wrap=True)
    for run in runs:
        restored = ", ".join(f"{count} {tier}" for tier, count in run.hit.items()) or "-"
        same = "[green]yes[/]" if run.answer == runs[0].answer else "[bold red]NO[/]"
        ratio = f"{run.ratio:.2f}" if run.hit else "-"
        speed = f"{fastest_cold(runs) / run.median:.1f}x" if run.hit else "-"
        shown.add_row(run.title, restored, f"{run.median:.3f} s", speed, ratio, same)
    return shown


def draw(runs: list[Run], tokens: int, path: Path) -> None:
    """Two panels: all runs on one scale, and the restored ones close up with every repetition."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"font.size": 10} | {f"axes.spines.{side}": False for side in ("top", "right", "left")})
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.1), width_ratios=(1.2, 1), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.15, h_pad=0.12)
    hits = [run for run in runs if run.hit]
    for axes, shown in ((left, runs), (right, hits)):
        titles, medians, colors = zip(*[(run.title, run.median, run.color) for run in shown], strict=True)
        axes.barh(titles, medians, color=colors, height=0.6)
        axes.invert_yaxis()
        axes.tick_params(axis="y", length=0)
    for axes, title, label in (
        (left, f"{tokens}-token prompt, {sum(runs[-1].hit.values())} tokens restored", "seconds to the first token"),
        (right, "The restored runs, close up", "seconds (bars: medians, dots: repetitions)"),
    ):
        axes.set_title(title, loc="left", fontsize=10.5, color="#333333", pad=10)
        axes.set_xlabel(label, color="#555555")
    longest, furthest = max(run.median for run in runs), max(max(run.seconds) for run in hits)
    left.set_xlim(0, longest * 1.2)
    right.set_xlim(0, furthest * 1.55)
    for place, run in enumerate(runs):
        speed = f"   {fastest_cold(runs) / run.median:.1f} times faster" if run.hit else ""
        left.text(run.median + longest * 0.015, place, f"{run.median:.2f} s{speed}", va="center")
    for place, run in enumerate(hits):
        right.plot(run.seconds, [place] * len(run.seconds), "o", ms=5, mfc="white", mec="#222222", mew=0.9)
        right.text(furthest * 1.08, place, f"{run.ratio:.2f} x own cache", va="center")
    figure.suptitle(
        f"Prefill against restoring the KV cache: SmolLM2-135M-Instruct, fp32, {torch.get_num_threads()} CPU threads",
        fontsize=13, fontweight="bold", x=0.012, ha="left",
    )  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=2400, help="length of the prompt")
    parser.add_argument("--new", type=int, default=48, help="tokens to generate and compare")
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
        runs = measure_all(arguments, status.update)
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
