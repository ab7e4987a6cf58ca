"""Proves that accel inspect counts a graph's FLOPs correctly. Also proves, in a real browser, that the page draws the
graph."""

from __future__ import annotations

import html
import importlib.util
import io
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

import accel
from accel.artifact import Artifact
from accel.graph.cost import graph_cost
from accel.graph.layout import layout
from accel.sources.onnx.file import describe_model
from tests.support import ROOT
from tests.support.browser import browser, document, opened, screenshot


def test_flops_are_those_that_torch_counts(my_model: Path, tmp_path: Path) -> None:
    """Fails if the FLOPs of products and convolutions differ from the result of torch's own counter, at batch 1 or
    batch 5."""
    from torch.utils.flop_counter import FlopCounterMode

    accel.export(f"{my_model}:make", inputs=["x:float32[batch,3,32,32]"], out=tmp_path / "m.onnx")
    scope: dict[str, Any] = {}
    exec(my_model.read_text(), scope)
    for batch in (1, 5):
        with FlopCounterMode(display=False) as counter:
            scope["make"]()(torch.zeros(batch, 3, 32, 32))
        found = accel.inspect(tmp_path / "m.onnx", sizes={"batch": batch}).graph
        heavy = sum(n for op, n in found["flops_by_operator"].items() if op in ("Conv", "Gemm", "MatMul"))
        assert heavy == counter.get_total_flops()
        assert found["sizes"] == {"batch": batch}
        assert found["most_expensive"][0]["operator"] == "Conv"


def test_formulas_by_hand() -> None:
    """Fails if the FLOPs of a grouped, strided, transposed, recurrent or quantized layer are wrong."""
    rng = np.random.default_rng(0)

    def weight(name: str, *shape: int, kind: type = np.float32) -> onnx.TensorProto:
        return numpy_helper.from_array(rng.standard_normal(shape).astype(kind), name)

    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], "conv", group=2, strides=[2, 2], pads=[1, 1, 1, 1]),
        helper.make_node("ConvTranspose", ["c", "t"], ["d"], "transposed", strides=[2, 2]),
        helper.make_node("LSTM", ["s", "lw", "lr"], ["h"], "lstm", hidden_size=5),
        helper.make_node("DequantizeLinear", ["q", "one"], ["qf"], "dq_weight"),
        helper.make_node("DequantizeLinear", ["a", "one"], ["af"], "dq_input"),
        helper.make_node("MatMul", ["af", "qf"], ["m"], "quantized"),
    ]
    constants = [
        weight("w", 6, 2, 3, 3), weight("t", 6, 3, 2, 2), weight("lw", 1, 20, 4), weight("lr", 1, 20, 5),
        weight("q", 8, 7, kind=np.int8), numpy_helper.from_array(np.float32(0.1), "one"),
    ]  # fmt: skip

    def value(name: str, shape: list[int], kind: int = TensorProto.FLOAT) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, kind, shape)

    inputs = [value("x", [1, 4, 8, 8]), value("s", [3, 2, 4]), value("a", [2, 8], TensorProto.INT8)]
    outputs = [value("d", [1, 3, 8, 8]), value("h", [3, 1, 2, 5]), value("m", [2, 7])]
    graph = helper.make_graph(nodes, "g", inputs, outputs, constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    signature, _ = describe_model(model)
    costs = {node.name: node for node in graph_cost(model, signature).nodes}
    assert costs["conv"].flops == 2 * (6 * 4 * 4) * (2 * 3 * 3)
    assert costs["transposed"].flops == 2 * (6 * 4 * 4) * (3 * 2 * 2)
    assert costs["lstm"].flops == 2 * 3 * 2 * 4 * 5 * (4 + 5)
    assert costs["quantized"].flops == 2 * 2 * 7 * 8
    assert costs["quantized"].quantized
    assert not costs["conv"].quantized
    assert costs["conv"].parameters == 6 * 2 * 3 * 3


def test_the_command_as_written(cli: Any, digits: Artifact, tmp_path: Path) -> None:
    """Checks that --graph and --json together write both the page and the numbers."""
    ran = cli("inspect", digits.path, "--graph", tmp_path / "graph.html", "--json")
    assert ran.code == 0, ran.stderr
    graph = json.loads(ran.stdout)["graph"]
    assert graph["flops"] > 0
    assert graph["dynamic_dims"] == ["batch"]
    assert len(graph["most_expensive"]) <= 10
    page = (tmp_path / "graph.html").read_text()
    assert not re.search(r"(src|href)=|https?://(?!www\.w3\.org)|@import|url\(", page)  # the page loads nothing
    shown = cli("inspect", digits.path)
    assert "GFLOPs at batch=1" in shown.stdout


def test_a_second_model_without_a_page(cli: Any, digits: Artifact) -> None:
    """Fails if inspect accepts a second model without --graph."""
    ran = cli("inspect", digits.path, "--against", digits.path)
    assert (ran.code, "--graph out.html" in ran.stderr) == (2, True)


def test_layers_go_down() -> None:
    """Fails if an edge in the drawn graph points upwards, or if two nodes overlap."""
    edges = [(0, 2), (1, 2), (2, 3), (0, 3), (3, 4), (2, 5), (5, 4)]
    places, width, height = layout(6, edges)
    assert all(places[a][1] < places[b][1] for a, b in edges)
    assert len(set(places)) == 6
    assert all(0 <= x <= width and 0 <= y <= height for x, y in places)


def hostile(path: Path) -> Path:
    """Makes a graph with names that contain </script>, which would end the page's script."""
    name = "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">&amp;"
    nodes = [helper.make_node("Relu", ["x"], ["h"], name), helper.make_node("Neg", ["h"], ["y"], "last")]
    ends = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [2]) for n in ("x", "y")]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


