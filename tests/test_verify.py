"""Tree verification: the same probabilities as the paper's Algorithm 4."""

import itertools
import random

import pytest

from lookahead.core import TokenTree, verify
from lookahead.core.verify import verify as walk


def test_the_walk_descends_only_into_rows_with_logits():
    tree = TokenTree(0)
    tree.add(1, 0)  # a window row without logits
    assert verify(tree, lambda node: 1) == ([0], [1])
    tree.add_candidate([1])
    assert verify(tree, lambda node: 1) == ([0, 1], [1, 1])


def test_the_walk_ends_where_it_is_told():
    tree = TokenTree(0)
    tree.add_candidate([1, 1, 1, 1])
    left = [3]

    def finished(token):
        left[0] -= 1
        return left[0] == 0

    assert verify(tree, lambda node: 1, finished) == ([0, 1, 2], [1, 1, 1])


def probabilities_under(path):
    """A made-up distribution over three tokens that depends on the whole path."""
    weights = [1 + (sum(path) * 7 + t * 5 + len(path) * 3) % 6 for t in range(3)]
    return [w / sum(weights) for w in weights]


def exact_probabilities(length):
    probabilities = {}
    for tokens in itertools.product(range(3), repeat=length):
        p = 1.0
        for i, token in enumerate(tokens):
            p *= probabilities_under([0, *tokens[:i]])[token]
        probabilities[tokens] = p
    return probabilities


def chi_square(counts, probabilities, total):
    return sum((counts.get(k, 0) - total * p) ** 2 / (total * p) for k, p in probabilities.items())


def speculative_sample(tree, probabilities, rng):
    """The paper's Algorithm 4, a reference: try candidates one by one, keeping the target's distribution.

    At each node, a child c is accepted with probability p(c). If it is rejected, p(c) is set to zero and p is
    renormalised; if no child is left, the token is drawn from what remains. The probability of accepting a
    child telescopes to p(c) under the original distribution, so ``verify`` with a plain draw gives the same
    distribution. ``probabilities`` returns the distribution at a row, (V,).
    """
    path, tokens = [0], []
    while True:
        node = path[-1]
        p = list(probabilities(node))
        for child in range(node + 1, len(tree)):
            if tree.parents[child] != node or not tree.needs_logits[child]:
                continue
            token = tree.tokens[child]
            if rng.random() < p[token]:
                path.append(child)
                tokens.append(token)
                break
            p[token] = 0.0
            total = sum(p)
            p = [x / total for x in p]
        else:
            tokens.append(rng.choices(range(len(p)), weights=p)[0])
            return path, tokens


@pytest.mark.parametrize("algorithm", ["verify", "algorithm 4", "broken"])
def test_the_joint_probabilities_of_three_tokens(algorithm):
    """With 26 degrees of freedom, a correct sampler stays below 60 with probability 0.9998."""
    rng = random.Random(3)
    total, counts = 20_000, {}
    for _ in range(total):
        tokens = []
        while len(tokens) < 3:
            tree = TokenTree(0)
            prefix = [0, *tokens]
            for _ in range(3):
                tree.add_candidate([rng.randrange(3), rng.randrange(3)])

            def probabilities(node, tree=tree, prefix=prefix):
                return probabilities_under(prefix + tree.path_tokens(node)[1:])

            if algorithm == "algorithm 4":
                _, new = speculative_sample(tree, probabilities, rng)
            else:
                _, new = walk(
                    tree,
                    lambda node, probabilities=probabilities: rng.choices(
                        range(3), weights=probabilities(node)
                    )[0],
                )
            if algorithm == "broken":  # accept a wrong node: the first candidate's token, unverified
                new[0] = tree.tokens[1] if rng.random() < 0.1 else new[0]
            tokens += new
        key = tuple(tokens[:3])
        counts[key] = counts.get(key, 0) + 1
    statistic = chi_square(counts, exact_probabilities(3), total)
    assert (statistic > 60) if algorithm == "broken" else (statistic < 60)


def test_a_deterministic_candidate_is_accepted_with_its_own_probability():
    """P(accept c) telescopes to p(c), in whatever order the candidates are tried."""
    rng = random.Random(0)
    p = [0.5, 0.3, 0.2]
    accepted = {0: 0, 1: 0}
    for _ in range(20_000):
        tree = TokenTree(9)
        tree.add_candidate([1])
        tree.add_candidate([0])
        path, tokens = speculative_sample(tree, lambda node: p, rng)
        if len(path) > 1:
            accepted[tokens[0]] += 1
    assert accepted[1] / 20_000 == pytest.approx(0.3, abs=0.015)
    assert accepted[0] / 20_000 == pytest.approx(0.5, abs=0.015)
