"""Tries onnxscript's rewrite rules only at the nodes at which they can apply.

onnxscript tries each of its rules at each node of a graph. Most rules don't fit the node's operator, but a rule with
several outputs lists the whole graph first. For BERT-base, these tries take most of the time of onnxscript's optimizer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from .replaced import Replaced


@contextlib.contextmanager
def rules_by_operator() -> Iterator[None]:
    """Makes onnxscript compare a node's operator with a rule before anything else, within the ``with`` block. The rules
    change the same nodes as before."""
    from onnxscript.rewriter._matcher import SimplePatternMatcher

    with _replaced.within(SimplePatternMatcher, "match"):
        yield


def _match(matcher: Any, model: Any, graph: Any, node: Any, **options: Any) -> Any:
    """Returns onnxscript's match of a rule at ``node``, or None if the rule is for other operators.

    A match begins at the first node that the rule's outputs come from, so this node has to have the rule's operator.
    ``op_identifier`` is None if a rule takes several operators.
    """
    outputs = matcher.pattern.output_nodes
    wanted = outputs[0].op_identifier() if outputs else None
    if wanted is not None and wanted[:2] != (node.domain, node.op_type):
        return None
    return _replaced.own(matcher, model, graph, node, **options)


_replaced = Replaced(_match)
