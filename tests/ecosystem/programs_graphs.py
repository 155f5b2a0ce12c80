"""Graph networks with torch-geometric."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.data import Batch, Data, HeteroData
from torch_geometric.nn import (
    GAE,
    GATConv,
    GATv2Conv,
    GCNConv,
    GINConv,
    GraphNorm,
    HeteroConv,
    JumpingKnowledge,
    MessagePassing,
    SAGEConv,
    SchNet,
    TransformerConv,
    global_add_pool,
    global_mean_pool,
)
from torch_geometric.utils import scatter, to_dense_adj

import onelaunch as ol

from .harness import Run, inference, training

NODES, EDGES = 24, 80


def citations(run: Run, seed: int = 0) -> Data:
    """One graph with features, classes and a mask of those to train on."""
    data = Data(x=run.rand(seed, NODES, 8), edge_index=run.ints(seed, NODES, 2, EDGES))
    data.y = run.ints(seed, 3, NODES)
    data.train_mask = run.rand(seed, NODES) > 0
    return data


def molecules(run: Run, seed: int, count: int = 4) -> Any:
    """Small graphs of one size in a batch."""
    graphs = [
        Data(
            x=run.rand(count * seed + k, 6, 8),
            edge_index=run.ints(count * seed + k, 6, 2, 14),
            y=run.ints(seed + k, 2, 1),
        )
        for k in range(count)
    ]
    return Batch.from_data_list(graphs)


class Net(nn.Module):
    """Two layers of any kind."""

    def __init__(self, first: nn.Module, second: nn.Module, dropout: float = 0.5) -> None:
        super().__init__()
        self.first, self.second, self.dropout = first, second, dropout

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = F.relu(self.first(x, edge_index))
        x = F.dropout(x, p=self.dropout, training=self.training)
        return self.second(x, edge_index)


def classify_nodes(run: Run, model: Any, **options: Any) -> None:
    """Full-batch training, then a test pass."""
    model = model.to(run.device)
    fast = run.graph(model, **options)
    data = citations(run)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=5e-4)
    model.train()
    for _ in range(8):
        optimizer.zero_grad()
        out = fast(data.x, data.edge_index)
        loss = F.cross_entropy(out[data.train_mask], data.y[data.train_mask])
        loss.backward()
        optimizer.step()
        run.see(loss)
    model.eval()
    with torch.no_grad():
        for _ in range(5):
            run.see(fast(data.x, data.edge_index).argmax(-1))
    run.see(model)


@training(refused={"cpu": "OL102", "cuda": "OL102"})
def gcn_with_self_loops(run: Run) -> None:
    """`add_remaining_self_loops` asks the edges which nodes have a loop already."""
    classify_nodes(run, Net(GCNConv(8, 16), GCNConv(16, 3)))


@training()
def gcn_without_self_loops(run: Run) -> None:
    loops = {"add_self_loops": False}
    classify_nodes(run, Net(GCNConv(8, 16, **loops), GCNConv(16, 3, **loops)))


@training()
def graph_sage(run: Run) -> None:
    classify_nodes(run, Net(SAGEConv(8, 16), SAGEConv(16, 3, aggr="max")))


@training()
def graph_attention(run: Run) -> None:
    first = GATConv(8, 8, heads=2, dropout=0.6, add_self_loops=False)
    classify_nodes(run, Net(first, GATConv(16, 3, heads=1, concat=False, add_self_loops=False)))


@training()
def graph_attention_v2_and_transformer(run: Run) -> None:
    first = GATv2Conv(8, 8, heads=2, add_self_loops=False)
    classify_nodes(run, Net(first, TransformerConv(16, 3)))


@training()
def a_model_that_takes_a_data_object(run: Run) -> None:
    """The same object at each call."""

    class OfData(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net(SAGEConv(8, 16), SAGEConv(16, 3))

        def forward(self, data: Data) -> Tensor:
            return F.log_softmax(self.net(data.x, data.edge_index), dim=1)

    model = OfData().to(run.device)
    fast = run.graph(model)
    data = citations(run)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(8):
        optimizer.zero_grad()
        loss = F.nll_loss(fast(data)[data.train_mask], data.y[data.train_mask])
        loss.backward()
        optimizer.step()
        run.see(loss)
    run.see(model)


class Gin(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList()
        self.norms = nn.ModuleList()
        for width in (8, 16):
            layers = nn.Sequential(nn.Linear(width, 16), nn.ReLU(), nn.Linear(16, 16))
            self.convs.append(GINConv(layers, train_eps=True))
            self.norms.append(nn.BatchNorm1d(16))
        self.head = nn.Linear(16, 2)

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor, size: int) -> Tensor:
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = F.relu(norm(conv(x, edge_index)))
        return self.head(global_add_pool(x, batch, size))


@training()
def gin_classifies_graphs(run: Run) -> None:
    model = Gin().to(run.device)
    fast = run.graph(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for i in range(9):
        data = molecules(run, i)
        optimizer.zero_grad()
        out = fast(data.x, data.edge_index, data.batch, data.num_graphs)
        loss = F.cross_entropy(out, data.y)
        loss.backward()
        optimizer.step()
        run.see(loss)
    run.see(model)


@training()
def a_batch_object_at_each_call(run: Run) -> None:
    """A new `Batch` each time: its tensors are the arguments."""

    class OfBatch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gin = Gin()

        def forward(self, data: Any) -> Tensor:
            return self.gin(data.x, data.edge_index, data.batch, 4)

    model = OfBatch().to(run.device)
    fast = run.graph(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for i in range(18):
        data = molecules(run, i)
        optimizer.zero_grad()
        loss = F.cross_entropy(fast(data), data.y)
        loss.backward()
        optimizer.step()
        run.see(loss)
    run.see(model)


@inference()
def a_registered_data_object_at_each_call(run: Run) -> None:
    """It is taken apart from the first call on, with its store, which refers to it."""
    ol.register(Data)
    conv = SAGEConv(8, 16).to(run.device)
    fast = run.graph(lambda data: conv(data.x, data.edge_index))
    with torch.no_grad():
        for i in range(6):
            run.see(fast(Data(x=run.rand(i, NODES, 8), edge_index=run.ints(i, NODES, 2, EDGES))))


@inference(refused={"cpu": "OL302", "cuda": "OL302"}, warns=("OL302",))
def a_batch_object_that_each_layer_changes(run: Run) -> None:
    """As GraphGym's layers do, which take a batch and return it: it stays the caller's own."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = SAGEConv(8, 8)

        def forward(self, batch: Any) -> Any:
            batch.x = self.conv(batch.x, batch.edge_index).relu()
            return batch

    fast = run.graph(nn.Sequential(Layer(), Layer()).to(run.device))
    with torch.no_grad():
        for i in range(14):
            data = molecules(run, i)
            run.see(fast(data) is data)
            run.see(data.x)


