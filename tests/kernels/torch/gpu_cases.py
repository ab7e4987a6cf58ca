"""Runs every kernel in a process under compute-sanitizer, on small sizes that don't fill a tile, and checks the
results."""

from __future__ import annotations

import sys

import torch

from accel.kernels.catalogue import reference
from accel.kernels.catalogue.spec import ConvSpec, EpilogueSpec, GemmSpec
from accel.kernels.choose import choices, dispatch, tune
from accel.kernels.native import launch as native_launch
from accel.kernels.triton import kernels as triton_kernels
from accel.kernels.triton import launch as triton_launch


def main() -> None:
    device = torch.device("cuda", 0)
    capability = torch.cuda.get_device_capability(device)
    ran = 0
    names = dispatch.native_names(capability)
    for dtype in ("fp16", "bf16", "int8", "fp8_e4m3"):
        flags = dict.fromkeys(("bias", "residual", "row_scale", "col_scale"), True)
        epilogue = EpilogueSpec(act="gelu_erf", out_dtype="bf16" if dtype == "bf16" else "fp16", **flags)
        for m, n, k in ((1, 8, 16), (7, 9, 33), (37, 40, 48), (130, 264, 80)):
            spec = GemmSpec(m=m, n=n, k=k, in_dtype=dtype, epilogue=epilogue)
            a, b, given = operands = tune.operands_for(spec, device)
            layout = {"tma_layout": dispatch.is_tma_layout(a, b), "dense": True}
            for config in choices.candidates(spec, capability, **layout, native=names):
                got = dispatch.run_config(spec, a, b, given, config)
                error = tune.largest_error(spec, operands, got)
                assert error <= 1, (config.name, spec, error)
                ran += 1
    for c_in, c_out in ((11, 13), (16, 24)):  # with 16 and 24 channels, im2col is a candidate, too
        shape = ConvSpec(images=2, height=7, width=5, c_in=c_in, c_out=c_out, kernel=(3, 2), stride=(2, 1))
        for conv in tune.conv_specs(["fp16", "int8"], ["silu"], [shape]):
            x, w, given = operands = tune.operands_for(conv, device)
            for config in choices.candidates(conv, capability, tma_layout=True, native=names):
                error = tune.largest_error(conv, operands, dispatch.run_config(conv, x, w, given, config))
                assert error <= 1, (config.name, conv, error)
                ran += 1
    rows = torch.randn(5, 37, device=device).half()
    for dtype in ("int8", "fp8_e4m3") if capability >= (8, 9) else ("int8",):
        by_triton = triton_launch.run_quantize(rows, dtype, triton_kernels)
        wanted = reference.quantize_rowwise_torch(rows, dtype)  # on the GPU, as dispatch runs it without a kernel
        by_hand = native_launch.run_quantize(rows, dtype) if names else by_triton
        for q, scale in (by_triton, by_hand):
            assert torch.equal(q.float(), wanted[0].float())
            assert torch.equal(scale, wanted[1])
            ran += 1
    torch.cuda.synchronize()
    print(f"{ran} kernels ran")
    sys.exit(0 if ran else 1)


if __name__ == "__main__":
    main()
