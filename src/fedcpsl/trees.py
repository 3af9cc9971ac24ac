"""States as trees of tensors: tuples, named or not, of tensors and of further tuples."""

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

Tree = Any  # which fields it has only the algorithm knows


def map_tensors(function: Any, tree: Tree, *others: Tree) -> Tree:
    """Apply `function` tensor by tensor to trees of one shape."""
    if isinstance(tree, Tensor):
        return function(tree, *others)
    mapped = [map_tensors(function, *fields) for fields in zip(tree, *others, strict=True)]
    return type(tree)(*mapped) if hasattr(tree, "_fields") else tuple(mapped)


def leaves(tree: Tree) -> list[Tensor]:
    """All tensors, in order."""
    if isinstance(tree, Tensor):
        return [tree]
    return [leaf for field in tree for leaf in leaves(field)]


def named_leaves(tree: Tree, prefix: str = "") -> dict[str, Tensor]:
    """All tensors by the names of their fields, such as `theta` or `models.0`."""
    if isinstance(tree, Tensor):
        return {prefix: tree}
    names = tree._fields if hasattr(tree, "_fields") else range(len(tree))
    dot = f"{prefix}." if prefix else ""
    return {
        k: leaf for n, field in zip(names, tree, strict=True) for k, leaf in named_leaves(field, f"{dot}{n}").items()
    }


def rebuilt(like: Tree, values: Iterable[Tensor]) -> Tree:
    """A tree of the same shape with other tensors, in order."""
    return _rebuilt(like, iter(values))


def _rebuilt(like: Tree, values: Iterator[Tensor]) -> Tree:
    if isinstance(like, Tensor):
        return next(values)
    fields = [_rebuilt(field, values) for field in like]
    return type(like)(*fields) if hasattr(like, "_fields") else tuple(fields)


def bytes_of(tree: Tree) -> int:
    return sum(leaf.numel() * leaf.element_size() for leaf in leaves(tree))
