"""`python -m lookahead` is the command line."""

from .cli import main

main()
