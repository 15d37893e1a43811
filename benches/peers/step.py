"""Whole optimizer steps of peers, in milliseconds, for the models of the bench `step`.

`torch.optim.Muon` with fused AdamW works on one GPU, on gradients that are there. DeepSpeed's ZeRO stages 1 and 2 get theirs
from a backward pass, whose own time is measured without DeepSpeed and subtracted; it is made as cheap as can be: the loss is
the sum of the products of each weight with its gradient. One process a rank, under torchrun.
"""

import argparse
import os
import statistics
import sys

import torch
import torch.distributed as dist

WARM, COUNTED = 20, 20
VOCABULARY = 50304
MODELS = {"124M": (12, 768), "350M": (24, 1024), "1.3B": (24, 2048)}


class Weights(torch.nn.Module):
    """Weights in bf16 whose gradients are given: named as in the bench, in the order of a forward pass."""

    def __init__(self, name):
        super().__init__()
        layers, d = MODELS[name]
        layer = {"norm1": (d,), "qkv": (3 * d, d), "out": (d, d), "norm2": (d,), "up": (4 * d, d), "down": (d, 4 * d)}
        shapes = {f"layers_{i}_{part}": shape for i in range(layers) for part, shape in layer.items()}
        shapes["embed"] = (VOCABULARY, d)
        self.gradients = []
        for part, shape in shapes.items():
            drawn = lambda deviation: (deviation * torch.randn(shape, device="cuda")).bfloat16()
            self.register_parameter(part, torch.nn.Parameter(drawn(0.02)))
            self.gradients.append(drawn(1e-3).flatten())

    def forward(self):
        products = [torch.dot(p.flatten(), g) for p, g in zip(self.parameters(), self.gradients)]
        return torch.stack(products).sum()

    def by_group(self):
        """Those that Muon trains, and the others."""
        muon = [p for name, p in self.named_parameters() if p.dim() == 2 and "embed" not in name]
        return muon, [p for name, p in self.named_parameters() if p.dim() < 2 or "embed" in name]


def median(step):
    """The median time on the device of a call among others."""
    for _ in range(WARM):
        step()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(COUNTED + 1)]
    torch.cuda.synchronize()
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in zip(events, events[1:]))


def torch_muon(name):
    model = Weights(name)
    muon, adamw = model.by_group()
    for p, gradient in zip(model.parameters(), model.gradients):
        p.grad = gradient.view_as(p)
    optimizers = [torch.optim.Muon(muon, lr=1e-4, weight_decay=0.0), torch.optim.AdamW(adamw, lr=1e-6, fused=True)]
    return median(lambda: [optimizer.step() for optimizer in optimizers])


def passes(name):
    model = Weights(name)

    def step():
        model().backward()
        model.zero_grad(set_to_none=True)

    return median(step)


def deepspeed_step(name, stage, method):
    import deepspeed

    parameters = {"muon_lr": 1e-4, "adam_lr": 1e-6, "ns_method": method, "torch_adam": True}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "Muon", "params": parameters},
        "zero_optimization": {"stage": stage, "overlap_comm": True, "reduce_scatter": True, "contiguous_gradients": True},
    }
    model = Weights(name)
    engine = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]

    def step():
        engine.backward(engine())
        engine.step()

    taken = median(step)
    engine.destroy()
    return taken


def main():
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--models", default=",".join(MODELS))
    arguments.add_argument("--without-deepspeed", action="store_true")
    arguments = arguments.parse_args()
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))

    def say(*line):
        if rank == 0:
            print(*line, flush=True)

    say(f"torch {torch.__version__}, {torch.cuda.get_device_name()}, world {world}")
    if not arguments.without_deepspeed:
        import deepspeed

        deepspeed.init_distributed("nccl")
        say(f"deepspeed {deepspeed.__version__}")
    for name in arguments.models.split(","):
        if world == 1:
            say(f"{name:>6} {'torch.optim.Muon + AdamW':>28} {torch_muon(name):8.2f}")
        if arguments.without_deepspeed:
            continue
        alone = passes(name)
        for method in "gram", "standard":
            for stage in 1, 2:
                taken = deepspeed_step(name, stage, method) - alone
                say(f"{name:>6} {f'DeepSpeed {method}, stage {stage}':>28} {taken:8.2f}")
                torch.cuda.empty_cache()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
