"""A proposer whose chains are wrong from their first token on."""

from lookahead.integrations.vllm import Proposer


class Wrong(Proposer):
    def propose(self, *arguments, **more):
        chains = super().propose(*arguments, **more)
        return [[chain[0] ^ 1, *chain[1:]] if chain else [] for chain in chains]
