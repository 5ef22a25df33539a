"""Model adapters: everything that knows how a particular kind of model evaluates a token tree."""
