"""Times the peers of Newton-Schulz on one CUDA device, as `benches/benches/newton_schulz.rs` times ours.

The iterations are written down here from their formulas; `torch` is torch.optim.Muon's own function, and `dao`
Dao-AILab's package with its kernels, where it is installed.
All take bf16 matrices with standard normal elements, five steps of Keller Jordan's coefficients, and
give what their package gives: bf16 or f16. Times are medians on the device, in milliseconds, of calls
that follow each other without a wait, in groups of at least a millisecond.
"""

import argparse
import time

import torch

A, B, C = 3.4445, -4.7750, 2.0315
STEPS, RESTART = 5, 2

SHAPES = [
    (1, 1024, 1024),
    (1, 2048, 2048),
    (1, 4096, 4096),
    (1, 8192, 8192),
    (1, 1024, 4096),
    (1, 2048, 8192),
    (1, 4096, 11008),
    (1, 4096, 14336),
    (12, 768, 768),
    (12, 768, 3072),
    (24, 1024, 4096),
    (24, 2048, 8192),
]


def standard(g):
    """DeepSpeed's `standard`: X <- aX + (bR + cRR)X with R = XX', in bf16, one matrix at a time."""
    x = g.bfloat16()
    x = x / (x.norm() + 1e-7)
    for _ in range(STEPS):
        r = x @ x.mT
        x = A * x + (B * r + C * (r @ r)) @ x
    return x


def gram(g):
    """DeepSpeed's `gram`, in f16: R = XX' alone is iterated, Q gathers factors, restart before step 2."""
    if g.shape[-2] == g.shape[-1]:
        return standard(g)
    x = g.half()
    x = x / (x.norm() + 1e-7)
    r, q = x @ x.mT, None
    for step in range(STEPS):
        if step == RESTART:
            x = q @ x
            r, q = x @ x.mT, None
        z = B * r + C * (r @ r)
        if q is None:
            q = z.clone()
            q.diagonal().add_(A)
        else:
            q = q @ z + A * q
        if step + 1 < STEPS and step + 1 != RESTART:
            rz = r @ z + A * r
            r = z @ rz + A * rz
    return q @ x


def batched_gram(g):
    """Dao-AILab's iteration on cuBLAS: f32 norm, f16 products with the sum fused, all matrices at once."""
    x = g.float()
    x = (x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)).half()
    if g.shape[-2] == g.shape[-1]:
        for _ in range(STEPS):
            r = torch.bmm(x, x.mT)
            z = torch.baddbmm(r, r, r, beta=B, alpha=C)
            x = torch.baddbmm(x, z, x, beta=A)
        return x.bfloat16()
    r, q = torch.bmm(x, x.mT), None
    for step in range(STEPS):
        if step == RESTART:
            x = torch.bmm(q, x)
            r, q = torch.bmm(x, x.mT), None
        z = torch.baddbmm(r, r, r, beta=B, alpha=C)
        if q is None:
            q = z.clone()
            q.diagonal(dim1=-2, dim2=-1).add_(A)
        else:
            q = torch.baddbmm(q, q, z, beta=A)
        if step + 1 < STEPS and step + 1 != RESTART:
            rz = torch.baddbmm(r, r, z, beta=A)
            r = torch.baddbmm(rz, z, rz, beta=A)
    return torch.bmm(q, x).bfloat16()


def captured(function, argument):
    """The function as a CUDA graph."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            function(argument)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function(argument)
    return graph.replay


def median(call, groups=20):
    def event():
        recorded = torch.cuda.Event(enable_timing=True)
        recorded.record()
        return recorded

    for _ in range(3):
        call()
    start = event()
    call()
    call()
    end = event()
    torch.cuda.synchronize()
    rough = start.elapsed_time(end) / 2
    calls = min(max(1, -int(-1 // rough)), 50)
    for _ in range(int(2 / rough)):
        call()
    events = [event()]
    for _ in range(groups):
        for _ in range(calls):
            call()
        events.append(event())
    torch.cuda.synchronize()
    times = sorted(a.elapsed_time(b) / calls for a, b in zip(events, events[1:]))
    return times[groups // 2]


def peers(compiled):
    from torch.optim._muon import _zeropower_via_newtonschulz

    fast_standard, fast_gram = standard, gram
    if compiled:
        torch._dynamo.config.cache_size_limit = 64
        fast_standard = torch.compile(standard, dynamic=False)

    def each(function):
        return lambda xs: lambda: [function(x) for x in xs]

    columns = {
        "ds std": each(fast_standard),
        "ds gram": each(fast_gram),
        "torch": each(lambda x: _zeropower_via_newtonschulz(x, (A, B, C), STEPS, 1e-7)),
        "dao cub": lambda xs: captured(batched_gram, torch.stack(list(xs))),
    }
    try:
        from gram_newton_schulz import GramNewtonSchulz
    except ImportError:
        return columns
    packaged = GramNewtonSchulz(
        ns_coefficients=[[A, B, C]] * STEPS, gram_newton_schulz_reset_iterations=[RESTART], compile_kwargs=None
    )
    return {**columns, "dao": lambda xs: captured(packaged, torch.stack(list(xs)))}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--compile", action="store_true", help="compile DeepSpeed's standard, as it does")
    arguments = parser.parse_args()
    torch.manual_seed(1)
    columns = peers(arguments.compile)
    print(f"torch {torch.__version__}, CUDA {torch.version.cuda}, {torch.cuda.get_device_name()}")
    print(f"{'milliseconds':>18} " + " ".join(f"{name:>8}" for name in columns) + "  fastest")
    for batch, n, m in SHAPES:
        time.sleep(0.5)  # a card that was hot keeps its clocks low for a while
        xs = torch.randn(batch, n, m, device="cuda").bfloat16()
        times = [median(peer(xs)) for peer in columns.values()]
        row = " ".join(f"{milliseconds:8.3f}" for milliseconds in times)
        print(f"{f'{batch} x {n} x {m}':>18} {row} {min(times):8.3f}", flush=True)
        del xs
        torch.cuda.empty_cache()


if __name__ == "__main__":
    with torch.no_grad():
        main()
