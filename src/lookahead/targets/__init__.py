"""Model adapters: how each kind of model evaluates a token tree."""
