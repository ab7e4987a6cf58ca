"""Proves that ``accel plan`` works as documented, and that ``accel train`` runs the written configs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from accel.cli import group, run
from accel.errors import BadConfig
from accel.train.config.rules import check, runnable
from accel.train.config.schema import TrainConfig

SHAPE = "layers = 32\nhidden = 4096\nheads = 32\nvocab = 32000\nseq = 2048\n"


def test_plan_of_a_parameter_count(capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if the documented command line or the keys of its JSON change. Also checks that the model states of 7.5 B
    parameters at ZeRO 3 take 1.9 GB on each of 64 ranks."""
    line = "plan --params 7.5e9 --world 64 --zero 3 --precision fp16 --optimizer adam --json"
    assert run(group, line.split()) == 0
    body = json.loads(capsys.readouterr().out)
    assert body["model_state_bytes_per_rank"] == pytest.approx(1.9e9, rel=0.02)
    assert body["communication_bytes_per_step"] == pytest.approx(3 * 15e9 * 63 / 64)
    assert body["activation_bytes_per_rank"] is None


def test_plan_of_a_config_lists_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Checks that the written config runs on the given number of ranks, and has the chosen layout."""
    config, out = tmp_path / "config.toml", tmp_path / "chosen.toml"
    config.write_text(f"global_batch = 512\nmicro_batch = 1\n[precision]\nmode = 'bf16'\n[shape]\n{SHAPE}")
    assert run(group, ["plan", str(config), "--world", "64", "--hbm", "80G", "-o", str(out), "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    chosen = TrainConfig.load(out)
    check(chosen, 64)
    assert chosen.parallel.zero == body["layout"]["zero"]
    assert chosen.micro_batch == body["layout"]["micro_batch"]
    assert chosen.global_batch == 512
    assert TrainConfig.from_dict({}).to_toml() != chosen.to_toml()
    times = [plan["step_seconds"] for plan in body["feasible"]]
    assert times == sorted(times)
    assert body["step_seconds"] == times[0]
    assert run(group, ["plan", str(out), "--world", "64"]) == 0
    assert "assumed: 400 TFLOP/s" in capsys.readouterr().out


@pytest.mark.parametrize("more", ["", "--hbm 80G", "--compare"])
def test_a_written_config_says_what_it_lacks(tmp_path: Path, capsys: pytest.CaptureFixture[str], more: str) -> None:
    """Fails if a written config lacks something that ``accel train`` asks for, and the plan doesn't name it."""
    out = tmp_path / "chosen.toml"
    line = f"plan --layers 2 --hidden 64 --heads 4 --vocab 64 --seq 64 --world 2 --tp 2 {more} -o {out}".split()
    assert run(group, line) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert run(group, [*line, "--json"]) == 0
    lacks = json.loads(capsys.readouterr().out)["missing"]
    for one, mend in zip(lacks, (["model=a:b", "data=a:c"], ["tensor_parallel.blocks=column"]), strict=True):
        assert f"{out} isn't ready for accel train: {one}" in told
        with pytest.raises(BadConfig) as refused:
            runnable(TrainConfig.load(out))
        assert str(refused.value) == one
        out.write_text(TrainConfig.load(out, mend).to_toml())
    runnable(TrainConfig.load(out))


