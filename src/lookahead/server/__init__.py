"""An OpenAI-compatible server: HTTP in front of one engine that serves all requests.

The path of a request: ``gate`` (key, limits, log) -> ``app`` (routes; ``protocol`` validates the fields) ->
``prepare`` (a ``core.Request`` for each completion) -> ``engine_thread`` (one thread that drives the engine) ->
``core.loop`` -> ``responses`` (converts updates to API objects). ``service`` loads the model.

Install FastAPI, uvicorn, pydantic-settings and prometheus-client with ``pip install '.[serve]'``.
"""
