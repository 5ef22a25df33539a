"""The tables of docs/server.md, from the code: python docs/draw_server.py --write."""

import re
import sys
from pathlib import Path

from lookahead.option import offered
from lookahead.server.messages_api import MessagesRequest
from lookahead.server.metrics import Metrics
from lookahead.server.protocol import ChatRequest, CompletionRequest, Generating, LookaheadFields
from lookahead.server.response_api import ResponsesRequest
from lookahead.server.settings import Settings

PAGE = Path(__file__).with_name("server.md")


def fields(model, without=()):
    """Rows of a request's fields."""
    return [(f"`{name}`", f.description) for name, f in model.model_fields.items() if name not in without]


def tables():
    """Rows by the name of their table."""
    both = Generating.model_fields
    settings = [
        (f"`{name}`", "" if f.default in (None, False) else f"`{f.default}`", f.metadata["help"])
        for name, (_, f) in offered(Settings).items()
    ]
    families = sorted(Metrics().registry.collect(), key=lambda family: family.name)
    metrics = [
        (
            f"`{f.name.removeprefix('lookahead_')}{'_total' * (f.type == 'counter')}`",
            f"{f.documentation} ({f.type})",
        )
        for f in families
    ]
    return {
        "both": fields(Generating),
        "completions": fields(CompletionRequest, both),
        "chat": fields(ChatRequest, both),
        "responses": fields(ResponsesRequest),
        "messages": fields(MessagesRequest),
        "lookahead": fields(LookaheadFields),
        "settings": settings,
        "metrics": metrics,
    }


def page(text):
    """The page with its tables as the code has them."""
    for name, rows in tables().items():
        drawn = "\n".join(f"| {' | '.join(map(str, row))} |" for row in rows)
        marker = f"<!-- {name} -->"
        text = re.sub(
            rf"((?:\|[^\n]*\n)*?\|(?:---\|)+\n)(?:\|[^\n]*\n)*{marker}", rf"\g<1>{drawn}\n{marker}", text
        )
    return text


if __name__ == "__main__":
    drawn = page(PAGE.read_text())
    if "--write" in sys.argv:
        PAGE.write_text(drawn)
    else:
        print(drawn)
