"""Defines recommenders, networks for tables, and graph networks."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

from ..case import Case


class Bag(nn.Module):
    """Combines the embeddings of each row's items. All rows have the same number of items."""

    def __init__(self, mode: str = "mean") -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(100, 16, mode=mode)
        self.out = nn.Linear(16, 2)

    def forward(self, items: torch.Tensor) -> torch.Tensor:
        return self.out(self.bag(items))


class BagWithOffsets(nn.Module):
    """Sums the embeddings of each row's items. ``offsets`` has the index of each row's first item."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(100, 16, mode="sum")
        self.out = nn.Linear(16, 2)

    def forward(self, items: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        return self.out(self.bag(items, offsets))


class WeightedBag(nn.Module):
    """Sums the weighted embeddings of each row's items."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(100, 16, mode="sum")

    def forward(self, items: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return self.bag(items, per_sample_weights=weights)


class Dlrm(nn.Module):
    """A DLRM that multiplies all pairs of seven vectors: six embeddings, and a vector computed from the dense
    features."""

    def __init__(self) -> None:
        super().__init__()
        self.bottom = nn.Sequential(nn.Linear(13, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU())
        self.tables = nn.ModuleList(nn.EmbeddingBag(50, 16, mode="sum") for _ in range(6))
        self.top = nn.Sequential(nn.Linear(16 + 21, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, dense: torch.Tensor, sparse: torch.Tensor) -> torch.Tensor:
        x = self.bottom(dense)
        parts = [table(sparse[:, i : i + 1]) for i, table in enumerate(self.tables)]
        z = torch.stack([x, *parts], 1)
        products = z @ z.transpose(1, 2)
        row, column = torch.tril_indices(7, 7, -1)
        return torch.sigmoid(self.top(torch.cat([x, products[:, row, column]], 1)))


class TwoTower(nn.Module):
    """Scores pairs of a user and an item by the cosine of their vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.user, self.item = nn.Embedding(100, 16), nn.Embedding(200, 16)
        self.towers = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8)) for _ in range(2))

    def forward(self, user: torch.Tensor, item: torch.Tensor) -> dict[str, torch.Tensor]:
        u = nn.functional.normalize(self.towers[0](self.user(user)), dim=-1)
        v = nn.functional.normalize(self.towers[1](self.item(item)), dim=-1)
        return {"user": u, "item": v, "score": (u * v).sum(-1)}


class AllPairs(nn.Module):
    """Scores each query with each document. Queries and documents are two batches of different size."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.document = nn.Linear(16, 8), nn.Linear(16, 8)

    def forward(self, queries: torch.Tensor, documents: torch.Tensor) -> torch.Tensor:
        return (self.query(queries) @ self.document(documents).T).softmax(-1)


class WideAndDeep(nn.Module):
    """Takes a dict of features, and adds the results of cross layers and of a deep net."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleDict({"country": nn.Embedding(30, 8), "device": nn.Embedding(5, 8)})
        self.cross = nn.ModuleList(nn.Linear(20, 20) for _ in range(2))
        self.deep = nn.Sequential(nn.Linear(20, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, features: dict[str, torch.Tensor]) -> torch.Tensor:
        x0 = x = torch.cat([features["numbers"], *(t(features[k]) for k, t in self.tables.items())], -1)
        for cross in self.cross:
            x = x0 * cross(x) + x
        return self.deep(x).squeeze(-1) + x.sum(-1)


class Factorization(nn.Module):
    """A DeepFM whose fields share one embedding table. Each field has an offset in the table."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("starts", torch.tensor([0, 10, 30]))
        self.linear, self.factors = nn.Embedding(60, 1), nn.Embedding(60, 8)
        self.deep = nn.Sequential(nn.Linear(24, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1))

    def forward(self, fields: torch.Tensor) -> torch.Tensor:
        rows = fields + self.starts
        e = self.factors(rows)
        second = 0.5 * (e.sum(1).pow(2) - e.pow(2).sum(1)).sum(1, keepdim=True)
        return (self.linear(rows).sum(1) + second + self.deep(e.flatten(1))).sigmoid()


class TabTransformer(nn.Module):
    """Attention over the columns of a table."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(40, 16)
        layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.norm, self.out = nn.LayerNorm(5), nn.Linear(16 * 4 + 5, 3)

    def forward(self, categories: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        x = self.encoder(self.table(categories)).flatten(1)
        return self.out(torch.cat([x, self.norm(numbers)], 1))


class Gated(nn.Module):
    """Blocks with gated linear units and feature masks, as in TabNet."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(10)
        self.blocks = nn.ModuleList(nn.Linear(10, 20) for _ in range(3))
        self.masks = nn.ModuleList(nn.Linear(10, 10) for _ in range(3))
        self.out = nn.Linear(10, 2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.norm(x)
        prior, total, seen = torch.ones_like(x), torch.zeros_like(x), []
        for block, mask in zip(self.blocks, self.masks, strict=True):
            m = (mask(x) * prior).softmax(-1)
            prior = prior * (1.3 - m)
            total = total + nn.functional.glu(block(x * m), -1).repeat(1, 1)
            seen.append(m)
        return self.out(total), torch.stack(seen, 1).mean(1)


class TreeEnsemble(nn.Module):
    """Soft decision trees."""

    def __init__(self) -> None:
        super().__init__()
        self.split, self.leaf = nn.Linear(8, 7), nn.Parameter(torch.randn(8, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        go = self.split(x).sigmoid()
        weight = x.new_ones(x.shape[0], 1)
        for depth in range(3):
            here = go[:, 2**depth - 1 : 2 ** (depth + 1) - 1]
            weight = torch.stack([weight * here, weight * (1 - here)], -1).flatten(1)
        return weight @ self.leaf


class Gcn(nn.Module):
    """A graph convolution that sums the messages along edges with index_add."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList((nn.Linear(8, 16), nn.Linear(16, 4)))

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        degree = torch.zeros(x.shape[0]).index_add(0, edges[1], torch.ones(edges.shape[1])) + 1
        for layer in self.layers:
            h = layer(x)
            x = (torch.zeros_like(h).index_add(0, edges[1], h[edges[0]]) + h) / degree[:, None]
            x = x.relu()
        return x


class Gat(nn.Module):
    """Graph attention with a softmax over neighbors, computed with scatter_reduce."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.score = nn.Linear(8, 16), nn.Linear(32, 1)

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        h = self.linear(x)
        e = nn.functional.leaky_relu(self.score(torch.cat([h[edges[0]], h[edges[1]]], -1))).squeeze(-1)
        top = torch.full((x.shape[0],), -1e9).scatter_reduce(0, edges[1], e, "amax")
        w = (e - top[edges[1]]).exp()
        total = torch.zeros(x.shape[0]).scatter_add(0, edges[1], w)
        return torch.zeros_like(h).index_add(0, edges[1], h[edges[0]] * (w / (total[edges[1]] + 1e-9))[:, None])


class Pooled(nn.Module):
    """Applies a GraphSAGE layer, and then sums the nodes of each graph in a batch of four graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.other, self.out = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 2)

    def forward(self, x: torch.Tensor, edges: torch.Tensor, graph: torch.Tensor) -> torch.Tensor:
        around = torch.zeros_like(x).scatter_reduce(0, edges[1][:, None].expand(-1, 8), x[edges[0]], "mean")
        h = (self.own(x) + self.other(around)).relu()
        pooled = torch.zeros(4, 16).index_add(0, graph, h)
        return self.out(pooled)


class Dense(nn.Module):
    """A graph net over an adjacency matrix, computed with einsum."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 8, 8) * 0.1)

    def forward(self, x: torch.Tensor, adjacency: torch.Tensor) -> torch.Tensor:
        for weight in self.weight:
            x = (torch.einsum("bij,bjd,de->bie", adjacency, x, weight) + x).tanh()
        return x.mean(1)


class Scores(NamedTuple):
    """The result of ``Tuple``."""

    logits: torch.Tensor
    best: torch.Tensor


class Tuple(nn.Module):
    """Returns a named tuple that has an integer tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 5)

    def forward(self, x: torch.Tensor) -> Scores:
        logits = self.linear(x)
        return Scores(logits, logits.argmax(-1))


def _ids(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, high, shape)


def _graph(nodes: int, edges: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(nodes, 8), torch.randint(0, nodes, (2, edges))


def _wide(batch: int, _: int) -> Any:
    return ({"numbers": torch.randn(batch, 4), "country": _ids(30, batch), "device": _ids(5, batch)},)


_NODES = {"x": {0: "nodes"}, "edges": {1: "edges"}}
MODELS = {
    "embedding-bag-mean": lambda: Case(Bag(), lambda b, _: (_ids(100, b, 7),)),
    "embedding-bag-max": lambda: Case(Bag("max"), lambda b, _: (_ids(100, b, 7),)),
    "embedding-bag-lengths": lambda: Case(
        Bag("sum"), lambda b, s: (_ids(100, b, s),), {"items": {0: "batch", 1: "items"}}, (6, 4, 9)
    ),
    "embedding-bag-offsets": lambda: Case(
        BagWithOffsets(),
        lambda b, _: (_ids(100, 5 * b), torch.arange(0, 5 * b, 5)),
        {"items": {0: "items"}, "offsets": {0: "batch"}},
    ),
    "embedding-bag-weights": lambda: Case(WeightedBag(), lambda b, _: (_ids(100, b, 7), torch.rand(b, 7))),
    "dlrm": lambda: Case(Dlrm(), lambda b, _: (torch.randn(b, 13), _ids(50, b, 6))),
    "two-tower": lambda: Case(TwoTower(), lambda b, _: (_ids(100, b), _ids(200, b))),
    "all-pairs": lambda: Case(
        AllPairs(),
        lambda b, s: (torch.randn(b, 16), torch.randn(s, 16)),
        {"queries": {0: "queries"}, "documents": {0: "documents"}},
        (6, 4, 9),
    ),
    "wide-and-deep": lambda: Case(WideAndDeep(), _wide),
    "deepfm": lambda: Case(Factorization(), lambda b, _: (_ids(10, b, 3),)),
    "tab-transformer": lambda: Case(TabTransformer(), lambda b, _: (_ids(40, b, 4), torch.randn(b, 5))),
    "gated-table": lambda: Case(Gated(), lambda b, _: (torch.randn(b, 10),)),
    "soft-trees": lambda: Case(TreeEnsemble(), lambda b, _: (torch.randn(b, 8),)),
    "gcn-index-add": lambda: Case(Gcn(), lambda _, s: _graph(s, 3 * s), _NODES, (8, 6, 13)),
    "gat-scatter": lambda: Case(Gat(), lambda _, s: _graph(s, 3 * s), _NODES, (8, 6, 13)),
    "sage-pooled": lambda: Case(
        Pooled(),
        lambda _, s: (*_graph(s, 3 * s), _ids(4, s)),
        {**_NODES, "graph": {0: "nodes"}},
        (8, 6, 13),
    ),
    "graph-dense": lambda: Case(
        Dense(),
        lambda b, s: (torch.randn(b, s, 8), torch.rand(b, s, s)),
        {"x": {0: "batch", 1: "nodes"}, "adjacency": {0: "batch", 1: "nodes", 2: "nodes"}},
        (6, 4, 9),
    ),
    "named-tuple": lambda: Case(Tuple(), lambda b, _: (torch.randn(b, 6),)),
}
