"""Optimizes a text model of transformers for this machine.

Run ``python examples/optimize_text.py [FOLDER]``. FOLDER is a folder that save_pretrained wrote. Without FOLDER, the
example optimizes a small BERT with random weights. The example needs accel-toolchain[openvino,report] and transformers.
"""

import sys
from pathlib import Path

import numpy as np

import accel


def small_bert(folder: Path) -> Path:
    """Writes a BERT with random weights, so that this example runs without a download."""
    from transformers import BertConfig, BertModel

    config = BertConfig(hidden_size=128, num_hidden_layers=2, num_attention_heads=4, intermediate_size=512)
    BertModel(config).eval().save_pretrained(folder)
    return folder


if __name__ == "__main__":
    source = Path(sys.argv[1]) if len(sys.argv) > 1 else small_bert(Path("bert"))
    # accel reads the model's inputs, and the dynamic dims batch and sequence, from the folder.
    model = accel.export(source, out="text.onnx", dims={"batch": (1, 1, 8), "sequence": (8, 64, 128)})
    print("inputs:", ", ".join(map(str, model.signature.inputs)))

    # Replace these arrays with the output of your tokenizer, one array for each input.
    shape = (32, 64)
    texts = {spec.name: np.ones(shape, "int64") for spec in model.signature.inputs}
    texts["input_ids"] = np.random.default_rng(0).integers(1000, 20000, shape)

    result = accel.optimize(model, data=texts, max_drop=0.02, out="text", budget_seconds=120)
    for row in result.candidates:
        print(f"{row.name:40} {row.status}")

    # Measures the speedup over the ONNX file at a batch of 1 and a length of 64.
    report = accel.bench(["text"], against="text.onnx", sizes={"batch": 1, "sequence": 64})
    for line in report.rows:
        print(f"{line.name:40} {line.median_ms:8.2f} ms  {line.speedup:5.2f}x")
