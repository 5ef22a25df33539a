"""Many concurrent clients, some faulty: completions equal plain decoding, no status 500, stable memory.

This takes seconds; ``python tests/soak.py server`` takes ten minutes.
"""

import os
from pathlib import Path

import httpx
import pytest

import lookahead
from crowd import Crowd
from lookahead.server.messages_api import CountRequest, MessagesRequest
from lookahead.server.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from lookahead.server.response_api import ResponsesRequest
from serving import serving
from toy import save


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    return lookahead.load(
        save(tmp_path_factory.mktemp("toy"), chat=True, max_position_embeddings=512), dtype="float32"
    )


def memory():
    """Resident memory of this process in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def stress(llm, seconds, clients):
    with serving(llm, max_concurrent=16, max_queue=24, max_body_bytes=100_000) as served:
        Crowd(served.url, 1).run(clients)
        before = memory()
        crowd = Crowd(served.url, seconds).run(clients)
        served.wait(lambda: served.server.loop.load_state == (0, 0))
        after = memory()
    assert crowd.wrong == []
    assert set(crowd.statuses) <= {200, 400, 413, 429}, crowd.statuses
    assert min(crowd.statuses.get(status, 0) for status in (200, 400, 413)) > 0
    assert crowd.cancelled > 0
    assert after < before * 1.1 + (64 << 20)
    assert crowd.differences(llm) == []
    return crowd


def test_random_requests_leave_the_server_consistent(llm):
    crowd = stress(llm, 4, 64)
    assert len(crowd.texts) > 5


def test_no_request_of_the_served_schema_ends_in_500(llm):
    """Schemathesis generates valid and invalid requests from the OpenAPI document, and compares responses with it."""
    import schemathesis
    from hypothesis import HealthCheck, Phase, given, settings
    from hypothesis import strategies as st
    from schemathesis.checks import not_a_server_error
    from schemathesis.generation import GenerationMode
    from schemathesis.specs.openapi import checks

    conforms = [
        not_a_server_error,
        checks.status_code_conformance,
        checks.content_type_conformance,
        checks.response_schema_conformance,
    ]
    with serving(llm, max_model_len=64, max_choices=4, max_concurrent=32) as served:
        schema = schemathesis.openapi.from_url(f"{served.url}/openapi.json", wait_for_schema=10)
        schema.config.generation.update(modes=list(GenerationMode))
        statuses = set()
        for operation in schema.get_all_operations():
            cases = st.one_of(*(operation.ok().as_strategy(generation_mode=mode) for mode in GenerationMode))

            @settings(
                max_examples=12,
                deadline=None,
                database=None,
                derandomize=True,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            )
            @given(case=cases)
            def check(case):
                reply = case.call(timeout=60)
                statuses.add(reply.status_code)
                case.validate_response(reply, checks=conforms)

            check()
        assert statuses >= {200, 400}


def values():
    """JSON texts of values that are nested deeply or large, and of the limits of numbers."""
    for levels in (70, 400, 3000):
        yield "[" * levels + "]" * levels
        yield '{"a":' * levels + "1" + "}" * levels
    yield from ("1" * 5000, "-1", "1e400", "-1e-400", "9" * 25, "true", '""', "[[]]", "[{}]", "[null]", "{}")
    yield '"' + "x" * 100_000 + '"'
    yield '"\\ud800"'
    yield "[" + "0," * 20_000 + "0]"
    yield "{" + ",".join(f'"{number}":0' for number in range(20_000)) + "}"


USER = '"messages": [{"role": "user", "content": "x"}]'
#: path -> (body, the fields that it needs).
BODIES = {
    "/v1/completions": (CompletionRequest, '"prompt": "x", "max_tokens": 1'),
    "/v1/chat/completions": (ChatRequest, f'{USER}, "max_tokens": 1'),
    "/v1/responses": (ResponsesRequest, '"input": "x", "max_output_tokens": 1'),
    "/v1/messages": (MessagesRequest, f'{USER}, "max_tokens": 1'),
    "/v1/messages/count_tokens": (CountRequest, USER),
    "/tokenize": (TokenizeRequest, '"prompt": "x"'),
    "/detokenize": (DetokenizeRequest, '"tokens": [5]'),
}
#: field -> forms around a value.
FORMS = {
    "tools": (
        '[{{"type": "function", "function": {{"name": "f", "parameters": {}}}}}]',
        '[{{"name": "f", "input_schema": {}}}]',
    ),
    "response_format": ('{{"type": "json_schema", "json_schema": {{"name": "f", "schema": {}}}}}',),
    "structured_outputs": ('{{"json": {}}}', '{{"choice": {}}}', '{{"regex": {}}}', '{{"grammar": {}}}'),
    "messages": (
        '[{{"role": "assistant", "content": {}}}]',
        '[{{"role": "user", "content": [{{"type": "tool_result", "tool_use_id": "1", "content": {}}}]}}]',
        '[{{"role": "assistant", "content": [{{"type": "tool_use", "name": "f", "input": {}}}]}}]',
        '[{{"role": "assistant", "tool_calls": [{{"type": "function", "function": '
        '{{"name": "f", "arguments": {}}}}}]}}]',
    ),
    "lookahead": ('{{"drafter": {}}}',),
    "prediction": ('{{"type": "content", "content": {}}}',),
    "text": ('{{"format": {{"type": "json_schema", "schema": {}}}}}',),
    "input": ('[{{"type": "function_call_output", "output": {}}}]',),
}


def bodies(path):
    """(field, body): every field gets every value in a valid body; the last of two equal keys counts."""
    kind, base = BODIES[path]
    for name, field in kind.model_fields.items():
        for value in values():
            for form in ("{}", *FORMS.get(name, ())):
                yield name, f'{{{base}, "{field.alias or name}": {form.format(value)}}}'


@pytest.mark.parametrize("path", BODIES)
def test_no_deep_or_large_value_of_a_field_ends_in_500(llm, path):
    wrong = []
    with serving(llm, max_model_len=64, max_choices=4) as served, httpx.Client(timeout=60) as http:
        for name, body in bodies(path):
            headers = {"Content-Type": "application/json"}
            reply = http.post(f"{served.url}{path}", content=body, headers=headers)
            if reply.status_code >= 500:
                wrong.append((name, body[:200], reply.status_code))
    assert not wrong
