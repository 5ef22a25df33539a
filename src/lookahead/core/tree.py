"""One step is one token tree.

Every row that the target evaluates in a step is a node. Node 0, the root, is the last emitted token. The tree is a
trie: the children of a node have distinct tokens, because rows with the same path have the same logits, so a
duplicate would be wasted.

The tree alone determines
    the attention mask   a row sees its ancestors, itself and the whole committed prefix
    the positions        T + depth
    verification         walk from the root, descend while a child has the target's own token
    the commit           keep the rows of that path

(Section 3.3 of the paper constructs the same mask by hand for the window and the candidates.)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class TokenTree:
    """Tokens in insertion order; a parent always comes before its children.

    Attributes, all of length Q (``len(tree)``):
        tokens     the token id of each row
        parents    the parent's row, -1 for the root
        depths     distance from the root; the row's position is T + depth
        ancestors  bit j of entry i is set where row j is an ancestor of row i, or row i itself
        needs_logits  whether the row's logits are computed; verification descends only into such rows

    One value for the whole tree:
        needs_hidden  whether to keep the hidden states of the rows that need logits (``Scores.hidden``)
    """

    __slots__ = ("_children", "ancestors", "depths", "needs_hidden", "needs_logits", "parents", "tokens")

    def __init__(self, root: int) -> None:
        self.tokens: list[int] = [root]
        self.parents: list[int] = [-1]
        self.depths: list[int] = [0]
        self.ancestors: list[int] = [1]
        self.needs_logits: list[bool] = [True]
        self.needs_hidden = False
        self._children: dict[tuple[int, int], int] = {}

    @classmethod
    def of(cls, tokens: Sequence[int], parents: Sequence[int]) -> TokenTree:
        """A tree from lists of tokens and parents; the root has parent -1, and all rows need logits.

        Raises:
            ValueError: a parent does not come before its child, or two children of a node have the same token.
        """
        tree = cls(tokens[0])
        size = len(tokens)
        tree.tokens, tree.parents = list(tokens), list(parents)
        tree.needs_logits = [True] * size
        children, depths, ancestors = tree._children, tree.depths, tree.ancestors
        for node in range(1, min(size, len(parents))):
            parent = parents[node]
            if not 0 <= parent < node:
                break
            children[parent, tokens[node]] = node
            depths.append(depths[parent] + 1)
            ancestors.append(ancestors[parent] | 1 << node)
        if len(children) != size - 1 or len(parents) != size:
            raise ValueError(f"not a trie in row order: parents {list(parents)!r:.80}")
        return tree

    def __len__(self) -> int:
        return len(self.tokens)

    def __repr__(self) -> str:
        return f"TokenTree(rows={len(self)}, depth={max(self.depths)})"

    def add(self, token: int, parent: int, needs_logits: bool = False) -> int:
        """Add a child of ``parent`` with this token unless it exists. Returns its row."""
        key = (parent, token)
        node = self._children.get(key)
        if node is not None:
            if needs_logits:
                self.needs_logits[node] = True
            return node
        node = len(self.tokens)
        self._children[key] = node
        self.tokens.append(token)
        self.parents.append(parent)
        self.depths.append(self.depths[parent] + 1)
        self.ancestors.append(self.ancestors[parent] | (1 << node))
        self.needs_logits.append(needs_logits)
        return node

    def add_candidate(self, tokens: Iterable[int]) -> int:
        """Add a chain of tokens to verify below the root, reusing rows of a common prefix. Returns the last row."""
        row = 0
        for token in tokens:
            row = self.add(token, row, needs_logits=True)
        return row

    def child(self, node: int, token: int) -> int | None:
        """The child of ``node`` with this token, or None."""
        return self._children.get((node, token))

    def chain(self, tokens: Iterable[int]) -> list[int]:
        """The rows of a chain of tokens under the root, up to the first token that is not in the tree."""
        rows = list[int]()
        node = 0
        for token in tokens:
            child = self.child(node, token)
            if child is None:
                break
            rows.append(node := child)
        return rows

    def needs_logits_nodes(self) -> list[int]:
        """The rows whose logits are computed, in order; the root is always among them."""
        return [node for node, needed in enumerate(self.needs_logits) if needed]

    def verifiable(self) -> int:
        """The number of rows below the root that verification can reach: they and all their ancestors have logits."""
        if all(self.needs_logits):
            return len(self) - 1
        without = sum(1 << node for node, needed in enumerate(self.needs_logits) if not needed)
        return sum(not bits & without for bits in self.ancestors) - 1

    def path_tokens(self, node: int) -> list[int]:
        """Tokens from the root (included) down to ``node``."""
        tokens: list[int] = []
        while node >= 0:
            tokens.append(self.tokens[node])
            node = self.parents[node]
        return tokens[::-1]

    def subtree(self, nodes: Sequence[int]) -> TokenTree:
        """A tree with only the given rows; ``nodes`` must be parent-closed and in row order.

        Row i of the result is row ``nodes[i]`` of this tree.

        Raises:
            ValueError: the rows do not begin with the root, or a row comes before its parent or without it.
        """
        if not nodes or nodes[0] != 0:
            raise ValueError(f"a subtree must start with the root (row 0), got {list(nodes)[:4]}")
        result = TokenTree(self.tokens[0])
        result.needs_hidden = self.needs_hidden
        new_row = {0: 0}
        for node in nodes[1:]:
            parent = new_row.get(self.parents[node])
            if parent is None:
                raise ValueError(
                    f"rows must be parent-closed: row {node} is given but its parent {self.parents[node]} is not"
                )
            new_row[node] = result.add(self.tokens[node], parent, self.needs_logits[node])
        return result

    def mask(self) -> list[list[bool]]:
        """The Q x Q part of the attention mask: ``mask[i][j]`` is True if row i sees row j."""
        size = len(self)
        return [[bool(bits >> j & 1) for j in range(size)] for bits in self.ancestors]
