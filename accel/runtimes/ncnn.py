"""Runs ncnn models on the CPU through ncnn's Python binding, one sample at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel.artifact import Artifact
from accel.errors import BadFeeds, InvalidModel
from accel.signature import Feeds, Signature, numpy_dtype

from .base import BaseSession, SessionOptions

if TYPE_CHECKING:
    import numpy as np


class NcnnSession(BaseSession):
    """An ncnn net in float32. The samples of a batch run one after the other, because ncnn has no batch dim.

    Inside ncnn, the inputs and outputs are called ``in0``, ``out0``, ... in the order of the signature.
    """

    def __init__(self, artifact: Artifact, options: SessionOptions) -> None:
        super().__init__(artifact, options)
        self.net = Net(artifact.path, artifact.signature, options.threads)

    def _run(self, feeds: Feeds) -> dict[str, np.ndarray]:
        return self.net.run(feeds)

    def close(self) -> None:
        """Free the net."""
        super().close()
        self.net.net = None


class Net:
    """A loaded net."""

    def __init__(self, path: Path, signature: Signature, threads: int = 0) -> None:
        import ncnn

        self.signature = signature
        self.net: Any = ncnn.Net()
        # The net is verified and shipped in float32. By default, ncnn computes in 16 bits on CPUs with 16-bit
        # arithmetic.
        for name in (
            "use_fp16_packed",
            "use_fp16_storage",
            "use_fp16_arithmetic",
            "use_bf16_storage",
            "use_vulkan_compute",
        ):
            if hasattr(self.net.opt, name):
                setattr(self.net.opt, name, False)
        if threads:
            self.net.opt.num_threads = threads
        weights = path.with_suffix(".bin")
        if self.net.load_param(str(path)) != 0 or self.net.load_model(str(weights)) != 0:
            raise InvalidModel(f"ncnn can't load {path} with {weights.name}; convert the model again")

    def run(self, feeds: Feeds) -> dict[str, np.ndarray]:
        """Returns the outputs of a batch by name."""
        import numpy as np

        batch = {len(value) for value in feeds.values()}
        if len(batch) != 1:
            raise BadFeeds("the first dim of all inputs of an ncnn net has to be the same batch size")
        rows = [self._sample({name: value[i] for name, value in feeds.items()}) for i in range(batch.pop())]
        return {spec.name: np.stack([row[spec.name] for row in rows]) for spec in self.signature.outputs}

    def shapes(self, feeds: Feeds, names: Iterable[str]) -> dict[str, tuple[int, ...]]:
        """Returns the shape of each blob of ``names`` for one sample. Leaves out blobs that ncnn doesn't have."""
        import numpy as np

        found = {}
        with self._fed(feeds) as extractor:
            extractor.set_light_mode(False)  # without light mode, ncnn keeps the intermediate blobs
            for name in names:
                code, mat = extractor.extract(name)
                if code == 0:
                    found[name] = tuple(int(n) for n in np.array(mat).shape)
        return found

    @contextmanager
    def _fed(self, feeds: Feeds) -> Iterator[Any]:
        """Yields an extractor with the inputs of one sample."""
        import ncnn
        import numpy as np

        # A Mat may point into its array, so the Mat and the array have to live as long as the extractor.
        held = []
        with self.net.create_extractor() as extractor:
            for index, spec in enumerate(self.signature.inputs):
                value = np.ascontiguousarray(feeds[spec.name])
                if value.dtype == np.int64:
                    value = value.astype(np.int32)
                held.append((value, ncnn.Mat(value).clone()))
                extractor.input(f"in{index}", held[-1][1])
            yield extractor

    def _sample(self, feeds: Feeds) -> dict[str, np.ndarray]:
        import numpy as np

        found = {}
        with self._fed(feeds) as extractor:
            for index, spec in enumerate(self.signature.outputs):
                code, mat = extractor.extract(f"out{index}")
                if code != 0:
                    raise InvalidModel(
                        f"ncnn stopped before the output {spec.name!r} (code {code}); convert the model again"
                    )
                found[spec.name] = np.array(mat).astype(numpy_dtype(spec.dtype))
        return found
