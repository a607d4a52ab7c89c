"""A real vLLM answers a long prompt: cold, from its own prefix cache, from lmkv, and from lmkv's disk tier after
everything was restarted.

vLLM's own prefix hit is the oracle and the least that any store can cost. All hits must give its tokens and, bit for
bit, its log-probabilities; the exit status is 1 when they do not, or when a hit that should happen did not.

    python examples/demo_vllm.py [--tokens 2560] [--new 16] [--repeats 3] [--picture .cache/demo-vllm.png]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / ".cache" / "smollm2-135m-instruct"
MANUAL = ROOT / "examples" / "station_manual.txt"
BLOCK = 128  # tokens of a vLLM block on a CPU; the demo's chunk, so that lmkv's hits are as long as vLLM's own
ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "WARNING"}


@dataclass
class Run:
    """One way to the answer. seconds: to the first token, one a repetition; cached: prompt tokens not computed."""

    title: str
    color: str
    cached: int = 0
    seconds: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    def answer(self, output: Any) -> None:
        """What the model said, and how sure it was."""
        given = output.outputs[0]
        self.tokens = list(given.token_ids)
        self.logprobs = [step[token].logprob for step, token in zip(given.logprobs, self.tokens, strict=True)]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


class Asker:
    """The engine, and one prompt to ask it."""

    def __init__(self, socket: str, count: int, new: int) -> None:
        from vllm import LLM

        transfer = {
            "kv_connector": "LMKVConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"socket": socket, "spawn": False, "chunk_tokens": BLOCK},
        }
        self.llm = LLM(
            str(MODEL), dtype="float32", max_model_len=4096, enforce_eager=True, disable_log_stats=True,
            kv_transfer_config=transfer,
        )  # fmt: skip
        tokenizer = self.llm.get_tokenizer()
        self.ids = tokenizer("Question: what does the manual say?\n\n" + MANUAL.read_text())["input_ids"][:count]
        self.other = tokenizer("Good morning. " * 90)["input_ids"]
        self.new = new
        self.ask(self.other, 2)

    def ask(self, ids: list[int], new: int) -> tuple[float, Any]:
        """Seconds, and vLLM's answer."""
        from vllm import SamplingParams

        sampling = SamplingParams(max_tokens=new, temperature=0, logprobs=0, ignore_eos=True)
        started = time.perf_counter()
        (answer,) = self.llm.generate([{"prompt_token_ids": ids}], sampling, use_tqdm=False)
        return time.perf_counter() - started, answer

    def note(self, run: Run, *, forget: bool) -> None:
        """One repetition; the time is that of a one-token answer, the first one is asked for all tokens too."""
        if not run.seconds:
            if forget:
                self.llm.reset_prefix_cache()
            _, answer = self.ask(self.ids, self.new)
            run.answer(answer)
        if forget:
            self.llm.reset_prefix_cache()
        seconds, answer = self.ask(self.ids, 1)
        run.seconds.append(seconds)
        run.cached = answer.num_cached_tokens


def child(arguments: argparse.Namespace) -> list[Run]:
    """Everything one engine measures: the first one what is cold and warm, the second one what the disk gives back."""
    asker = Asker(arguments.child, arguments.tokens, arguments.new)
    own = Run("vLLM's own prefix hit", "#6a9a78")
    if arguments.restarted:
        disk = Run("lmkv, disk, all restarted", "#2f6f9f")
        # Only the first load comes from disk: afterwards the chunks are in host memory.
        asker.llm.reset_prefix_cache()
        seconds, answer = asker.ask(asker.ids, 1)
        disk.seconds, disk.cached = [seconds], answer.num_cached_tokens
        _, answer = asker.ask(asker.ids, arguments.new)
        disk.answer(answer)
        return [disk]
    cold, warm = Run("vLLM, cold", "#b9b4ac"), Run("lmkv, host memory", "#d1603d")
    seconds, answer = asker.ask(asker.ids, 1)
    cold.seconds, cold.cached = [seconds], answer.num_cached_tokens
    for _ in range(arguments.repeats):
        asker.note(own, forget=False)
        asker.note(warm, forget=True)
    return [cold, own, warm]


def in_child(arguments: argparse.Namespace, socket: str, *more: str) -> list[Run]:
    command = [sys.executable, __file__, "--child", socket, "--tokens", str(arguments.tokens)]
    command += ["--new", str(arguments.new), "--repeats", str(arguments.repeats), *more]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **ENVIRONMENT}, check=False)
    if done.returncode:
        sys.exit(f"vLLM failed:\n{done.stdout[-4000:]}{done.stderr[-4000:]}")
    line = next(line for line in done.stdout.splitlines() if line.startswith("RUNS "))
    return [Run(**each) for each in json.loads(line[5:])]


