"""Ask vLLM servers the same long question, one after the other, and show the time to the first token and where the
prompt's KV came from.

    python examples/vllm_client.py http://127.0.0.1:8101 http://127.0.0.1:8102
"""

from __future__ import annotations

import json
import re
import sys
import time
import urllib.request
from pathlib import Path

SOURCES = re.compile(r'^vllm:prompt_tokens_cached_by_source(?:_total)?{.*source="(\w+)".*} ([\d.]+)', re.MULTILINE)


def sources(server: str) -> dict[str, float]:
    """Prompt tokens that were not computed, by where they came from, since the server started."""
    with urllib.request.urlopen(f"{server}/metrics") as answer:
        return {name: float(count) for name, count in SOURCES.findall(answer.read().decode()) if float(count)}


def first_token(server: str, prompt: str) -> tuple[float, str]:
    """Seconds to the first token of the answer, and the answer."""
    body = json.dumps({"model": "model", "prompt": prompt, "max_tokens": 16, "temperature": 0, "stream": True})
    request = urllib.request.Request(f"{server}/v1/completions", body.encode(), {"Content-Type": "application/json"})
    started, seconds, text = time.perf_counter(), 0.0, ""
    with urllib.request.urlopen(request) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                seconds = seconds or time.perf_counter() - started
                text += json.loads(line[6:])["choices"][0]["text"]
    return seconds, text


def main(servers: list[str]) -> None:
    """One line a server."""
    prompt = (Path(__file__).parent / "station_manual.txt").read_text()
    for server in servers:
        seconds, text = first_token(server, prompt)
        print(f"{server}  first token after {seconds:.2f} s  cached: {sources(server) or 'nothing'}  {text!r}")


if __name__ == "__main__":
    main(sys.argv[1:])
