"""The sources of guesses, in the order in which they propose: one file for each, and its place in this list."""

from .base_table import BaseSource
from .jacobi import Jacobi
from .light_head import HeadSource
from .logit_cache import Logits
from .source import Source
from .suffix import Corpus, Suffix

#: Text sources come first, because their numbers are the indices of ``Tree.matches``.
SOURCES: tuple[type[Source], ...] = (Suffix, Corpus, Logits, BaseSource, Jacobi, HeadSource)
