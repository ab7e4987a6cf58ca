"""Tries onnxscript's rewrite rules only at the nodes at which they can apply.

onnxscript tries each of its rules at each node of a graph. Most rules don't fit the node's operator, but a rule with
several outputs lists the whole graph first. For BERT-base, these tries take most of the time of onnxscript's optimizer.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

# The number of exports that run now, and the method of onnxscript.
_running = 0
_replacing = threading.Lock()
_onnxscripts: Any = None


@contextlib.contextmanager
def rules_by_operator() -> Iterator[None]:
    """Makes onnxscript compare a node's operator with a rule before anything else, within the ``with`` block. The rules
    change the same nodes as before. Several threads may export at the same time: the last one restores onnxscript's own
    method."""
    global _running, _onnxscripts
    from onnxscript.rewriter._matcher import SimplePatternMatcher

    with _replacing:
        if not _running:
            _onnxscripts = SimplePatternMatcher.match
            SimplePatternMatcher.match = _match  # type: ignore[method-assign,assignment]
        _running += 1
    try:
        yield
    finally:
        with _replacing:
            _running -= 1
            if not _running:
                SimplePatternMatcher.match = _onnxscripts  # type: ignore[method-assign]


def _match(matcher: Any, model: Any, graph: Any, node: Any, **options: Any) -> Any:
    """Returns onnxscript's match of a rule at ``node``, or None if the rule is for other operators.

    A match begins at the first node that the rule's outputs come from, so this node has to have the rule's operator.
    ``op_identifier`` is None if a rule takes several operators.
    """
    outputs = matcher.pattern.output_nodes
    wanted = outputs[0].op_identifier() if outputs else None
    if wanted is not None and wanted[:2] != (node.domain, node.op_type):
        return None
    return _onnxscripts(matcher, model, graph, node, **options)