def test_the_documented_line_prints_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Checks that the documented command line prints a table with one line for each layout, the fastest layout first.
    The table must mark the chosen layout. The figures must equal the figures of --json, and the table must state its
    assumptions."""
    monkeypatch.chdir(tmp_path)
    Path("config.toml").write_text(f"global_batch = 512\nmicro_batch = 1\n[precision]\nmode = 'bf16'\n[shape]\n{SHAPE}")
    line = "plan config.toml --world 64 --hbm 80G"
    assert run(group, [*line.split(), "--json"]) == 0
    plans = json.loads(capsys.readouterr().out)["feasible"]
    assert run(group, line.split()) == 0
    said = capsys.readouterr().out
    assert f"{len(plans)} layouts fit in 80 GB, fastest first" in said
    assert "assumed: 400 TFLOP/s a rank, 300 GB/s inside a node of 8, 40 GB/s between nodes" in said
    table = [[cell.strip() for cell in row.strip("│┃").split("│")] for row in said.splitlines() if row[0] in "│┃"]
    (names,) = ([cell.strip() for cell in row.strip("┃").split("┃")] for row in said.splitlines() if row[0] == "┃")
    rows = [dict(zip(names, row, strict=True)) for row in table[1:]]
    assert [row[""] for row in rows] == ["*1", *map(str, range(2, 21))]
    for row, plan in zip(rows, plans, strict=False):
        kind = plan["layout"]
        shown = ("tp", "pp", "cp", "dp", "zero", "micro_batch", "accumulation", "recompute")
        assert [row[name] for name in ("tp", "pp", "cp", "dp", "ZeRO", "micro", "x", "recompute")] == [
            str(kind[name]) for name in shown
        ]
        assert ("offload" in row["more"], f"hpZ {kind['hpz']}" in row["more"]) == (kind["offload"], kind["hpz"] > 0)
        assert float(row["s a step"]) == pytest.approx(plan["step_seconds"], rel=1e-3)
        assert float(row["GB a rank"]) == pytest.approx(plan["total_bytes_per_rank"] / 1e9, abs=0.006)
        assert float(row["GB sent"]) == pytest.approx(plan["communication_bytes_per_step"] / 1e9, abs=0.0006)
    seconds = [float(row["s a step"]) for row in rows]
    assert seconds == sorted(seconds)


@pytest.mark.parametrize(
    ("words", "axis", "value"),
    [
        ("--zero 1", "zero", 1),
        ("--tp 2", "tp", 2),
        ("--pp 4", "pp", 4),
        ("--cp 2", "cp", 2),
        ("--micro-batch 2", "micro_batch", 2),
        ("--recompute selective", "recompute", "selective"),
        ("--qgz", "zero", 3),
    ],
)
@pytest.mark.parametrize("from_file", [False, True])
def test_the_search_keeps_to_what_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: str, axis: str, value: object, from_file: bool
) -> None:
    """With --hbm, accel plan lists layouts and writes a config. Fails if the list or the config ignores another option
    of the command."""
    config, out = tmp_path / "config.toml", tmp_path / "chosen.toml"
    config.write_text(f"global_batch = 512\nmicro_batch = 1\n[precision]\nmode = 'bf16'\n[shape]\n{SHAPE}")
    shape = "--layers 32 --hidden 4096 --heads 32 --vocab 32000 --seq 2048 --global-batch 512"
    model = [str(config)] if from_file else shape.split()
    line = ["plan", *model, "--world", "64", "--hbm", "8000G", *words.split(), "-o", str(out), "--json"]
    assert run(group, line) == 0
    body = json.loads(capsys.readouterr().out)
    assert {plan["layout"][axis] for plan in body["feasible"]} == {value}
    written = TrainConfig.load(out)
    assert written.parallel.qgz == (words == "--qgz")
    assert (written.micro_batch if axis == "micro_batch" else getattr(written.parallel, axis)) == value


def test_the_search_keeps_what_it_does_not_vary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if the plan or the written config ignores the replicas or the ZeRO++ settings of the given config."""
    config, out = tmp_path / "config.toml", tmp_path / "chosen.toml"
    parallel = "[parallel]\nzero = 3\nreplicate = 2\nhpz = 4\nqwz = true\n"
    config.write_text(f"global_batch = 512\nmicro_batch = 1\n{parallel}[precision]\nmode = 'bf16'\n[shape]\n{SHAPE}")
    assert run(group, ["plan", str(config), "--world", "64", "--hbm", "8000G", "-o", str(out), "--json"]) == 0
    assert {plan["layout"]["zero"] for plan in json.loads(capsys.readouterr().out)["feasible"]} == {3}
    p = TrainConfig.load(out).parallel
    assert (p.replicate, p.hpz, p.qwz, p.qgz) == (2, 4, True, False)