def measure_all(arguments: argparse.Namespace, say: Any) -> list[Run]:
    """All runs, in the order of the table. The host service is started here, so that it can be restarted too."""
    with tempfile.TemporaryDirectory(prefix="lmkv-demo-", dir=MODEL.parent) as folder:
        socket = f"{folder}/socket"
        service = [sys.executable, "-m", "lmkv", "server", "--socket", socket]
        environment = {**os.environ, "LMKV_CPU_BUDGET": "1GiB", "LMKV_TIERS": f"disk://{folder}/chunks?budget=2GiB"}
        runs: list[Run] = []
        for what, more in (("vLLM with lmkv: cold, then hits", ()), ("all restarted", ("--restarted",))):
            say(what)
            server = subprocess.Popen(service, env=environment, stderr=subprocess.DEVNULL)
            try:
                runs += in_child(arguments, socket, *more)
            finally:
                server.terminate()  # what is queued for the disk is written first
                server.wait(60)
    return runs


def faults(runs: list[Run], tokens: int) -> list[str]:
    """What did not come out as it should."""
    cold, own, *hits = runs
    most = (tokens - 1) // BLOCK * BLOCK
    found = [f"{cold.title}: {cold.cached} tokens were not computed"] if cold.cached else []
    found += [f"{run.title}: {run.cached} tokens instead of {most}" for run in (own, *hits) if run.cached != most]
    found += [f"{run.title}: other tokens than vLLM's own hit" for run in hits if run.tokens != own.tokens]
    found += [f"{run.title}: other log-probabilities" for run in hits if run.logprobs != own.logprobs]
    return found


def table(runs: list[Run], tokens: int) -> Table:
    """The runs as rows; ``over own`` is what a hit costs beyond vLLM's own."""
    shown = Table(
        title=f"{tokens}-token prompt, SmolLM2-135M-Instruct, fp32, vLLM on a CPU", box=SIMPLE_HEAD, pad_edge=False
    )
    shown.add_column("", no_wrap=True)
    for name in ("not computed", "TTFT", "over own", "faster", "same"):
        shown.add_column(name, justify="right", no_wrap=True)
    cold, own = runs[:2]
    for run in runs:
        same = "-" if run is cold else "[green]yes[/]" if run.tokens == own.tokens else "[bold red]NO[/]"
        over = "-" if run in (cold, own) else f"{run.median - own.median:+.3f} s"
        speed = "-" if run is cold else f"{cold.median / run.median:.1f}x"
        shown.add_row(run.title, str(run.cached or "-"), f"{run.median:.3f} s", over, speed, same)
    return shown


def draw(runs: list[Run], tokens: int, path: Path) -> None:
    """One bar a run, with every repetition as a dot."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"font.size": 10} | {f"axes.spines.{side}": False for side in ("top", "right", "left")})
    figure, axes = plt.subplots(figsize=(9, 3.4), layout="constrained")
    axes.barh([run.title for run in runs], [run.median for run in runs], color=[run.color for run in runs], height=0.6)
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)
    longest = max(max(run.seconds) for run in runs)
    axes.set_xlim(0, longest * 1.25)
    for place, run in enumerate(runs):
        axes.plot(run.seconds, [place] * len(run.seconds), "o", ms=4, mfc="white", mec="#222222", mew=0.8)
        speed = "" if run is runs[0] else f"   {runs[0].median / run.median:.1f} times faster"
        axes.text(max(run.seconds) + longest * 0.02, place, f"{run.median:.2f} s{speed}", va="center")
    axes.set_xlabel("seconds to the first token", color="#555555")
    axes.set_title(f"vLLM, {tokens}-token prompt, {runs[-1].cached} tokens restored", loc="left", fontweight="bold")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=2500, help="length of the prompt")
    parser.add_argument("--new", type=int, default=16, help="tokens to generate and compare")
    parser.add_argument("--repeats", type=int, default=3, help="repetitions of what is fast")
    parser.add_argument("--picture", type=Path, default=ROOT / ".cache" / "demo-vllm.png")
    parser.add_argument("--child", metavar="SOCKET", help=argparse.SUPPRESS)
    parser.add_argument("--restarted", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print("RUNS " + json.dumps([asdict(run) for run in child(arguments)]))
        return 0
    console = Console()
    with console.status("") as status:
        runs = measure_all(arguments, status.update)
        draw(runs, arguments.tokens, arguments.picture)
    console.print(table(runs, arguments.tokens))
    console.print(f"picture: {arguments.picture}", highlight=False)
    found = faults(runs, arguments.tokens)
    for fault in found:
        console.print(f"[bold red]FAILED[/] {fault}", highlight=False)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
