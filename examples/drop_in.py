"""Add lookahead decoding to a program that already calls model.generate: one more argument, the same tokens.

python examples/drop_in.py [MODEL]
"""

import sys
from time import perf_counter

from transformers import AutoModelForCausalLM, AutoTokenizer

import lookahead

path = sys.argv[1] if len(sys.argv) > 1 else lookahead.BUNDLED
model = AutoModelForCausalLM.from_pretrained(path, dtype="float32")
tokenizer = AutoTokenizer.from_pretrained(path)
inputs = tokenizer("def add(a, b):\n", return_tensors="pt")
# warm up: the first call loads the kernels (on a new machine, it compiles them)
model.generate(**inputs, max_new_tokens=4, custom_generate=lookahead.generate)

start = perf_counter()
plain = model.generate(**inputs, max_new_tokens=128, do_sample=False)
middle = perf_counter()
ours = model.generate(**inputs, max_new_tokens=128, do_sample=False, custom_generate=lookahead.generate)
end = perf_counter()

print(tokenizer.decode(ours[0], skip_special_tokens=True))
print(
    f"\nequal: {ours.tolist() == plain.tolist()} · generate {middle - start:.2f} s · ours {end - middle:.2f} s"
)
