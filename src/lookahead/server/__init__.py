"""An OpenAI-compatible server: HTTP on one side, one engine for all requests on the other.

The path of a request: ``gate`` (key, limits, log) -> ``app`` (routes, errors) -> ``protocol`` (fields, checked) ->
``service`` -> ``prepare`` (prompt, chooser, drafter: a ``Choice`` for each text) -> ``loop`` (one thread that drives
the engine) -> ``responses`` (updates turned into the API's objects, whole or streamed).

FastAPI, uvicorn, pydantic-settings and prometheus-client come with ``pip install '.[serve]'``.
"""
