"""Keep what the adaptive drafter learns, from call to call and from process to process.

    python examples/warm_state.py FILE [MODEL]

Run it twice: the second run begins with what the first one learnt. The file holds statistics of the texts, so keep
it where the texts may be kept. Each step here has up to eight rows whatever they cost, so that the figures show what
was learnt and not how fast the machine is; ``Adaptive(state=state)`` alone gives the fastest text.
"""

import sys

import lookahead

if len(sys.argv) < 2:
    sys.exit("usage: python examples/warm_state.py FILE [MODEL]")
file = sys.argv[1]
llm = lookahead.load(sys.argv[2] if len(sys.argv) > 2 else None)
state = llm.warm_state(file)  # empty where the file is not there yet
drafter = lookahead.Adaptive(rows=8, state=state)
for name in ("is_prime", "is_square", "is_even"):
    result = llm.generate(f"def {name}(n):\n", max_new_tokens=64, drafter=drafter)
    print(f"{name}: {result.stats.compression_ratio:.2f} tokens per forward pass")
state.save(file)
