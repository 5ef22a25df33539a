"""`python -m lookahead` is the command line."""

from lookahead.cli import main

main()
