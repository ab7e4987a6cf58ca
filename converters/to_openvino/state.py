"""Moves the KV cache of a decoder into OpenVINO's state, in the form that openvino-genai reads."""

from __future__ import annotations

from typing import Any

from accel.signature.decoder import BEAMS, IDS, PAST_PREFIX, cache_names


def make_stateful(model: Any) -> None:
    """Replaces the inputs and outputs of the KV cache of the ``ov.Model`` by variables that the runtime keeps.

    A run reads the variables in the order of the rows that the new input ``beam_idx`` [batch] names. After a reset, the
    variables are empty: [batch, kv_heads, 0, head_dim].
    """
    import numpy as np
    import openvino.opset13 as opset
    from openvino.passes import MakeStateful, Manager

    names = {name for port in model.inputs for name in port.get_names()}
    layers = sum(name.startswith(PAST_PREFIX) for name in names) // 2
    pairs = dict(cache_names(layers))
    batch = model.input(IDS).get_partial_shape()[0]
    beams = opset.parameter([batch], np.int32, name=BEAMS)
    beams.output(0).get_tensor().set_names({BEAMS})
    model.add_parameters([beams])
    sizes: dict[str, list[int]] = {}
    for past, present in pairs.items():
        port = model.input(past)
        shape = port.get_partial_shape()
        # MakeStateful names a variable after both tensors.
        sizes[past + present] = [shape[axis].get_length() for axis in (1, 3)]
        readers = port.get_target_inputs()
        ordered = opset.gather(port, beams, opset.constant(np.int64(0)))
        for reader in readers:
            reader.replace_source_output(ordered.output(0))
    model.validate_nodes_and_infer_types()
    passes = Manager()
    passes.register_pass(MakeStateful(pairs))
    passes.run_passes(model)
    zero, one = (opset.constant(np.array([value], np.int64)) for value in (0, 1))
    rows = opset.slice(opset.shape_of(model.input(IDS), "i64"), zero, one, one)
    for node in model.get_ops():
        if node.get_type_name() == "ReadValue":
            heads, size = (opset.constant(np.array([each], np.int64)) for each in sizes[node.get_variable_id()])
            nothing = opset.constant(0.0, dtype=node.get_output_element_type(0))
            node.set_arguments([opset.broadcast(nothing, opset.concat([rows, heads, zero, size], 0))])
    model.validate_nodes_and_infer_types()