def looked_at(page: Path, fragment: str = "", script: str = "") -> str:
    """Returns the page's DOM in Chromium, after ``script`` ran on the loaded page."""
    if script:
        copy = page.with_name("driven.html")
        copy.write_text(page.read_text().replace("</body>", f"<script>{script}</script></body>"))
        page = copy
    return document(page.parent, f"file://{page}{fragment}")


@browser
def test_the_page_in_a_browser(digits: Artifact, tmp_path: Path) -> None:
    """Fails if the page leaves out a node, or if the search finds nothing. Also checks that the page shows the details
    of the node that was found, that the mouse wheel zooms, and that dragging moves the graph."""
    page = tmp_path / "graph.html"
    accel.inspect(digits, page=page)
    count = sum(node.op_type != "Constant" for node in onnx.load(str(digits.path)).graph.node) + 2
    text = looked_at(page, "#search=conv")
    assert f'data-ready="{count}"' in text
    assert text.count('<g class="node') == count
    assert re.search(r'id="found">1 of \d+<', text)
    details = text.partition('id="details"')[2]
    assert "<h3>Conv " in details
    assert "flops" in details
    assert "kernel_shape: [" in details
    moved = looked_at(
        page,
        script="""
        {
          const svg = document.getElementById("graph0"), box = svg.getBoundingClientRect(), seen = [];
          const spot = { clientX: box.left + 100, clientY: box.top + 100, bubbles: true };
          const look = () => seen.push(svg.getAttribute("viewBox"));
          look();
          svg.dispatchEvent(new WheelEvent("wheel", { ...spot, deltaY: -100 }));
          look();
          svg.dispatchEvent(new PointerEvent("pointerdown", spot));
          svg.dispatchEvent(new PointerEvent("pointermove", { ...spot, clientX: spot.clientX + 50 }));
          look();
          document.body.dataset.seen = JSON.stringify(seen);
        }
        """,
    )
    match = re.search(r'data-seen="([^"]*)"', moved)
    assert match
    start, zoomed, panned = ([float(n) for n in view.split()] for view in json.loads(html.unescape(match[1])))
    assert zoomed[2] < start[2]
    assert panned[0] < zoomed[0]
    assert panned[2:] == zoomed[2:]


