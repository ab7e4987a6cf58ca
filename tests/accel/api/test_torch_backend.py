"""Proves that ``torch.compile`` with the backend ``accel`` gives right outputs. Also proves that code that the backend
refuses stays in eager mode."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import accel
import accel.api.torch_backend.backend as backend_module
import accel.api.torch_backend.weights as weights_module
from accel.api.torch_backend import accel_backend
from accel.api.torch_backend.weights import Weights
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


def multiply(weight: nn.Parameter) -> None:
    weight.data.mul_(2)


def fill(weight: nn.Parameter) -> None:
    weight.data[:] = torch.arange(12.0).reshape(3, 4)


def replace(weight: nn.Parameter) -> None:
    weight.data = torch.arange(12.0).reshape(3, 4) + 5


def from_vector(weight: nn.Parameter) -> None:
    nn.utils.vector_to_parameters(-torch.arange(12.0), [weight])


def through_numpy(weight: nn.Parameter) -> None:
    weight.detach().numpy()[1, 2] = 70


def in_inference_mode(weight: nn.Parameter) -> None:
    with torch.inference_mode():
        weight.data = torch.ones(3, 4)
        weight.mul_(3)


Change = Callable[[nn.Parameter], None]


# Few changes follow each other, because a part whose weights often change stays in eager mode. The last one makes an
# inference tensor of the weight.
@pytest.mark.parametrize("small", [True, False])
@pytest.mark.parametrize("changes", [(multiply, fill, replace), (from_vector, through_numpy, in_inference_mode)])
def test_weights_that_change_uncounted(
    changes: tuple[Change, ...], small: bool, ran: list[BaseSession], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if a session runs with old weights after a write that PyTorch doesn't count. In a large model, weights that
    are inference tensors stay in eager mode."""
    if not small:
        monkeypatch.setattr(weights_module, "EXACT_BYTES", 0)
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    compiled = torch.compile(model, backend=accel_backend)
    x = torch.randn(2, 4)
    with torch.no_grad():
        before = compiled(x)
    for number, change in enumerate(changes, 1):
        change(model.weight)
        eager = not small and change is in_inference_mode
        with torch.no_grad(), warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always", UserWarning)
            found = compiled(x)
            torch.testing.assert_close(found, model(x), rtol=1e-4, atol=1e-5, msg=change.__name__)
            assert not torch.allclose(found, before, rtol=1e-2), change.__name__
        told = ["make the model outside torch.inference_mode()" in str(one.message) for one in said]
        assert told == [True] * eager, change.__name__
        assert len(ran) == (number if eager else number + 1), change.__name__
        before = found


