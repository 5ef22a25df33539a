"""Settings of the server: command-line options, LOOKAHEAD_* environment variables, a YAML file; the first wins."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

from pydantic import Field, SecretStr, ValidationError
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict
from pydantic_settings.sources import YamlConfigSettingsSource

from ..core import Drafter, SettingsError
from ..drafters import Adaptive, as_drafter, known_names


class Settings(BaseSettings):
    """The settings of ``lookahead serve``; each is an option, a key of the YAML file and an environment variable."""

    model_config = SettingsConfigDict(env_prefix="LOOKAHEAD_", extra="forbid", validate_default=True)

    model: str | None = Field(
        None, description="A directory or a hub id; the default is SmolLM2-135M-Instruct."
    )
    host: str = Field("127.0.0.1", description="Address to listen on; 0.0.0.0 for all.")
    port: int = Field(8000, ge=0, le=65535, description="Port to listen on; 0 for a free one.")
    api_key: SecretStr | None = Field(
        None, description="API key that every request must have; by default none is required."
    )
    served_model_name: str | None = Field(
        None, description="The model's name in the API; the default is MODEL."
    )
    max_model_len: int | None = Field(
        None,
        ge=2,
        description="Tokens of the longest text, prompt included; the default is the model's context, up to 4096.",
    )
    max_concurrent: int = Field(
        64, ge=1, le=4096, description="Largest number of texts that are decoded together."
    )
    max_queue: int = Field(
        256, ge=0, description="Largest number of texts that wait; further requests get status 429."
    )
    dtype: str = Field("auto", description="auto (the checkpoint's), float32, bfloat16 or float16.")
    device: str | None = Field(None, description="cpu, cuda, ...; the default is a GPU if there is one.")
    threads: int | None = Field(None, ge=1, description="Threads of torch on the CPU.")
    engine: str | None = Field(
        None,
        description="llama.cpp evaluates a GGUF file, by the package llama-cpp-python; by default this library does.",
    )
    n_gpu_layers: int | None = Field(None, description="llama.cpp: layers on the GPU; by default all.")
    flash_attn: str | None = Field(None, description="llama.cpp: flash attention, auto, on or off.")
    cache_type_k: str | None = Field(None, description="llama.cpp: type of cached keys; the default is f16.")
    cache_type_v: str | None = Field(
        None, description="llama.cpp: type of cached values; the default is f16."
    )
    ctx_size: int | None = Field(
        None, description="llama.cpp: initial capacity for all texts together, in tokens."
    )
    drafter: str | None = Field(
        None,
        description=f"The drafter of requests that name none: {', '.join(known_names())}, or W,N,G (columns, "
        "n-gram size, candidates); "
        "settings may follow, as in 15,5,15:pool_from_prompt=false.",
    )
    pool_from_prompt: bool | None = Field(None, description="Whether prompts fill the pool of lookahead.")
    pool_from_output: bool | None = Field(None, description="Whether the text itself fills the pool.")
    max_pool_keys: int | None = Field(None, ge=1, description="Largest number of keys in the pool.")
    max_rows: int = Field(
        256,
        ge=1,
        le=4096,
        description="Largest number of rows of a step that a request may ask for by W,N,G.",
    )
    row_budget: int = Field(
        64, ge=1, description="Rows of all trees in one pass; with more texts, each drafts fewer rows."
    )
    prompt_rows: int = Field(
        256,
        ge=1,
        description="Rows of prompts in one pass; longer prompts are evaluated in chunks, in turn with steps.",
    )
    prefix_cache: int = Field(
        8,
        ge=0,
        le=1024,
        description="Number of finished texts whose keys and values are kept for prompts with the same beginning.",
    )
    max_body_bytes: int = Field(4 << 20, ge=1024, description="Bytes of the largest request body.")
    max_choices: int = Field(16, ge=1, description="Largest number of texts of a request: prompts times n.")
    request_timeout: float = Field(600.0, gt=0, description="Seconds until a request is ended.")
    shutdown_timeout: float = Field(
        20.0, ge=0, description="Seconds that running requests have to finish after SIGTERM."
    )
    cors_origins: list[str] = Field(
        [], description="Origins whose pages may call the server; none by default."
    )
    log_text: bool = Field(False, description="Also log prompts and texts.")

    @classmethod
    def read(cls, given: dict[str, Any] | None = None, config: Path | None = None) -> Self:
        """Read the settings from given options, the environment and a YAML file.

        Raises:
            SettingsError: an unknown key, a value that is not allowed, or no such file.
        """
        if config is not None and not config.is_file():
            raise SettingsError(f"--config must be a YAML file that exists, got {config}")

        class Sources(cls):  # type: ignore[valid-type,misc]
            @classmethod
            def settings_customise_sources(
                cls, settings_cls: type[BaseSettings], *, init_settings: Any, env_settings: Any, **rest: Any
            ) -> tuple[PydanticBaseSettingsSource, ...]:
                file = [YamlConfigSettingsSource(settings_cls, config)] if config is not None else []
                return init_settings, env_settings, *file

        try:
            settings = cls(**dict(Sources(**given or {})))
        except ValidationError as error:
            first = error.errors()[0]
            name = ".".join(map(str, first["loc"]))
            if first["type"] == "extra_forbidden":
                known = ", ".join(cls.model_fields)
                raise SettingsError(f"unknown setting {name!r}; known are {known}") from None
            shown = "" if name == "api_key" else f" (got {first['input']!r:.60})"
            raise SettingsError(f"{name}: {first['msg']}{shown}") from None
        except Exception as error:  # PyYAML's own, and a file that is no mapping
            raise SettingsError(f"--config must be a YAML file of settings; {config}: {error}") from None
        settings.drafting()
        return settings

    def drafting(self) -> Drafter:
        """The drafter of requests that name none."""
        names = ("drafter", "pool_from_prompt", "pool_from_output", "max_pool_keys")
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return as_drafter(given) if given else Adaptive()
