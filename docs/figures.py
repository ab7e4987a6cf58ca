"""Draws the README's picture from the committed benchmark results of MiniLM: ``python docs/figures.py`` writes
docs/images/*.svg.

The left half shows the stages of accel. The right half plots every candidate of a real ``accel optimize`` run by its
latency and its task metric.
"""

from __future__ import annotations

import json
from html import escape
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RUN = HERE.parent / "benchmarks" / "results" / "minilm_cpu.json"
IMAGES = HERE / "images"

INKS = ("ink", "faint", "line", "box", "mark", "best")
COLORS = {
    "light": dict(zip(INKS, ("#1f2328", "#59636e", "#d1d9e0", "#f6f8fa", "#0969da", "#1a7f37"), strict=True)),
    "dark": dict(zip(INKS, ("#f0f6fc", "#9198a1", "#3d444d", "#151b23", "#4493f8", "#3fb950"), strict=True)),
}
STEPS = (
    ("your model", "PyTorch, TensorFlow, ONNX"),
    ("export", "ONNX, proven against the source"),
    ("cast, quantize, compile", "fp16, bf16, int8, int4"),
    ("judge and measure", "your metric, this machine"),
    ("the fastest that is right", "file, manifest, report"),
)
WIDTH, HEIGHT = 960, 330
LEFT, RIGHT, TOP, BOTTOM = 430, 930, 46, 270


def candidates() -> list[dict[str, Any]]:
    """Returns the name, the median latency in ms and the task metric of every candidate that was measured."""
    run = json.loads(RUN.read_text(encoding="utf-8"))["optimize"]
    chosen = run["chosen"]["name"]
    return [
        {
            "name": row["name"],
            "ms": row["measured"]["median_ms"],
            "metric": row["judgement"]["metric"],
            "chosen": row["name"] == chosen,
        }
        for row in run["candidates"]
        if row.get("measured") and row.get("judgement")
    ]


Box = tuple[float, float, float, float]


def _free_place(x: float, y: float, width: float, taken: list[Box]) -> tuple[float, float]:
    """Returns the position of a label of ``width`` pixels beside the point (x, y), and adds the label's box to
    ``taken``."""
    tries = [
        (x + 12, y + 4),
        (x - width / 2, y - 12),
        (x - width / 2, y + 22),
        (x - width - 12, y + 4),
        (x + 12, y + 22),
    ]
    for left, base in tries:
        box = (left, base - 10, left + width, base + 2)
        free = all(box[2] < a or c < box[0] or box[3] < b or d < box[1] for a, b, c, d in taken)
        if free and left + width < WIDTH and TOP - 16 < base < BOTTOM:
            break
    taken.append(box)
    return round(left, 1), round(base, 1)


def draw(theme: str) -> str:
    """Returns the picture as SVG text, for a light or a dark page."""
    color = COLORS[theme]

    def text(x: float, y: float, words: str, size: int = 13, fill: str = "ink", anchor: str = "start") -> str:
        style = f'font-size="{size}" fill="{color[fill]}" text-anchor="{anchor}"'
        return f'<text x="{x:g}" y="{y:g}" {style}>{escape(words)}</text>'

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        'font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif">',
        "<title>What accel does to a model, and the candidates of one real run</title>",
    ]
    for number, (title, note) in enumerate(STEPS):
        y = 14 + number * 62
        last = number == len(STEPS) - 1
        edge = color["best"] if last else color["line"]
        parts.append(f'<rect x="14" y="{y}" width="310" height="46" rx="8" fill="{color["box"]}" stroke="{edge}"/>')
        parts += [text(28, y + 20, title, 14), text(28, y + 37, note, 12, "faint")]
        if not last:
            parts.append(f'<path d="M169 {y + 46} v12 m-4 -5 l4 5 l4 -5" fill="none" stroke="{color["faint"]}"/>')
    rows = candidates()
    most = max(row["ms"] for row in rows) * 1.1
    metrics = [row["metric"] for row in rows]
    low, high = min(metrics), max(metrics)
    low, high = low - (high - low) * 0.2, high + (high - low) * 0.2

    def at(row: dict[str, Any]) -> tuple[float, float]:
        x = LEFT + (RIGHT - LEFT) * row["ms"] / most
        return round(x, 1), round(BOTTOM - (BOTTOM - TOP) * (row["metric"] - low) / (high - low), 1)

    parts.append(text(LEFT, 26, "MiniLM, batch 1, 128 tokens: every candidate of one run", 14))
    parts.append(f'<path d="M{LEFT} {TOP} V{BOTTOM} H{RIGHT}" fill="none" stroke="{color["line"]}"/>')
    for ms in range(0, int(most) + 1, 5):
        x = LEFT + (RIGHT - LEFT) * ms / most
        parts.append(f'<path d="M{x:.1f} {BOTTOM} v5" stroke="{color["line"]}"/>')
        parts.append(text(round(x, 1), BOTTOM + 20, str(ms), 12, "faint", "middle"))
    parts.append(text((LEFT + RIGHT) / 2, BOTTOM + 42, "median latency, ms (less is better)", 12, "faint", "middle"))
    parts.append(text(LEFT - 10, TOP + 4, f"{high:.3f}", 12, "faint", "end"))
    parts.append(text(LEFT - 10, BOTTOM, f"{low:.3f}", 12, "faint", "end"))
    parts.append(text(LEFT - 10, (TOP + BOTTOM) / 2, "metric", 12, "faint", "end"))
    places = [at(row) for row in rows]
    taken = [(x - 6, y - 6, x + 6, y + 6) for x, y in places]
    for row, (x, y) in sorted(zip(rows, places, strict=True), key=lambda pair: pair[1]):
        fill = "best" if row["chosen"] else "mark"
        parts.append(f'<circle cx="{x}" cy="{y}" r="{7 if row["chosen"] else 5}" fill="{color[fill]}"/>')
        name = f"{row['name']} (chosen)" if row["chosen"] else row["name"]
        across, down = _free_place(x, y, 6.6 * len(name), taken)
        parts.append(text(across, down, name, 12, "best" if row["chosen"] else "ink"))
    return "\n".join([*parts, "</svg>", ""])


if __name__ == "__main__":
    IMAGES.mkdir(exist_ok=True)
    for theme in COLORS:
        (IMAGES / f"overview-{theme}.svg").write_text(draw(theme), encoding="utf-8")
