import torch


def make():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))


def data():
    generator = torch.Generator().manual_seed(0)
    x = torch.rand((32, 4), generator=generator)
    return list(zip(x, x[:, :2] * 2, strict=True))
