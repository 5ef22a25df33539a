"""An OpenAI-compatible server: HTTP in and out on one side, one decoding loop for all requests on the other.

A request's way: ``gate`` (key, limits, log) -> ``app`` (routes, errors) -> ``protocol`` (its fields, checked) ->
``service`` -> ``prepare`` (prompt, chooser, drafter: one ``Sequence`` for each text) -> ``loop`` (one thread, one
forward pass for all) -> ``responses`` (events made into the API's objects, whole or streamed).

FastAPI, uvicorn, pydantic-settings and prometheus-client come with ``pip install 'lookahead-decoding[serve]'``.
"""
