"""An OpenAI-compatible server: HTTP on one side, one engine for all requests on the other.

The path of a request: ``gate`` (key, limits, log) -> ``app`` (routes; ``protocol`` has checked the fields) ->
``prepare`` (a ``core.Request`` for each completion) -> ``engine_thread`` (one thread that drives the engine) ->
``core.loop`` -> ``responses`` (updates turned into the API's objects). ``service`` loads the model.

FastAPI, uvicorn, pydantic-settings and prometheus-client come with ``pip install '.[serve]'``.
"""
