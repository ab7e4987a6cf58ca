"""Lists the configs of the distributed checks for each world size, and the configs that `make test` runs."""

from __future__ import annotations

from tempfile import gettempdir

from tests.support.runs import SMALL

STEPS, HALF = 10, 5
WORLDS = (2, 4, 8)

UNEVEN = [f"data={SMALL}:few", "drop_last=false"]
PACKED = [f"data={SMALL}:documents", "pack=16"]
DISTILLED = [f"distillation.teacher={SMALL}:teacher", "distillation.hidden=0.01", "distillation.attention=0.1"]
EXPERTS = [f"model={SMALL}:moe", "experts.balance=0.1", "experts.z=0.01"]
DISK = f"parallel.disk={gettempdir()}"  # the files have no names, so nothing is left
FP8 = ["precision.fp8=delayed", "precision.fp8_history=3"]
POWER_SGD = ["parallel.compression=powersgd", "parallel.compression_rank=2", "parallel.compression_start=2"]

# Maps a name to the overrides of a config. Every config uses the same global batches as the one-process run.
ROWS: dict[str, list[str]] = {
    "ZeRO 0 (DDP)": ["parallel.zero=0"],
    "ZeRO 1": ["parallel.zero=1"],
    "ZeRO 2": ["parallel.zero=2"],
    "ZeRO 3": ["parallel.zero=3"],
    "ZeRO 0, accumulation": ["parallel.zero=0", "micro_batch=1"],
    "ZeRO 1, accumulation": ["parallel.zero=1", "micro_batch=1"],
    "ZeRO 2, accumulation": ["parallel.zero=2", "micro_batch=1"],
    "ZeRO 3, accumulation": ["parallel.zero=3", "micro_batch=1"],
    "ZeRO 0, clipping": ["parallel.zero=0", "optimizer.clip=0.1"],
    "ZeRO 3, clipping": ["parallel.zero=3", "optimizer.clip=0.1"],
    "ZeRO 3, full recomputation": ["parallel.zero=3", "parallel.recompute=full"],
    "ZeRO 1, selective recomputation": ["parallel.zero=1", "parallel.recompute=selective"],
    "ZeRO 3, CPU offload": ["parallel.zero=3", "parallel.offload=true"],
    "ZeRO 3, states on the disk": ["parallel.zero=3", DISK],
    "ZeRO 3, parameters on the disk, accumulation, clipping": [
        "parallel.zero=3", DISK, "parallel.disk_parameters=true", "micro_batch=1", "optimizer.clip=0.1",
    ],
    "ZeRO 0, fp8, delayed": FP8,
    "ZeRO 3, fp8, delayed": ["parallel.zero=3", *FP8],
    "ZeRO 0, uneven last batch": UNEVEN,
    "ZeRO 3, uneven last batch": ["parallel.zero=3", *UNEVEN],
    "ZeRO 3, packed documents, full recomputation": ["parallel.zero=3", "parallel.recompute=full", *PACKED],
    "ZeRO 3, autocast-bf16": ["parallel.zero=3", "precision.mode=autocast-bf16"],
    "ZeRO 0, autocast-fp16": ["parallel.zero=0", "precision.mode=autocast-fp16", "precision.loss_scale=1024"],
    "ZeRO 2, bf16 with master weights": ["parallel.zero=2", "precision.mode=bf16"],
    "ZeRO 3, fp16 with master weights (O2)": ["parallel.zero=3", "precision.mode=O2", "precision.loss_scale=1024"],
    "ZeRO 3, fp16-only (O3)": ["parallel.zero=3", "precision.mode=O3", "precision.loss_scale=1024"],
}  # fmt: skip
OWN_MODEL = f"model={SMALL}:decoder"
MASKED = f"model={SMALL}:masked"
WINDOWED = f"model={SMALL}:windowed"
RING = ["parallel.cp=2", "parallel.cp_method=ring"]
NORMED = f"model={SMALL}:normed"
LLAMA, PAIRED_LLAMA = f"model={SMALL}:llama", f"model={SMALL}:paired_llama"
WHOLE = "parallel.sequence_parallel=false"
SCALED = ["precision.loss_scale=1024"]
SIXTEEN = {
    "autocast-bf16": ["precision.mode=autocast-bf16"],
    "autocast-fp16 (O1)": ["precision.mode=O1", *SCALED],
    "bf16 with master weights": ["precision.mode=bf16"],
    "fp16 with master weights (O2)": ["precision.mode=O2", *SCALED],
    "bf16-only": ["precision.mode=bf16-only"],
    "fp16-only (O3)": ["precision.mode=O3", *SCALED],
}
# Each row holds the name of a parallel axis, its override, and the 16-bit modes tested with the axis. The axis with the
# fastest steps is tested with all modes.
AXES = (
    ("TP 2", "parallel.tp=2", ("bf16 with master weights", "fp16-only (O3)")),
    ("PP 2", "parallel.pp=2", tuple(SIXTEEN)),
    ("CP 2 (Ulysses)", "parallel.cp=2", ("autocast-bf16", "fp16 with master weights (O2)", "bf16-only")),
)
# Each of these configs runs at only one world size.
ONLY: dict[int, dict[str, list[str]]] = {
    2: {
        "TP 2, sequence parallel": ["parallel.tp=2"],
        "TP 2, no sequence parallel": ["parallel.tp=2", "parallel.sequence_parallel=false"],
        "TP 2, accumulation, clipping": ["parallel.tp=2", "micro_batch=2", "optimizer.clip=0.1"],
        "TP 2, another decoder": [OWN_MODEL, "parallel.tp=2"],
        "TP 2, another decoder, no sequence parallel": [
            OWN_MODEL, "parallel.tp=2", "parallel.sequence_parallel=false",
        ],
        "TP 2, a loss of one's own": ["parallel.tp=2", f"loss={SMALL}:own_loss"],
        "TP 2, uneven last batch": ["parallel.tp=2", "micro_batch=4", *UNEVEN],
        "TP 2, packed documents": ["parallel.tp=2", *PACKED],
        "CP 2 (Ulysses) x ZeRO 3, uneven last batch": ["parallel.cp=2", "parallel.zero=3", "micro_batch=4", *UNEVEN],
        "PP 2, GPipe": ["parallel.pp=2", "parallel.pipeline=gpipe"],
        "PP 2, 1F1B, clipping": ["parallel.pp=2", "micro_batch=1", "optimizer.clip=0.1"],
        "PP 2, measured stages": ["parallel.pp=2", "parallel.pipeline_split=measured"],
        "PP 2, interleaved": ["parallel.pp=2", "parallel.pipeline=interleaved"],
        "PP 2, zero-bubble": ["parallel.pp=2", "parallel.pipeline=zero-bubble"],
        "PP 2, interleaved, bf16 with master weights": [
            "parallel.pp=2", "parallel.pipeline=interleaved", "precision.mode=bf16",
        ],
        "PP 2, full recomputation": ["parallel.pp=2", "parallel.recompute=full"],
        "CP 2 (Ulysses) x ZeRO 0": ["parallel.cp=2"],
        "CP 2 (Ulysses) x ZeRO 3, full recomputation, clipping": [
            "parallel.cp=2", "parallel.zero=3", "parallel.recompute=full", "optimizer.clip=0.1",
        ],
        "ZeRO 0, gradients sent in bf16": ["parallel.compression=bf16"],
        "ZeRO 0, gradients sent in fp16": ["parallel.compression=fp16"],
        "ZeRO 0, PowerSGD of rank 4 from step 5": [
            "parallel.compression=powersgd", "parallel.compression_rank=4", "parallel.compression_start=5",
        ],
        "ZeRO 3, compiled blocks": ["parallel.zero=3", "compile=true"],
        "ZeRO 3, bf16-only": ["parallel.zero=3", "precision.mode=bf16-only"],
        "ZeRO 0, distilled": DISTILLED,
        "ZeRO 3, distilled": ["parallel.zero=3", *DISTILLED],
        "TP 2, norms over heads, no sequence parallel": [NORMED, "parallel.tp=2", WHOLE],
        "CP 2 (Ulysses) x ZeRO 0, Llama": [LLAMA, "parallel.cp=2", "parallel.cp_split=model.embed_tokens"],
        "CP 2 (ring) x ZeRO 0, Llama": [LLAMA, *RING, "parallel.cp_split=model.embed_tokens, model.rotary_emb"],
        "CP 2 (ring) x ZeRO 0": ["parallel.cp=2", "parallel.cp_method=ring"],
        "CP 2 (ring) x ZeRO 3, full recomputation, clipping": [
            "parallel.cp=2", "parallel.cp_method=ring", "parallel.zero=3", "parallel.recompute=full",
            "optimizer.clip=0.1",
        ],
        "CP 2 (ring) x ZeRO 3, full recomputation, masks": [
            MASKED, "parallel.cp=2", "parallel.cp_method=ring", "parallel.zero=3", "parallel.recompute=full",
        ],
        "CP 2 (Ulysses) x ZeRO 0, masks": [MASKED, "parallel.cp=2"],
        "ZeRO 0, experts": [*EXPERTS, "micro_batch=4"],
        "EP 2 x ZeRO 1, experts": ["parallel.ep=2", "parallel.zero=1", *EXPERTS, "micro_batch=4"],
        "TP 2, paired Llama, no sequence parallel": [PAIRED_LLAMA, "parallel.tp=2", WHOLE],
        "TP 2, experts": ["parallel.tp=2", *EXPERTS],
        "TP 2, experts, clipping, no sequence parallel": ["parallel.tp=2", "optimizer.clip=0.1", *EXPERTS, WHOLE],
        "EP 2 x ZeRO 3, full recomputation, experts, clipping": [
            "parallel.ep=2", "parallel.zero=3", "parallel.recompute=full", "optimizer.clip=0.1", *EXPERTS,
            "micro_batch=4",
        ],
        **{f"{axis}, {mode}": [cut, *SIXTEEN[mode]] for axis, cut, modes in AXES for mode in modes},
        **{f"{axis}, selective recomputation": [cut, "parallel.recompute=selective"] for axis, cut, _ in AXES},
        "ZeRO 1, CPU offload": ["parallel.zero=1", "parallel.offload=true"],
        "ZeRO 2, CPU offload, accumulation": ["parallel.zero=2", "parallel.offload=true", "micro_batch=1"],
        "CP 2 (Ulysses) x ZeRO 3, CPU offload": ["parallel.cp=2", "parallel.zero=3", "parallel.offload=true"],
    },
    4: {
        "ZeRO 3 in 2 replicas (HSDP)": ["parallel.zero=3", "parallel.replicate=2"],
        "ZeRO 1 in 2 replicas, clipping": ["parallel.zero=1", "parallel.replicate=2", "optimizer.clip=0.1"],
        "ZeRO 3, hpZ 2": ["parallel.zero=3", "parallel.hpz=2"],
        "ZeRO 3, qwZ (int8 gather)": ["parallel.zero=3", "parallel.qwz=true"],
        "ZeRO 3, qgZ (int8 reduction)": ["parallel.zero=3", "parallel.qgz=true"],
        "ZeRO 3, hpZ 2, qwZ, qgZ": ["parallel.zero=3", "parallel.hpz=2", "parallel.qwz=true", "parallel.qgz=true"],
        "TP 2 x ZeRO 0": ["parallel.tp=2"],
        "TP 2 x ZeRO 3, another decoder": [OWN_MODEL, "parallel.tp=2", "parallel.zero=3"],
        "TP 2 x ZeRO 1, accumulation": ["parallel.tp=2", "parallel.zero=1", "micro_batch=2"],
        "TP 2 x ZeRO 3, clipping": ["parallel.tp=2", "parallel.zero=3", "optimizer.clip=0.1"],
        "TP 2 x ZeRO 3, full recomputation": ["parallel.tp=2", "parallel.zero=3", "parallel.recompute=full"],
        "TP 2 x ZeRO 3, autocast-bf16": ["parallel.tp=2", "parallel.zero=3", "precision.mode=autocast-bf16"],
        "PP 2 x ZeRO 0, 1F1B": ["parallel.pp=2"],
        "PP 2 x ZeRO 1, interleaved, measured stages": [
            "parallel.pp=2", "parallel.zero=1", "parallel.pipeline=interleaved", "parallel.pipeline_split=measured",
        ],
        "PP 2 x ZeRO 1, interleaved": ["parallel.pp=2", "parallel.zero=1", "parallel.pipeline=interleaved"],
        "PP 2 x ZeRO 2, zero-bubble, clipping": [
            "parallel.pp=2", "parallel.zero=2", "parallel.pipeline=zero-bubble", "micro_batch=1", "optimizer.clip=0.1",
        ],
        "PP 2 x ZeRO 1, fp16 with master weights": [
            "parallel.pp=2", "parallel.zero=1", "precision.mode=fp16", "precision.loss_scale=1024",
        ],
        "PP 2 x TP 2, zero-bubble, clipping": [
            "parallel.pp=2", "parallel.tp=2", "parallel.pipeline=zero-bubble", "optimizer.clip=0.1",
        ],
        "CP 2 (Ulysses) x ZeRO 3 in 2 replicas": ["parallel.cp=2", "parallel.zero=3", "parallel.replicate=2"],
        "ZeRO 3 in 2 replicas, CPU offload, selective recomputation": [
            "parallel.zero=3", "parallel.replicate=2", "parallel.offload=true", "parallel.recompute=selective",
        ],
        "ZeRO 3 in 2 replicas, qwZ, qgZ": [
            "parallel.zero=3", "parallel.replicate=2", "parallel.qwz=true", "parallel.qgz=true",
        ],
        "TP 2 x ZeRO 3, CPU offload": ["parallel.tp=2", "parallel.zero=3", "parallel.offload=true"],
        "PP 2 x ZeRO 1, CPU offload": ["parallel.pp=2", "parallel.zero=1", "parallel.offload=true"],
        "ZeRO 3 in 2 replicas, bf16 with master weights": [
            "parallel.zero=3", "parallel.replicate=2", "precision.mode=bf16",
        ],
        "ZeRO 3, hpZ 2, bf16 with master weights": ["parallel.zero=3", "parallel.hpz=2", "precision.mode=bf16"],
        "ZeRO 3, qwZ, qgZ, bf16 with master weights": [
            "parallel.zero=3", "parallel.qwz=true", "parallel.qgz=true", "precision.mode=bf16",
        ],
        "ZeRO 3, CPU offload, bf16 with master weights": [
            "parallel.zero=3", "parallel.offload=true", "precision.mode=bf16",
        ],
        "EP 2 x ZeRO 3, experts": ["parallel.ep=2", "parallel.zero=3", *EXPERTS],
        "CP 4 (ring) x ZeRO 1, masks": [MASKED, "parallel.cp=4", "parallel.cp_method=ring", "parallel.zero=1"],
        "CP 4 (ring) x ZeRO 1": ["parallel.cp=4", "parallel.cp_method=ring", "parallel.zero=1"],
        "TP 2 x EP 2 x ZeRO 1, experts, clipping": [
            "parallel.tp=2", "parallel.ep=2", "parallel.zero=1", "optimizer.clip=0.1", *EXPERTS,
        ],
        "TP 2 x EP 2 x ZeRO 3, full recomputation, experts, no sequence parallel": [
            "parallel.tp=2", "parallel.ep=2", "parallel.zero=3", "parallel.recompute=full", *EXPERTS, WHOLE,
        ],
        "TP 2 x ZeRO 3, experts": ["parallel.tp=2", "parallel.zero=3", *EXPERTS],
        "EP 4 x ZeRO 1, experts, clipping": ["parallel.ep=4", "parallel.zero=1", "optimizer.clip=0.1", *EXPERTS],
        "PP 4, GPipe": ["parallel.pp=4", "parallel.pipeline=gpipe"],
        "CP 2 (Ulysses) x TP 2, sequence parallel": ["parallel.cp=2", "parallel.tp=2"],
        "CP 2 (ring) x TP 2, sequence parallel, two modules cut, clipping": [
            *RING, "parallel.tp=2", "parallel.cp_split=embed.tokens, embed.positions", "optimizer.clip=0.1",
        ],
        "CP 2 (Ulysses) x TP 2, no sequence parallel": ["parallel.cp=2", "parallel.tp=2", WHOLE],
        "CP 2 (ring) x TP 2, no sequence parallel": [*RING, "parallel.tp=2", WHOLE],
        "CP 2 (Ulysses) x TP 2 x ZeRO 3, full recomputation": [
            "parallel.cp=2", "parallel.tp=2", "parallel.zero=3", "parallel.recompute=full",
        ],
        "CP 2 (ring) x TP 2 x ZeRO 2, windows": [*RING, "parallel.tp=2", "parallel.zero=2", WINDOWED],
        "CP 2 (Ulysses) x TP 2 x ZeRO 1, windows, accumulation": [
            "parallel.cp=2", "parallel.tp=2", "parallel.zero=1", "micro_batch=2", WINDOWED,
        ],
        "CP 2 (Ulysses) x TP 2, norms over heads": [NORMED, "parallel.cp=2", "parallel.tp=2"],
        "CP 2 (Ulysses) x PP 2, GPipe": ["parallel.cp=2", "parallel.pp=2", "parallel.pipeline=gpipe"],
        "CP 2 (ring) x PP 2 x ZeRO 1, 1F1B, clipping": [
            *RING, "parallel.pp=2", "parallel.zero=1", "micro_batch=1", "optimizer.clip=0.1",
        ],
        "CP 2 (Ulysses) x PP 2 x ZeRO 2, interleaved": [
            "parallel.cp=2", "parallel.pp=2", "parallel.zero=2", "parallel.pipeline=interleaved",
        ],
        "CP 2 (ring) x PP 2, interleaved, measured stages": [
            *RING, "parallel.pp=2", "parallel.pipeline=interleaved", "parallel.pipeline_split=measured",
        ],
        "CP 2 (Ulysses) x PP 2, zero-bubble": ["parallel.cp=2", "parallel.pp=2", "parallel.pipeline=zero-bubble"],
        "CP 2 (ring) x PP 2 x ZeRO 1, zero-bubble, full recomputation, windows": [
            *RING, "parallel.pp=2", "parallel.zero=1", "parallel.pipeline=zero-bubble", "parallel.recompute=full",
            WINDOWED,
        ],
        "CP 2 (Ulysses) x PP 2, 1F1B, selective recomputation, windows": [
            "parallel.cp=2", "parallel.pp=2", "parallel.recompute=selective", WINDOWED,
        ],
    },
    8: {
        "PP 2 x ZeRO 1 x TP 2, 1F1B, clipping": [
            "parallel.pp=2", "parallel.tp=2", "parallel.zero=1", "optimizer.clip=0.1",
        ],
        "TP 2 x EP 2 x ZeRO 2, experts": ["parallel.tp=2", "parallel.ep=2", "parallel.zero=2", *EXPERTS],
        "TP 2 x ZeRO 3 in 2 replicas": ["parallel.tp=2", "parallel.zero=3", "parallel.replicate=2"],
        "PP 2 x ZeRO 1 in 2 replicas": ["parallel.pp=2", "parallel.zero=1", "parallel.replicate=2", "micro_batch=1"],
        "ZeRO 3 in 2 replicas, hpZ 2": [
            "parallel.zero=3", "parallel.replicate=2", "parallel.hpz=2", "micro_batch=1",
        ],
        "CP 2 (Ulysses) x PP 2 x TP 2, 1F1B": ["parallel.cp=2", "parallel.pp=2", "parallel.tp=2"],
        "CP 2 (ring) x PP 2 x TP 2 x ZeRO 2, zero-bubble, windows": [
            *RING, "parallel.pp=2", "parallel.tp=2", "parallel.zero=2", "parallel.pipeline=zero-bubble", WINDOWED,
        ],
        "CP 2 (ring) x PP 2 x TP 2 x ZeRO 1, interleaved, no sequence parallel, clipping": [
            *RING, "parallel.pp=2", "parallel.tp=2", "parallel.zero=1", "parallel.pipeline=interleaved", WHOLE,
            "optimizer.clip=0.1",
        ],
        "CP 2 (Ulysses) x TP 2 x ZeRO 3 in 2 replicas": [
            "parallel.cp=2", "parallel.tp=2", "parallel.zero=3", "parallel.replicate=2",
        ],
    },
}  # fmt: skip

