"""A conversation, streamed. Type a message and press Enter; an empty line ends it.

python examples/chat.py [MODEL]
"""

import sys

import lookahead

llm = lookahead.load(sys.argv[1] if len(sys.argv) > 1 else None)
has_template = getattr(llm.tokenizer, "chat_template", None) is not None
messages: list[dict[str, str]] = []
print("> ", end="", flush=True)
for line in sys.stdin:
    if not line.strip():
        break
    messages.append({"role": "user", "content": line.strip()})
    # A model without a chat template continues plain text.
    prompt = messages if has_template else "\n".join(message["content"] for message in messages) + "\n"
    answer = ""
    for piece in llm.stream(prompt, max_new_tokens=128):
        print(piece, end="", flush=True)
        answer += piece
    messages.append({"role": "assistant", "content": answer})
    print("\n> ", end="", flush=True)
print()