def test_context_parallel_is_found_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Checks that the plan uses context parallel for a sequence that no other layout can hold. Also checks that the
    written config can run, and that a plan of the written config gives the same byte counts."""
    config, out = tmp_path / "config.toml", tmp_path / "chosen.toml"
    shape = SHAPE.replace("seq = 2048", "seq = 131072").replace("vocab = 32000", "vocab = 32003")
    config.write_text(f"global_batch = 8\nmicro_batch = 1\n[precision]\nmode = 'bf16'\n[shape]\n{shape}")
    line = ["plan", str(config), "--world", "8", "--hbm", "64G", "--tp", "1", "-o", str(out), "--json"]
    assert run(group, line) == 0
    body = json.loads(capsys.readouterr().out)
    assert all(plan["layout"]["cp"] > 1 for plan in body["feasible"])
    assert body["communication_bytes_per_step_by_axis"]["cp"] > 0
    chosen = TrainConfig.load(out)
    assert chosen.parallel.cp == body["layout"]["cp"]
    for plan in body["feasible"]:
        kind = plan["layout"]
        parallel = {name: kind[name] for name in ("zero", "cp", "recompute")}
        batches = {"global_batch": 8, "micro_batch": kind["micro_batch"]}
        check(TrainConfig.from_dict({**batches, "parallel": parallel, "shape": vars(chosen.shape)}), 8)
    assert run(group, ["plan", str(out), "--world", "8", "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["total_bytes_per_rank"] == body["total_bytes_per_rank"]
    assert again["communication_bytes_per_step"] == body["communication_bytes_per_step"]


def test_plan_of_a_factory_measures_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Checks that the plan of a model factory counts the model's parameters and measures its activations. The config
    doesn't give the model's shape."""
    source = tmp_path / "made.py"
    source.write_text(
        "import torch\n"
        "def model():\n"
        "    return torch.nn.Sequential(torch.nn.Linear(8, 100), torch.nn.ReLU(), torch.nn.Linear(100, 10))\n"
        "def data():\n"
        "    return [(torch.zeros(8), torch.tensor(0))] * 64\n"
    )
    config = tmp_path / "config.toml"
    config.write_text(f"model = '{source}:model'\ndata = '{source}:data'\nglobal_batch = 32\nmicro_batch = 4\n")
    assert run(group, ["plan", str(config), "--world", "4", "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert body["model_state_bytes_per_rank"] == 16 * (8 * 100 + 100 + 100 * 10 + 10)
    assert body["activation_bytes_per_rank"] == 4 * 4 * (8 + 100)  # autograd keeps the inputs of both matrix products
    assert body["flops_per_step"] == 3 * 32 * 2 * (8 * 100 + 100 * 10)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("plan --world 4", "pass the number of parameters as --params"),
        ("plan nothing.toml --world 4", "does not exist"),
        ("plan --params 7.5e9 --world 64 --tp 3", "use a multiple of 3"),
        ("plan --params 7.5e9 --world 64 --tp 4", "pass the shape as --layers"),
        ("plan --params 7.5e9 --world 64 --cp 4", "pass the shape as --layers"),
        ("plan --layers 4 --hidden 60 --heads 6 --seq 64 --world 8 --cp 4", "4 has to divide 6 query heads"),
        (
            "plan --layers 4 --hidden 60 --heads 6 --kv-heads 4 --seq 64",
            "6 query heads can't be divided evenly over 4 key-value heads; use a divisor of 6",
        ),
        ("plan --layers 4 --hidden 60 --kv-heads 4 --seq 64", "also needs the number of query heads; give heads too"),
        (
            "plan --layers 4 --hidden 64 --heads 8 --kv-heads 2 --seq 64 --world 4 --tp 4",
            "8 query heads and 2 key-value",
        ),
        ("plan --params x --world 4", "write e.g. 80G"),
        ("plan --params 7e9 --layers 2 --hidden 64", "contradict 2 layers of hidden size 64, which have about 98,304"),
        ("plan --params 1e6 --layers 2 --hidden 64 --vocab 50000", "are less than the embedding of 50000 x 64"),
        ("plan --params 7e9 --inference --zero 3", "--inference plans no training; leave out --zero"),
        ("plan --params 7e9 --inference -o x.toml", "--inference plans no training; leave out --out"),
        ("plan --params 7e9 --batch 2", "--batch is the number of sequences of --inference; pass --global-batch"),
        ("plan --params 7e9 --layers 4 --world 2 --pp 2", "use --micro-batch=1 --global-batch=2"),
        ("plan --params 70e9 --world 2 --hbm 8G", "use more ranks"),
        ("plan --params 7e9 --world 2 --hbm 80G --tp 2", "tensor parallel needs the model's shape; pass the shape"),
        ("plan --params 7e9 --world 8 --hbm 80G --zero 2 --qwz", "fits the options zero 2, qwz True; leave out"),
    ],
)
def test_bad_requests_end_in_one_sentence(line: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if a bad request gives a traceback, an exit code other than 2, or a message without the fix."""
    assert run(group, [*line.split(), "-q"]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1


def test_kv_cache(capsys: pytest.CaptureFixture[str]) -> None:
    """Checks the size of the KV cache in bytes: 2 (key and value) x layers x channels x positions x sequences x 2
    bytes."""
    line = "plan --params 7e9 --layers 32 --hidden 4096 --heads 32 --seq 2048"
    assert run(group, [*line.split(), *["--inference", "--batch", "4", "--precision", "fp16", "--json"]]) == 0
    assert json.loads(capsys.readouterr().out)["kv_cache_bytes_per_rank"] == 2 * 32 * 4096 * 2048 * 4 * 2


@pytest.mark.parametrize("kv_heads", [12, 4, 1])
def test_grouped_queries_have_fewer_parameters(capsys: pytest.CaptureFixture[str], kv_heads: int) -> None:
    """Grouped-query attention has fewer key and value heads than query heads. Fails if the plan counts as many
    parameters for the keys and values as for the queries. The planned number of parameters must equal the number in
    Starcoder2, except for Starcoder2's last norm. Llama has no biases, so its parameter count may differ from the
    planned count by half a percent."""
    from transformers import LlamaConfig, LlamaModel, Starcoder2Config, Starcoder2Model

    shape = {"num_hidden_layers": 4, "hidden_size": 768, "num_attention_heads": 12, "vocab_size": 1000}
    shape["num_key_value_heads"] = kv_heads
    with torch.device("meta"):
        made = Starcoder2Model(Starcoder2Config(**shape, intermediate_size=4 * 768))
        # Llama's MLP has three products, which together are as large as the two products of a GPT's MLP.
        llama = LlamaModel(LlamaConfig(**shape, intermediate_size=768 * 8 // 3))
    line = f"plan --layers 4 --hidden 768 --heads 12 --kv-heads {kv_heads} --vocab 1000 --precision fp32 --json"
    assert run(group, line.split()) == 0
    planned = json.loads(capsys.readouterr().out)["parameter_bytes_per_rank"] / 4
    assert planned + 2 * 768 == sum(p.numel() for p in made.parameters())
    assert planned == pytest.approx(sum(p.numel() for p in llama.parameters()), rel=0.005)
