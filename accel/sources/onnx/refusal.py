"""Says in plain words why ONNX Runtime or the ONNX checker refuses a model."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from accel.errors import one_line, whole_sentences

if TYPE_CHECKING:
    import onnx

# Each row is a pattern of a library's message, and the plain text for the message. The groups of the pattern fill the
# text.
_PLAIN = (
    (r"Could not find an implementation for (\w+)\(\d+\) node with name '(.*?)'", "no kernel for {0} as in node {1!r}"),
    (
        r"Type parameter \(\w+\) of Optype \((\w+)\) bound to different types \((.*?) and (.*?)\)? in node \((.*?)\)",
        "node {3!r} ({0}) has inputs of the types {1} and {2}, which have to be equal",
    ),
    (
        r"Type '(.*?)' of input parameter \((.*?)\) of operator \((\w+)\) in node \((.*?)\) is invalid",
        "node {3!r} ({2}) takes no {0} as its input {1!r}",
    ),
    (r"No Op registered for (\w+) with domain_version of (\d+)", "the operator {0} doesn't exist at opset {1}"),
    (r"Fatal error: (\S+?):(\w+)\(-?\d+\) is not a registered function/op", "the operator {0}:{1} is unknown"),
    (r"Node \((.*?)\) Op \((\w+)\) \[ShapeInferenceError\] (.*)", "node {0!r} ({1}): {2}"),
    (r"Node input '(.*?)' is not a graph input, initializer, or output of a previous node", "nothing makes {0!r}"),
    (r"Protobuf parsing failed", "the file is no ONNX file, or it is cut off"),
    (r"returned while running (\S+) node\. Name:'(.*?)' Status Message: (.*)", "{0} {1!r}: {2}"),
)
# The place in the library's C++ code: a file with its line, a function, and the condition that failed.
_PLACE = re.compile(
    r"(?:Exception during initialization: )?\S+\.(?:h|cc|hpp|cpp):\d+ (?:[\w:~<>]+\(.*?\)(?: const)? |\w+ )"
    r"(?:\[ONNXRuntimeError\] : \d+ : \w+ : )?(?:.*? was false\. )?"
)


def plain_reason(error: BaseException) -> str:
    """Returns the reason in an error of ONNX Runtime or of the checker, without codes, paths and places in C++ code.

    The error itself, which is the cause of accel's error, keeps the library's text.
    """
    text = one_line(error, None)
    for pattern, plain in _PLAIN:
        if found := re.search(pattern, text):
            values = [re.sub(r"tensor\((\w+)\)?", r"\1", value) for value in found.groups()]
            text = plain.format(*values)
            break
    else:
        text = text.split(" : ", 3)[-1] if text.startswith("[ONNXRuntimeError]") else text
        text = re.sub(r"^(Load model from .*? failed: ?)?(This is an invalid model\. )?", "", text)
    return whole_sentences(_PLACE.sub("", text)).rstrip(" .")


def is_unknown_operator(error: Exception) -> bool:
    """Returns True if ``error`` from ``onnx.checker`` says that an operator has no schema. Only the text of the error
    identifies a missing schema."""
    return "No Op registered" in str(error) or "No opset import" in str(error)


def refused_by_checker(model: onnx.ModelProto | str, nodes: Callable[[], Iterable[onnx.NodeProto]]) -> str | None:
    """Returns the reason why ``onnx.checker`` refuses a model or the file at a path, or None. Also checks types and
    shapes. ``nodes`` returns the model's nodes, and is called only after a failure.

    The checker has no schemas of operators from other domains. Only a runtime can check these operators, so a model
    with such an operator isn't refused because of a missing schema.
    """
    import onnx

    try:
        onnx.checker.check_model(model, full_check=True)
    except Exception as error:
        foreign = any(node.domain not in ("", "ai.onnx", "ai.onnx.ml") for node in nodes())
        return None if foreign and is_unknown_operator(error) else plain_reason(error)
    return None