# SAVED holds the layouts that save a checkpoint, by world size. TAKEN_UP holds the layouts that resume from a
# checkpoint.
SAVED = {
    2: {"ddp": ["parallel.zero=0"], "zero1": ["parallel.zero=1"], "pp": ["parallel.pp=2"]},
    4: {
        "zero3": ["parallel.zero=3"],
        "hsdp": ["parallel.zero=3", "parallel.replicate=2"],
        "tp_fsdp": ["parallel.tp=2", "parallel.zero=3"],
        "pp_tp": ["parallel.pp=2", "parallel.tp=2", "parallel.pipeline=interleaved", "micro_batch=4"],
        "cp_tp": [*RING, "parallel.tp=2", "parallel.zero=1"],
    },
}
TAKEN_UP = {
    2: {**SAVED[2], "tp": ["parallel.tp=2"], "zero3": ["parallel.zero=3"]},
    4: {**SAVED[4], "ddp": ["parallel.zero=0"], "cp_pp": ["parallel.cp=2", "parallel.pp=2"]},
}
# These overrides train bfloat16 weights with AdamW on float32 copies. Two ranks save the optimizer's state, and four
# ranks must load exactly the same state.
ADAMW = ["optimizer.name=adamw", "optimizer.lr=0.01", "precision.mode=bf16"]
# For each layout of GRADIENTS, the gradient of the first SGD step must equal the gradient on one process.
GRADIENTS = {
    2: {
        "ddp": [],
        "zero1": ["parallel.zero=1"],
        "zero2": ["parallel.zero=2"],
        "zero3": ["parallel.zero=3"],
        "tp": ["parallel.tp=2"],
        "cp": ["parallel.cp=2"],
        "pp": ["parallel.pp=2", "parallel.pipeline=zero-bubble"],
    },
    4: {"ddp": [], **SAVED[4]},
}


