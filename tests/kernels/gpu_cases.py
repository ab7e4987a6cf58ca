"""Run in a process of its own, under compute-sanitizer: every kernel on small ragged problems, results checked."""

from __future__ import annotations

import sys

import torch

from accel.kernels import dispatch, reference, triton_kernels, triton_launch, tune
from accel.kernels.configs import CONFIGS
from accel.kernels.spec import ConvSpec, EpilogueSpec, GemmSpec


def main() -> None:
    device = torch.device("cuda", 0)
    capability = torch.cuda.get_device_capability(device)
    ran = 0
    for dtype in ("fp16", "int8"):
        out = "fp16"
        flags = dict.fromkeys(("bias", "residual", "row_scale", "col_scale"), True)
        epilogue = EpilogueSpec(act="gelu_erf", out_dtype=out, **flags)
        for m, n, k in ((1, 8, 16), (37, 40, 48), (130, 264, 80)):
            spec = GemmSpec(m=m, n=n, k=k, in_dtype=dtype, epilogue=epilogue)
            a, b, given = operands = tune.operands_for(spec, device)
            usable = dispatch.candidates(spec, capability, tma_layout=True, native=dispatch.native_names(capability))
            for config in usable:
                got = dispatch.run_config(spec, a, b, given, config)
                error = tune.largest_error(spec, operands, got)
                assert error <= 1, (config.name, spec, error)
                ran += 1
    sizes = {"images": 2, "height": 7, "width": 5, "c_in": 11, "c_out": 13}
    conv = ConvSpec(**sizes, kernel=(3, 2), stride=(2, 1), padding=(1, 1), epilogue=EpilogueSpec(act="silu"))
    x, w = torch.randn(2, 7, 5, 11, device=device).half(), torch.randn(13, 3, 2, 11, device=device).half()
    for config in (c for c in CONFIGS if c.op == "conv2d"):
        got = triton_launch.run_conv2d(conv, x, w, {}, config, triton_kernels)
        exact = reference.conv2d_torch(conv, x, w, {})
        assert float((got.double() - exact).abs().max()) <= 2e-3 * float(exact.abs().max())
        ran += 1
    triton_launch.run_quantize(x.reshape(-1, 11), "int8", triton_kernels)
    torch.cuda.synchronize()
    print(f"{ran} kernels ran")
    sys.exit(0 if ran else 1)


if __name__ == "__main__":
    main()
