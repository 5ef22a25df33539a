"""Keep what the adaptive drafter learns across calls and processes.

    python examples/warm_state.py FILE [MODEL]

Run it twice: the second run starts with what the first one learned. The file contains statistics of the generated
text, so protect it as you would the text. To make the figures independent of the machine's speed, each step here has
up to eight rows at any cost; for the highest speed, use ``Adaptive(state=state)``.
"""

import sys

import lookahead

if len(sys.argv) < 2:
    sys.exit("usage: python examples/warm_state.py FILE [MODEL]")
file = sys.argv[1]
llm = lookahead.load(sys.argv[2] if len(sys.argv) > 2 else None)
state = llm.warm_state(file)  # empty if the file does not exist yet
drafter = lookahead.Adaptive(rows=8, state=state)
for name in ("is_prime", "is_square", "is_even"):
    result = llm.generate(f"def {name}(n):\n", max_new_tokens=64, drafter=drafter)
    print(f"{name}: {result.stats.compression_ratio:.2f} tokens per forward pass")
state.save(file)
