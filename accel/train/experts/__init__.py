"""Mixtures of experts: a block (``block``), the experts' work on several ranks (``dispatch``), and the losses and
figures of the routers (``balance``).

The models of transformers follow the same convention as ``block``: a module with a router ``gate``, which returns
(logits, weights, indices), and ``experts`` with the stacked weights ``gate_up_proj`` and ``down_proj``.
"""
