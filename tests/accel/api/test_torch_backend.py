"""Proves that ``torch.compile`` with the backend ``accel`` gives right outputs. Also proves that code that the backend
refuses stays in eager mode."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import accel
import accel.api.torch_backend as backend_module
from accel.api.torch_backend import accel_backend
from accel.runtimes.base import BaseSession


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    """Clears torch's compiled functions before and after a test. Hides torch's own warnings, which aren't about
    accel."""
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch.jit", category=DeprecationWarning)
        yield
    torch._dynamo.reset()


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[BaseSession]:
    """Returns the list of all sessions that the backend made."""
    made: list[BaseSession] = []
    original = backend_module._Part._made

    def recording(*args: Any) -> BaseSession:
        made.append(original(*args))
        return made[-1]

    monkeypatch.setattr(backend_module._Part, "_made", recording)
    return made


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 30), nn.ReLU(), nn.BatchNorm1d(30), nn.Linear(30, 3)).eval()


def test_it_is_registered() -> None:
    """Checks that torch finds the backend by its name."""
    assert "accel" in torch._dynamo.list_backends(exclude_tags=())


def test_a_model_at_several_sizes(ran: list[BaseSession]) -> None:
    """Checks that the backend reuses sessions, and that the outputs are right at every batch size."""
    model = net()
    compiled = torch.compile(model, backend=accel_backend)
    with torch.inference_mode():
        for rows in (2, 5, 7, 9):
            x = torch.randn(rows, 4)
            torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)
    assert len(ran) == 2  # accel built one session for a fixed batch and one for a dynamic batch


def test_changed_weights(ran: list[BaseSession]) -> None:
    """Checks that sessions use the new weights after the user changed or replaced the weights."""
    model = net()
    compiled = torch.compile(model, backend=accel_backend, dynamic=False)
    x = torch.randn(2, 4)
    with torch.no_grad():
        compiled(x)
        model[0].weight.mul_(2)
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)
        model.load_state_dict(net().state_dict())
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)
    assert len(ran) == 3


def test_two_models_with_the_same_code() -> None:
    """Checks that two models with the same compiled code keep their own weights."""
    one, other = net(), net()
    with torch.no_grad():
        other[3].bias.add_(1)
        x = torch.randn(2, 4)
        for model in (one, other, one):
            torch.testing.assert_close(torch.compile(model, backend=accel_backend)(x), model(x), rtol=1e-4, atol=1e-5)


def test_axes_that_are_dynamic_only_to_torch_compile() -> None:
    """Checks that the backend compiles two models that share their code, but take images of different sizes. After two
    image sizes, torch.compile treats all axes as dynamic, although each model takes only one size. Also checks that a
    function gives right outputs for several input shapes."""

    def flat(size: int) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(3 * size * size, 2)).eval()

    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        for size in (8, 6):
            model = flat(size)
            compiled = torch.compile(model, backend=accel_backend)
            for rows in (4, 2):
                x = torch.randn(rows, 3, size, size)
                torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)

        def squares(x: torch.Tensor) -> torch.Tensor:
            return x.reshape(-1, 16) @ torch.ones(16, 2)

        compiled = torch.compile(squares, backend=accel_backend)
        for shape in ((2, 16), (4, 8), (8, 4)):
            x = torch.randn(shape)
            torch.testing.assert_close(compiled(x), squares(x), rtol=1e-4, atol=1e-5)


class Halving(nn.Module):
    """A convolution with a stride, whose exported program has a guard on the length: the output's length isn't 1."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(4, 8, 3, stride=2, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x).amax(-1)