def test_a_write_in_inference_mode_to_an_inference_tensor() -> None:
    """Fails if a session runs with old weights after a write to a model that was made in inference mode."""
    with torch.inference_mode():
        model = nn.Linear(4, 3)
        compiled = torch.compile(model, backend=accel_backend)
        x = torch.randn(2, 4)
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)
        model.weight[0, 0] += 1
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("exact", [True, False])
def test_all_kinds_of_weights_are_watched(exact: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if weights that nobody wrote to count as changed, or if a write is missed. With all values compared, a
    change of one value counts. A second storage never has the address of the first."""
    if not exact:
        monkeypatch.setattr(weights_module, "EXACT_BYTES", 0)
    weights = [
        torch.full((300,), torch.nan),
        torch.zeros(40, 30).T,
        torch.zeros(40, 30)[:, ::2],
        torch.zeros(1, 5).expand(3, 5),
        torch.zeros(()),
        torch.zeros(0),
        torch.zeros(9, dtype=torch.bool),
        torch.zeros(9, dtype=torch.complex128),
        torch.zeros(9, dtype=torch.bfloat16),
    ]
    assert not Weights(weights).changed(weights)
    for weight in weights:
        if weight.numel():
            seen = Weights(weights)
            (weight.data[:1] if weight.ndim else weight.data).fill_(1)
            assert seen.changed(weights)
    parameter = nn.Parameter(torch.zeros(1000))
    seen = Weights([parameter])
    parameter.data[777] = 1
    assert seen.changed([parameter]) == exact
    parameter = nn.Parameter(torch.zeros(1000))
    for _ in range(3):
        seen = Weights([parameter])
        parameter.data = torch.zeros(1000)
        assert seen.changed([parameter])


class Counter(nn.Module):
    """A module whose output depends on the number of its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        return x * self.calls


class Log(nn.Module):
    """A module that writes buffers its output doesn't depend on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("last", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        self.last.copy_(y[0])
        return y.relu()


def statistics() -> nn.Module:
    """Returns a module whose only writes are those of a batch norm to its running mean, which PyTorch doesn't count."""
    model = nn.BatchNorm1d(4)
    model.num_batches_tracked = None
    return model.train()


@pytest.mark.parametrize("kind", [Counter, Log, lambda: nn.BatchNorm1d(4).train(), statistics])
def test_writes_to_buffers_stay_in_eager_mode(kind: Callable[[], nn.Module], ran: list[BaseSession]) -> None:
    """Fails if a module's writes to its buffers are lost, or happen more often than the module is called."""
    torch.manual_seed(0)
    model = kind()
    alone = copy.deepcopy(model)
    compiled = torch.compile(model, backend=accel_backend)
    with torch.no_grad(), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", UserWarning)
        for _ in range(3):
            x = torch.randn(3, 4)
            assert torch.equal(compiled(x), alone(x))
            for one, other in zip(model.buffers(), alone.buffers(), strict=True):
                assert torch.equal(one, other)
    assert ["it writes to its weights or buffers" in str(one.message) for one in said] == [True]
    assert not ran


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
    assert torch.equal(found, wanted)
    assert torch.equal(x, y)
    assert not ran


def test_a_warning_in_the_words_of_the_user() -> None:
    """Fails if a warning names files of the cache or code that PyTorch generated, points to a line of accel, or says "1
    operators"."""
    with torch.no_grad(), pytest.warns(UserWarning, match="a part of 1 operator stays in eager mode") as said:
        torch.compile(lambda x: torch.nn.functional.dropout(x, 0.5), backend=accel_backend)(torch.ones(9))
    (warning,) = [one for one in said if "eager mode" in str(one.message)]
    assert "of the compiled part differs from run to run" in str(warning.message)
    assert "forward draws random numbers; make" in str(warning.message)
    assert warning.filename == __file__


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


def test_a_number_that_changes(ran: list[BaseSession], capfd: pytest.CaptureFixture[str]) -> None:
    """Fails if a changed attribute of a module keeps its old value, or if PyTorch prints the graph instead of a reason
    in one line."""
    model, x = nn.Sequential(nn.Linear(4, 3), nn.ELU(alpha=0.5)).eval(), torch.randn(2, 4)
    compiled = torch.compile(model, backend=accel_backend)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x))
        model[1].alpha = 3.0
        with pytest.warns(UserWarning, match="a Python number that changes between calls; keep the number in a tensor"):
            found = compiled(x)
        torch.testing.assert_close(found, model(x))
    assert len(ran) == 1
    assert "def forward" not in capfd.readouterr().err


def test_a_whole_number_that_changes(ran: list[BaseSession], recwarn: pytest.WarningsRecorder) -> None:
    """Fails if a function whose argument is a whole number stays in eager mode from the second number on, or computes
    with the number of an earlier call."""

    @torch.compile(backend="accel")
    def scaled(x: torch.Tensor, w: torch.Tensor, k: int = 2) -> torch.Tensor:
        return (x @ w).sigmoid() * k + (k - 1)

    repeated = torch.compile(lambda x, k: x.tanh().repeat(1, k), backend="accel")
    x, w = torch.randn(3, 4), torch.randn(4, 5)
    with torch.no_grad():
        for k in (3, 5):
            torch.testing.assert_close(repeated(x, k), x.tanh().repeat(1, k))
        ran.clear()
        for k in (3, 5, 7, -2):
            torch.testing.assert_close(scaled(x, w, k), (x @ w).sigmoid() * k + (k - 1))
    assert len(ran) == 2
    assert not [one for one in recwarn if "of 3 operators stays" in str(one.message) or "KeyError" in str(one.message)]


def test_an_unknown_option() -> None:
    """Fails if an unknown option of torch.compile is only a warning, or if the error suggests no option."""
    compiled = torch.compile(net(), backend=accel_backend, options={"max_dorp": 0.02})
    with torch.no_grad(), pytest.raises(Exception, match=r"no option 'max_dorp'; write 'max_drop'"):
        compiled(torch.randn(2, 4))
