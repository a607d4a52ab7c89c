"""The shortest use of lmkv with transformers: ask twice, the second time without the long prefill.

python examples/hf_generate.py [model folder]
"""

import sys
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

import lmkv_hf

ROOT = Path(__file__).resolve().parent
FOLDER = sys.argv[1] if len(sys.argv) > 1 else ROOT.parent / ".cache" / "smollm2-135m-instruct"

model = AutoModelForCausalLM.from_pretrained(FOLDER)
tokenizer = AutoTokenizer.from_pretrained(FOLDER)
manual = (ROOT / "station_manual.txt").read_text()

with lmkv_hf.CachedModel(model, tokenizer=tokenizer, cpu_budget="1GiB") as cached:
    for question in ("What are the three keepers called?", "What does the word narrow mean?"):
        prompt = f"{manual}\n\nQuestion: {question}\nAnswer:"
        output = cached.generate(prompt, max_new_tokens=32, do_sample=False)
        print(tokenizer.decode(output[0, -32:]))
        print(cached.last)