class Recurrent(nn.Module):
    """A network that no exporter writes with a dynamic length."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(4, 4, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rnn(x.transpose(1, 2))[0][:, -1]


@pytest.mark.parametrize(("kind", "sessions"), [(Halving, 2), (Recurrent, 3)])
def test_a_second_length_is_compiled(kind: type[nn.Module], sessions: int, ran: list[BaseSession]) -> None:
    """Fails if a second length of the inputs runs in eager mode. A model that can be exported with a dynamic length
    needs no session for the third length, and any other model needs a session for each length."""
    torch.manual_seed(0)
    model = kind().eval()
    compiled = torch.compile(model, backend=accel_backend)
    allowed = torch._dynamo.config.patch(allow_rnn=True)  # torch.compile leaves an LSTM out otherwise
    with torch.no_grad(), warnings.catch_warnings(), allowed:
        warnings.simplefilter("error", UserWarning)
        for length in (8, 16, 24):
            x = torch.randn(2, 4, length)
            torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)
    assert len(ran) == sessions


def test_the_advice_for_fused_encoder_layers(ran: list[BaseSession]) -> None:
    """Fails if an encoder layer that PyTorch fuses stays in eager mode without a reason that helps."""
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    x = torch.randn(2, 5, 8)
    with torch.no_grad():
        with pytest.warns(UserWarning, match=r"call torch.backends.mha.set_fastpath_enabled\(False\) before"):
            torch.compile(model, backend=accel_backend)(x)
        assert not ran
        torch._dynamo.reset()
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            found = torch.compile(model, backend=accel_backend)(x)
        finally:
            torch.backends.mha.set_fastpath_enabled(True)
        torch.testing.assert_close(found, model(x), rtol=1e-4, atol=1e-5)
    assert len(ran) == 1


def write(x: torch.Tensor) -> torch.Tensor:
    x.add_(1)
    return x * 2


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (write, "it writes to its inputs"),
        (lambda x: x.view(-1), "it returns a view of an input"),
        (lambda x: x + torch.rand_like(x), "differs from run to run"),
    ],
    ids=["writes", "view", "random"],
)
def test_what_stays_in_eager_mode(function: Callable[..., torch.Tensor], reason: str, ran: list[BaseSession]) -> None:
    """Checks that code with side effects or random numbers stays in eager mode, and that a warning names the reason."""
    x, y = torch.zeros(2, 2), torch.zeros(2, 2)
    torch.manual_seed(1)
    wanted = function(y)
    torch.manual_seed(1)
    with torch.no_grad(), pytest.warns(UserWarning, match=f"stays in eager mode: .*{reason}"):
        found = torch.compile(function, backend=accel_backend)(x)
    if reason != "differs from run to run":
        assert torch.equal(found, wanted)
    assert torch.equal(x, y)
    assert not ran


def test_training_stays_in_eager_mode(ran: list[BaseSession]) -> None:
    """Checks that the parameters of a model in training mode get gradients."""
    model = net().train()
    with pytest.warns(UserWarning, match="gradients are on"):
        torch.compile(model, backend=accel_backend)(torch.randn(4, 4)).sum().backward()
    assert model[0].weight.grad is not None
    assert not ran


def test_a_function_with_a_graph_break(ran: list[BaseSession]) -> None:
    """Checks that a line that torch can't compile splits the code into two sessions."""
    said: list[float] = []

    def function(x: torch.Tensor) -> torch.Tensor:
        y = torch.sin(x) * 2
        torch._dynamo.graph_break()
        said.append(1.0)
        return torch.cos(y) + 1

    x = torch.randn(4)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(function, backend=accel_backend)(x), torch.cos(torch.sin(x) * 2) + 1)
    assert said == [1.0]
    assert len(ran) == 2


def test_options_go_to_optimize(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks that the options of torch.compile reach ``accel.optimize``."""
    seen: dict[str, Any] = {}

    def optimize(program: Any, **options: Any) -> Any:
        seen.update(options)
        raise accel.AccelError("enough is known")

    monkeypatch.setattr(backend_module, "optimize", optimize)
    compiled = torch.compile(net(), backend=accel_backend, options={"max_drop": 0.02})
    with torch.no_grad(), pytest.warns(UserWarning, match="enough is known"):
        compiled(torch.randn(2, 4))
    assert seen == {"max_drop": 0.02}
