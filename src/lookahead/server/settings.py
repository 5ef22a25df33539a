"""Settings of the server, from command-line options, LOOKAHEAD_* environment variables and a YAML file, in this order
of precedence."""

# ruff: noqa: RUF009
from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from math import inf
from pathlib import Path
from typing import Any, ClassVar, Self

from ..core import Drafter, SettingsError
from ..core.errors import nearest
from ..drafters import as_drafter
from ..option import COUNT, KEPT, YES_OR_NO, at_least, offered, option
from ..options import DrafterOptions, LoadOptions, MachineOptions, MemoryOptions, prefix_cache_option

#: The beginning of the names of environment variables.
PREFIX = "LOOKAHEAD_"


def _seconds(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < inf


POSITIVE_SECONDS = ("a number above 0", lambda given: _seconds(given) and given > 0)
SECONDS = ("a number of at least 0", _seconds)


#: What letters at the end of a number of bytes stand for.
UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
SIZE = re.compile(r"(\d{1,15})([KMGT]?)", re.IGNORECASE)


def bytes_of(given: str) -> int:
    """The number of bytes that a size such as 500M or 2G stands for; 0 if it is none."""
    found = SIZE.fullmatch(given)
    return int(found[1]) * UNITS[found[2].upper()] if found is not None else 0


def _trimmed(given: str) -> bool:
    return given.strip() == given != ""


def _host(given: str) -> bool:
    """Whether it is not empty, as an unset variable is (the server would listen on all addresses), and not a name
    such as a..b, which cannot be encoded."""
    try:
        return _trimmed(given) and bool(given.encode("idna"))
    except UnicodeError:
        return False


BYTES = ("a number of bytes, as in 500M or 2G", lambda given: bytes_of(given) > 0)
KEY = ("at least 1 character, without spaces at its ends; leave it out for none", _trimmed)
HOST = ("an address or a host name; 0.0.0.0 is all addresses", _host)


def _check_variables(known: set[str]) -> None:
    """Reject LOOKAHEAD_* variables that are probably misspelt. Others may be an orchestrator's, for a service's name.

    Raises:
        SettingsError: the name of a variable is similar to that of a setting.
    """
    given = [name.removeprefix(PREFIX).lower() for name in sorted(os.environ) if name.startswith(PREFIX)]
    for name in given:
        if name not in known and (meant := nearest(name, known)):
            raise SettingsError(
                f"unknown variable {PREFIX}{name.upper()}{meant}; unset it, or correct its name"
            )


@dataclass(frozen=True, kw_only=True)
class Settings(MachineOptions, DrafterOptions, MemoryOptions):
    """The settings of ``lookahead serve``. Each is an option, a YAML key and an environment variable."""

    GROUP: ClassVar[str] = "Options"

    model: str | None = option(
        None,
        "A directory, a .gguf file or a hub id; the default is SmolLM2-135M-Instruct.",
        metavar="MODEL",
        keyword=False,
        common=True,
    )
    host: str = option("127.0.0.1", "Address to listen on; 0.0.0.0 for all.", HOST, common=True)
    port: int = option(8000, "Port to listen on; 0 for a free one.", at_least(0, 65535), common=True)
    allowed_host: Sequence[str] | None = option(
        None,
        "A host name under which clients reach the server, or * for any; addresses and localhost always work. "
        "By default, a server on a loopback address answers to no other name, and others answer to all.",
        kind=list[str],
    )
    api_key: str | None = option(
        None, "API key required in every request; by default none.", KEY, secret=True, common=True
    )
    served_model_name: str | None = option(
        None,
        "The model's name in the API; the default is the last part of MODEL. Without this option, requests may also "
        "give MODEL in full.",
    )
    chat_template: Path | None = option(
        None, "A file with the chat template in Jinja; by default the model's own.", metavar="FILE"
    )
    max_model_len: int | None = option(
        None,
        "Maximum sequence length in tokens, prompt included; the default is the model's context, up to 4096.",
        at_least(2),
        common=True,
    )
    max_concurrent: int = option(
        64, "Maximum number of sequences decoded together.", at_least(1, 4096), common=True
    )
    max_queue: int = option(
        256, "Maximum queue length; further requests are rejected with status 429.", KEPT, common=True
    )
    max_rows: int = option(
        256,
        "Maximum rows of a step that a request may set by W,N,G. To limit the rows of adaptive, use a drafter such "
        "as adaptive:max_rows=8 (--drafter).",
        at_least(1, 4096),
    )
    row_budget: int | None = option(
        None,
        "Maximum rows of all trees in one pass; drafting scales back under load. In captured passes on a GPU, every "
        "tree counts as the largest of its pass. By default, as many as the cost curve of this model and machine "
        "allows within twice the time of a plain pass, and at least 64; with captured passes, at most as "
        "many as fit in one padded pass of equal trees.",
        COUNT,
    )
    prompt_rows: int = option(
        256,
        "Maximum prompt rows in one pass; longer prompts are evaluated in chunks, alternating with steps. While "
        "others decode, a pass has as many rows as take 0.25 s.",
        COUNT,
    )
    kv_memory: str | None = option(
        None,
        "Memory for the keys and values of all sequences, those of the prefix cache included, as in 500M or 2G; "
        "requests wait until there is room. The default is half of what is free when the model has been loaded.",
        BYTES,
        metavar="SIZE",
    )
    prefix_cache: int = prefix_cache_option(8, rule=at_least(0, 1024))
    max_body_bytes: int = option(4 << 20, "Maximum size of a request body, in bytes.", at_least(1024))
    max_choices: int = option(16, "Maximum completions per request (prompts times n).", COUNT)
    request_timeout: float = option(600.0, "Seconds until a request times out.", POSITIVE_SECONDS)
    shutdown_timeout: float = option(20.0, "Seconds for running requests to finish after SIGTERM.", SECONDS)
    cors_origins: Sequence[str] | None = option(
        None, "Origins that may call the server from a browser; none by default.", kind=list[str]
    )
    learn_when_idle: bool = option(
        False,
        "While there are no requests, let another process of lowest priority write text with the model, and learn "
        "from it as lookahead learn does. It is stopped while there are requests, and keeps its memory.",
        YES_OR_NO,
    )
    log_text: bool = option(False, "Also log prompts as token ids, and completions as text.", YES_OR_NO)

    @classmethod
    def read(cls, given: dict[str, Any] | None = None, config: Path | None = None) -> Self:
        """Read the settings from given options, the environment and a YAML file.

        Raises:
            SettingsError: an unknown key, an invalid value, or a missing file.
        """
        # Imported here, because the command's help must work without the extra [serve].
        from pydantic import Field, ValidationError, create_model
        from pydantic_settings import BaseSettings, SettingsConfigDict
        from pydantic_settings.sources import YamlConfigSettingsSource

        if config is not None and not config.is_file():
            raise SettingsError(f"--config must be a YAML file that exists, got {config}")

        # Options first, then the environment, then the file.
        class Sources(BaseSettings):
            model_config = SettingsConfigDict(env_prefix=PREFIX, extra="forbid")

            @classmethod
            def settings_customise_sources(
                cls,
                settings_cls: type[BaseSettings],
                init_settings: Any,
                env_settings: Any,
                dotenv_settings: Any,
                file_secret_settings: Any,
            ) -> tuple[Any, ...]:
                file = [YamlConfigSettingsSource(settings_cls, config)] if config is not None else []
                return init_settings, env_settings, *file

        # Declare the same fields to pydantic, and report its first error in this library's words.
        declared: dict[str, Any] = {
            name: (kind if field.default is not None else kind | None, Field(field.default))
            for name, (kind, field) in offered(cls).items()
        }
        try:
            values = create_model("Declared", __base__=Sources, **declared)(**given or {})
        except ValidationError as error:
            first = error.errors()[0]
            name = ".".join(map(str, first["loc"]))
            if first["type"] == "extra_forbidden":
                known = ", ".join(declared)
                raise SettingsError(
                    f"unknown setting {name!r}{nearest(name, declared)}; known are {known}"
                ) from None
            shown = "" if name == "api_key" else f" (got {first['input']!r:.60})"
            raise SettingsError(f"{name}: {first['msg']}{shown}") from None
        except Exception as error:  # PyYAML's errors, and a file that is not a mapping
            raise SettingsError(f"--config must be a YAML file of settings; {config}: {error}") from None
        _check_variables(set(declared) | {"config"})
        settings = cls(**values.model_dump(exclude_unset=True))
        settings.loading()
        return settings

    def drafting(self) -> Drafter:
        """The drafter of requests without their own."""
        names = [field.name for field in fields(DrafterOptions)]
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return as_drafter(given)

    def loading(self) -> LoadOptions:
        """How the model is loaded."""
        machine = {field.name: getattr(self, field.name) for field in fields(MachineOptions)}
        return LoadOptions(path_or_id=self.model, drafter=self.drafting(), **machine)
