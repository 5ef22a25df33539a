"""Many concurrent clients, some faulty: completions equal plain decoding, no status 500, stable memory.

This takes seconds; ``python tests/soak.py server`` takes ten minutes.
"""

import os
from pathlib import Path

import pytest

import lookahead
from crowd import Crowd
from serving import serving
from toy import save


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    return lookahead.load(save(tmp_path_factory.mktemp("toy"), max_position_embeddings=512), dtype="float32")


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
    """Schemathesis generates valid and invalid requests from the OpenAPI document."""
    import schemathesis
    from hypothesis import HealthCheck, Phase, given, settings
    from hypothesis import strategies as st
    from schemathesis.generation import GenerationMode

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
                assert reply.status_code < 500, (case.as_curl_command(), reply.text)
                if reply.status_code >= 400:
                    assert set(reply.json()["error"]) == {"message", "type", "param", "code"}

            check()
        assert statuses >= {200, 400}