@browser
def test_a_click_opens_the_details(digits: Artifact, tmp_path: Path) -> None:
    """Checks that the page of one model isn't empty, and that every node is at its own coordinates. Also checks that a
    click on a node opens the node's details, but dragging the graph doesn't."""
    from PIL import Image

    accel.inspect(digits, page=tmp_path / "one.html")
    place = """(() => {
      const node = [...document.querySelectorAll(".node")].find(n => n.querySelector("text").textContent === "Conv");
      const box = node.querySelector("rect").getBoundingClientRect();
      return [box.left + box.width / 8, box.top + box.height / 2];
    })()"""
    shown = "document.getElementById('details').innerText"
    with opened(tmp_path, f"file://{tmp_path / 'one.html'}") as page:
        x, y = page.value(place)
        picture = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
        assert picture.getpixel((x, y)) == (0xDB, 0xE9, 0xFB), "the colour of a Conv"
        assert "kernel_shape" not in page.value(shown)
        page.drag((x, y), (x + 60, y + 30))
        assert "kernel_shape" not in page.value(shown)
        moved = page.value(place)
        assert moved == pytest.approx([x + 60, y + 30], abs=1)
        page.click(*moved)
        details = page.value(shown)
        assert details.startswith("Conv ")
        assert "kernel_shape: [" in details
        assert "flops" in details
        assert page.value("document.querySelectorAll('.chosen').length") == 1
        chosen = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
        assert any(chosen.getpixel((x + 60, row)) == (0x15, 0x65, 0xC0) for row in range(700)), "no frame around it"


def test_without_a_browser(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Checks that tests that need a browser fail in CI if no browser is installed, but are skipped on a developer's
    machine."""
    monkeypatch.setattr(shutil, "which", lambda _: None)
    spec = importlib.util.spec_from_file_location("browser_of_nobody", ROOT / "tests" / "support" / "browser.py")
    assert spec is not None
    assert spec.loader is not None
    for value, skips in (("true", False), ("", True)):
        monkeypatch.setenv("CI", value)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        assert module.browser.args == (skips,)
        with pytest.raises(pytest.fail.Exception, match="apt-get install chromium"):
            module.document(tmp_path, "about:blank")


@browser
def test_two_models_side_by_side(digits: Artifact, tmp_path: Path) -> None:
    """Checks that the page of two models shows both models, and marks only the changed node."""
    model = onnx.load(str(digits.path))
    changed = next(node for node in model.graph.node if node.op_type == "Relu")
    changed.op_type = "Sigmoid"
    onnx.save(model, tmp_path / "other.onnx")
    accel.inspect(digits, against=tmp_path / "other.onnx", page=tmp_path / "two.html")
    text = looked_at(tmp_path / "two.html")
    assert text.count("<svg") == 2
    assert re.search(r'id="changes">\d+ same, 1 changed, 0 added, 0 removed<', text)
    shot = screenshot(tmp_path, f"file://{tmp_path / 'two.html'}")
    assert shot.read_bytes()[:4] == b"\x89PNG"
    assert shot.stat().st_size > 10_000  # a screenshot of an empty window takes about 1,000 bytes


@browser
def test_a_connection_past_other_nodes_is_seen(tmp_path: Path) -> None:
    """Fails if an edge that skips a layer is hidden behind the nodes in between."""
    nodes = [helper.make_node("Relu", ["x"], ["a"]), helper.make_node("Neg", ["a"], ["b"])]
    nodes.append(helper.make_node("Add", ["a", "b"], ["y"]))
    ends = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [2]) for n in ("x", "y")]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), tmp_path / "s.onnx")
    accel.inspect(tmp_path / "s.onnx", page=tmp_path / "s.html")
    text = looked_at(tmp_path / "s.html")
    middles = {int(x) for x in re.findall(r'class="node[^>]*translate\((\d+),', text)}
    paths = [re.findall(r"[-\d.]+", d) for d in re.findall(r'class="edge" d="([^"]*)"', text)]
    assert (len(middles), len(paths)) == (1, 5)
    aside = [path for path in paths if any(float(x) - max(middles) > 100 for x in path[::2])]
    assert len(aside) == 1


@browser
def test_hostile_names(tmp_path: Path) -> None:
    """Fails if a name from the file becomes part of the page's markup."""
    accel.inspect(hostile(tmp_path / "h.onnx"), page=tmp_path / "h.html")
    text = looked_at(tmp_path / "h.html", "#search=img")
    assert "<title>h.onnx</title>" in text
    assert "<img" not in text
    assert 'data-ready="4"' in text


def test_without_jinja(digits: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks that the error about a missing jinja2 names the extra to install."""
    from accel.errors import MissingExtra

    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(MissingExtra, match=r"accel-toolchain\[report\]"):
        accel.inspect(digits, page=tmp_path / "g.html")