# `make test` runs the configs in FAST. FAST contains each technique at the smallest world size at which the technique
# can fail. `make proof` runs the other configs.
FAST: dict[int, tuple[str, ...]] = {
    2: (
        "ZeRO 0, accumulation",
        "ZeRO 1, accumulation",
        "ZeRO 2, accumulation",
        "ZeRO 3, accumulation",
        "ZeRO 0, clipping",
        "ZeRO 3, clipping",
        "ZeRO 3, full recomputation",
        "ZeRO 1, selective recomputation",
        "ZeRO 3, CPU offload",
        "ZeRO 0, uneven last batch",
        "ZeRO 3, uneven last batch",
        "ZeRO 3, packed documents, full recomputation",
        "ZeRO 3, autocast-bf16",
        "ZeRO 0, autocast-fp16",
        "ZeRO 2, bf16 with master weights",
        "ZeRO 3, fp16 with master weights (O2)",
        "ZeRO 3, fp16-only (O3)",
        "TP 2, sequence parallel",
        "TP 2, no sequence parallel",
        "TP 2, another decoder",
        "TP 2, a loss of one's own",
        "PP 2, GPipe",
        "PP 2, 1F1B, clipping",
        "PP 2, interleaved",
        "PP 2, zero-bubble",
        "PP 2, full recomputation",
        "PP 2, autocast-fp16 (O1)",
        "CP 2 (Ulysses) x ZeRO 0",
        "CP 2 (Ulysses) x ZeRO 3, full recomputation, clipping",
        "ZeRO 0, gradients sent in bf16",
        "ZeRO 0, gradients sent in fp16",
        "ZeRO 0, PowerSGD of rank 4 from step 5",
        "ZeRO 3, distilled",
        "CP 2 (ring) x ZeRO 0",
        "CP 2 (Ulysses) x ZeRO 0, Llama",
        "CP 2 (ring) x ZeRO 0, Llama",
        "TP 2, norms over heads, no sequence parallel",
        "ZeRO 0, experts",
        "EP 2 x ZeRO 1, experts",
        "EP 2 x ZeRO 3, full recomputation, experts, clipping",
        "TP 2, paired Llama, no sequence parallel",
        "TP 2, experts",
        "TP 2, experts, clipping, no sequence parallel",
    ),
    4: (
        "ZeRO 3",
        "ZeRO 3 in 2 replicas (HSDP)",
        "ZeRO 3, hpZ 2, qwZ, qgZ",
        "TP 2 x ZeRO 3, clipping",
        "PP 2 x ZeRO 0, 1F1B",
        "PP 2 x ZeRO 2, zero-bubble, clipping",
        "PP 2 x TP 2, zero-bubble, clipping",
        "PP 4, GPipe",
        "EP 2 x ZeRO 3, experts",
        "TP 2 x EP 2 x ZeRO 1, experts, clipping",
        "TP 2 x EP 2 x ZeRO 3, full recomputation, experts, no sequence parallel",
        "CP 2 (ring) x TP 2, sequence parallel, two modules cut, clipping",
        "CP 2 (Ulysses) x PP 2 x ZeRO 2, interleaved",
    ),
}
# `make test` checks the layouts in FAST_GRADIENTS.
FAST_GRADIENTS = {2: tuple(GRADIENTS[2]), 4: ("hsdp", "tp_fsdp", "pp_tp", "cp_tp")}
# In each run of RESUMED, a layout of SAVED saves a checkpoint, and a layout of TAKEN_UP resumes from it. Every layout
# saves and resumes at least twice. A checkpoint doesn't depend on the layout that will read it, so the other pairs are
# left out. `make test` runs FAST_RESUMED, in which every layout saves and resumes at least once.
FAST_RESUMED = (
    "world2 ddp -> 4 zero3",
    "world2 zero1 -> 4 hsdp",
    "world2 pp -> 4 tp_fsdp",
    "world4 hsdp -> 4 pp_tp",
    "world4 pp_tp -> 4 ddp",
    "world4 zero3 -> 2 pp",
    "world4 pp_tp -> 2 zero1",
    "world4 hsdp -> 2 ddp",
    "world4 tp_fsdp -> 2 zero3",
    "world2 pp -> 2 tp",
    "world4 cp_tp -> 4 cp_pp",
    "world2 ddp -> 4 cp_tp",
)
RESUMED = (
    *FAST_RESUMED,
    "world2 zero1 -> 4 pp_tp",
    "world2 ddp -> 2 zero1",
    "world2 zero1 -> 2 pp",
    "world2 pp -> 4 ddp",
    "world4 zero3 -> 4 cp_tp",
    "world4 zero3 -> 2 zero3",
    "world4 hsdp -> 4 zero3",
    "world4 tp_fsdp -> 4 hsdp",
    "world4 tp_fsdp -> 2 ddp",
    "world4 pp_tp -> 4 cp_pp",
    "world4 cp_tp -> 4 tp_fsdp",
    "world4 cp_tp -> 2 tp",
)


def of(world: int) -> dict[str, list[str]]:
    """Returns all configs that run on ``world`` ranks."""
    return {**(ROWS if world in (2, 4) else {}), **ONLY[world]}