@training(refused={"cpu": "OL101", "cuda": "OL101"})
def pooling_without_a_size_is_refused(run: Run) -> None:
    """How many graphs a batch holds is asked of the device."""
    conv, head = SAGEConv(8, 16).to(run.device), nn.Linear(16, 2).to(run.device)

    @run.graph
    def forward(x: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
        return head(global_mean_pool(conv(x, edge_index), batch))

    for i in range(6):
        data = molecules(run, i)
        run.see(forward(data.x, data.edge_index, data.batch))


@training()
def link_prediction_as_a_whole_step(run: Run) -> None:
    model = Net(SAGEConv(8, 16), SAGEConv(16, 8), dropout=0.2).to(run.device)
    optimizer = ol.capturable(torch.optim.Adam(model.parameters(), lr=1e-2))

    @run.graph
    def step(x: Tensor, edge_index: Tensor, negative: Tensor) -> Tensor:
        optimizer.zero_grad()
        z = model(x, edge_index)
        near = (z[edge_index[0]] * z[edge_index[1]]).sum(-1)
        far = (z[negative[0]] * z[negative[1]]).sum(-1)
        loss = -F.logsigmoid(near).mean() - F.logsigmoid(-far).mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    data = citations(run)
    for i in range(9):
        run.see(step(data.x, data.edge_index, run.ints(i + 40, NODES, 2, EDGES)))
    run.see(model)


@training()
def message_passing_of_ones_own(run: Run) -> None:
    class EdgeConv(MessagePassing):
        def __init__(self, inputs: int, outputs: int) -> None:
            super().__init__(aggr="max")
            self.mlp = nn.Sequential(nn.Linear(2 * inputs, outputs), nn.ReLU())

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return self.propagate(edge_index, x=x)

        def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
            return self.mlp(torch.cat([x_i, x_j - x_i], dim=-1))

    classify_nodes(run, Net(EdgeConv(8, 16), EdgeConv(16, 3)))


@training()
def jumping_knowledge_and_graph_norm(run: Run) -> None:
    class Jumping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = SAGEConv(8, 16), SAGEConv(16, 16)
            self.norm, self.jump = GraphNorm(16), JumpingKnowledge("cat")
            self.head = nn.Linear(32, 3)

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            a = F.relu(self.norm(self.first(x, edge_index)))
            return self.head(self.jump([a, F.relu(self.second(a, edge_index))]))

    classify_nodes(run, Jumping())


@training()
def a_heterogeneous_step(run: Run) -> None:
    """Relations between users and items, in dicts."""
    user, item = SAGEConv((8, 8), 8), SAGEConv((8, 8), 8)
    model = nn.ModuleDict({"user": user, "item": item, "head": nn.Linear(8, 1)}).to(run.device)

    @run.graph
    def scores(x: dict[str, Tensor], edges: dict[tuple[str, str], Tensor]) -> Tensor:
        items = model["item"]((x["user"], x["item"]), edges["user", "item"])
        users = model["user"]((x["item"], x["user"]), edges["item", "user"])
        return model["head"](torch.cat([users, items]).relu()).squeeze(-1)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i in range(8):
        x = {"user": run.rand(i, 10, 8), "item": run.rand(i + 1, 6, 8)}
        users, items = run.ints(i, 10, 30), run.ints(i, 6, 30)
        there, back = torch.stack([users, items]), torch.stack([items, users])
        optimizer.zero_grad()
        loss = scores(x, {("user", "item"): there, ("item", "user"): back}).square().mean()
        loss.backward()
        optimizer.step()
        run.see(loss)
    run.see(model)


@training()
def relations_of_three_names(run: Run) -> None:
    """`HeteroConv`, called with the dicts of a `HeteroData`."""
    relations = [("user", "rates", "item"), ("item", "rated", "user"), ("user", "knows", "user")]
    convs = {relation: SAGEConv((8, 8), 8) for relation in relations}
    model = HeteroConv(convs, aggr="sum").to(run.device)
    fast = run.graph(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i in range(8):
        sizes = {"user": 10, "item": 6}
        x = {kind: run.rand(i, size, 8) for kind, size in sizes.items()}
        edges = {
            (a, name, b): torch.stack([run.ints(i, sizes[a], 30), run.ints(i + 1, sizes[b], 30)])
            for a, name, b in relations
        }
        optimizer.zero_grad()
        out = fast(x, edges)
        loss = torch.cat([out["user"], out["item"]]).square().mean()
        loss.backward()
        optimizer.step()
        run.see(loss)
    run.see(model)


@training()
def a_graph_autoencoder(run: Run) -> None:
    model = GAE(Net(SAGEConv(8, 16), SAGEConv(16, 8), dropout=0.0)).to(run.device)
    encode = run.graph(model.encoder)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    data = citations(run)
    for i in range(8):
        optimizer.zero_grad()
        z = encode(data.x, data.edge_index)
        loss = model.recon_loss(z, data.edge_index, run.ints(i, NODES, 2, EDGES))
        loss.backward()
        optimizer.step()
        run.see(loss)
    run.see(model)


@inference(recordings=12)
def neighbourhoods_of_changing_sizes(run: Run) -> None:
    """Three sizes of mini-batches come again and again."""
    fast = run.graph(Net(SAGEConv(8, 16), SAGEConv(16, 3)).to(run.device).eval())
    with torch.no_grad():
        for i in range(18):
            nodes = (10, 14, 18)[i % 3]
            run.see(fast(run.rand(i, nodes, 8), run.ints(i, nodes, 2, 4 * nodes)))


@inference()
def label_propagation(run: Run) -> None:
    data = citations(run)
    source, target = data.edge_index
    degree = torch.ones(EDGES, device=run.device)

    @run.graph
    def spread(labels: Tensor, known: Tensor) -> Tensor:
        total = scatter(labels[source], target, dim=0, dim_size=NODES, reduce="sum")
        count = scatter(degree, target, dim=0, dim_size=NODES, reduce="sum").clamp(min=1)
        return torch.where(data.train_mask[:, None], known, total / count[:, None])

    known = F.one_hot(data.y, 3).float() * data.train_mask[:, None]
    labels = known
    for _ in range(9):
        labels = spread(labels, known)
        run.see(labels)


def _pagerank(adjacency: Tensor) -> Tensor:
    walk = adjacency / adjacency.sum(1, keepdim=True).clamp(min=1)
    rank = torch.full((NODES,), 1 / NODES, device=adjacency.device)
    for _ in range(10):
        rank = 0.15 / NODES + 0.85 * (walk.T @ rank)
    return rank


@inference()
def pagerank_of_a_dense_adjacency(run: Run) -> None:
    @run.graph
    def pagerank(edge_index: Tensor) -> Tensor:
        empty = torch.zeros(NODES, NODES, device=edge_index.device)
        ones = torch.ones(EDGES, device=edge_index.device)
        return _pagerank(empty.index_put(tuple(edge_index), ones, accumulate=True))

    for i in range(8):
        run.see(pagerank(run.ints(i, NODES, 2, EDGES)))


@inference(refused={"cpu": "OL101", "cuda": "OL101"})
def an_adjacency_that_is_checked_is_refused(run: Run) -> None:
    """`to_dense_adj` asks whether all edges lie within the size that it is given."""

    @run.graph
    def pagerank(edge_index: Tensor) -> Tensor:
        batch = torch.zeros(NODES, dtype=torch.int64, device=edge_index.device)
        return _pagerank(to_dense_adj(edge_index, batch, None, NODES, 1)[0])

    for i in range(6):
        run.see(pagerank(run.ints(i, NODES, 2, EDGES)))


def _schnet(run: Run, **options: Any) -> None:
    class Complete(nn.Module):
        def forward(self, pos: Tensor, batch: Tensor) -> tuple[Tensor, Tensor]:
            count = pos.shape[0]
            index = torch.arange(count, device=pos.device)
            row, col = index.repeat_interleave(count), index.repeat(count)
            return torch.stack([row, col]), (pos[row] - pos[col]).norm(dim=-1)

    sizes = {"hidden_channels": 16, "num_filters": 16, "num_interactions": 2, "num_gaussians": 8}
    model = SchNet(**sizes, interaction_graph=Complete()).to(run.device).eval()
    model.requires_grad_(False)
    fast = run.graph(model, **options)
    batch = torch.zeros(6, dtype=torch.int64, device=run.device)
    with torch.no_grad():
        for i in range(8):
            run.see(fast(run.ints(i, 9, 6, low=1), run.rand(i, 6, 3), batch))


@inference(refused={"cpu": "OL101", "cuda": "OL101"})
def schnet_is_refused(run: Run) -> None:
    """Its sum over the atoms asks how many molecules there are."""
    _schnet(run)


@inference(warns=("OL308", "OL311"), recordings=40)
def schnet_in_pieces(run: Run) -> None:
    _schnet(run, on_refusal="split", warmup=1)


def relations(run: Run, seed: int) -> HeteroData:
    """Authors, papers, and who wrote which."""
    data = HeteroData()
    data["author"].x, data["paper"].x = run.rand(seed, 6, 8), run.rand(seed + 1, 9, 8)
    data["author", "wrote", "paper"].edge_index = run.ints(seed, 6, 2, 14)
    return data


@inference(recordings=1)
def a_heterogeneous_graph_as_the_argument(run: Run) -> None:
    """Its storages refer to it, and the global one holds no tensor."""

    class Papers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = SAGEConv((8, 8), 4)

        def forward(self, data: HeteroData) -> Tensor:
            ends = data["author"].x, data["paper"].x
            return self.conv(ends, data["author", "wrote", "paper"].edge_index)

    fast = run.graph(Papers().to(run.device))
    with torch.no_grad():
        for i in range(16):
            run.see(fast(relations(run, i)))
