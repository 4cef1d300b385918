"""Train a small byte-level GPT on the source of Python's standard library, as a script for ftrun.

    ftrun --nproc 2 scripts/train_gpt.py --steps 360

About a million parameters, DistributedDataParallel over the ranks: gloo on CPUs, NCCL and bfloat16 on GPUs. Everything
that is special to ftrun is in main().
"""

from __future__ import annotations

import argparse
import functools
import math
import sysconfig
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

import ftrun

CONTEXT = 96
VOCABULARY = 256  # bytes


class Block(nn.Module):
    """One transformer block: attention, then a feed-forward layer, each with a residual connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        query, key, value = (
            each.view(batch, length, self.heads, -1).transpose(1, 2) for each in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.feed_forward(self.norm2(x))


class GPT(nn.Module):
    """A decoder-only transformer over bytes."""

    def __init__(self, width: int = 128, heads: int = 4, depth: int = 5) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(VOCABULARY, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.place(torch.arange(tokens.shape[1], device=tokens.device))
        return self.head(self.norm(self.blocks(x)))

    @torch.no_grad()
    def write(self, start: bytes, count: int) -> bytes:
        """Continue a text by ``count`` bytes."""
        device = self.token.weight.device
        text = list(start)
        for _ in range(count):
            logits = self(torch.tensor([text[-CONTEXT:]], device=device))[0, -1]
            text.append(int(torch.multinomial(functional.softmax(logits / 0.7, -1), 1)))
        return bytes(text)


class StandardLibrary(torch.utils.data.Dataset):
    """Windows of CONTEXT + 1 bytes over the source files of Python's standard library.

    They are read through the node's cache, as files on a slow mount or behind URLs would be: once for all ranks.
    """

    def __init__(self, files: ftrun.CachedFiles) -> None:
        paths = [str(path) for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))]
        files.prefetch(paths)
        text = bytearray()
        for path in paths:
            with files.open(path) as local:
                text += local.read_bytes()
        self.text = torch.frombuffer(text, dtype=torch.uint8)

    def __len__(self) -> int:
        return (len(self.text) - 1) // CONTEXT

    def __getitem__(self, index: int) -> Tensor:
        return self.text[index * CONTEXT : (index + 1) * CONTEXT + 1].long()


def learning_rate(step: int, total: int) -> float:
    """Warm up over a tenth of the run, then half a cosine down to a tenth of the peak."""
    warmup = max(1, total // 10)
    if step < warmup:
        return (step + 1) / warmup
    return 0.55 + 0.45 * math.cos(math.pi * (step - warmup) / max(1, total - warmup))


@ftrun.entrypoint(every=50)
def main(ft: ftrun.Session, arguments: argparse.Namespace) -> None:
    torch.use_deterministic_algorithms(arguments.deterministic)
    torch.manual_seed(17)  # the same weights on every rank
    model = GPT().to(ft.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr)
    schedule = functools.partial(learning_rate, total=arguments.steps)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
    parallel = nn.parallel.DistributedDataParallel(model) if ft.world_size > 1 else model

    bfloat16 = ft.device.type == "cuda" and torch.cuda.is_bf16_supported()

    loader = ft.loader(StandardLibrary(ftrun.CachedFiles()), global_batch=arguments.batch, shuffle=True, seed=17)
    ft.track(model=model, optimizer=optimizer, scheduler=scheduler)  # restored here when there is a commit

    if ft.rank == 0:
        count = sum(each.numel() for each in model.parameters())
        print(f"{count / 1e6:.2f} million parameters, {len(loader):,} steps an epoch, on {ft.device}")
    began = time.monotonic()
    for batch in ft.steps(loader, total=arguments.steps):  # continues at the exact sample
        batch = batch.to(ft.device)
        with torch.autocast(ft.device.type, torch.bfloat16, enabled=bfloat16):
            logits = parallel(batch[:, :-1])
            loss = functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        ft.log(loss=loss)
        if ft.rank == 0 and (ft.step + 1) % 25 == 0:
            print(f"step {ft.step + 1:4d}   loss {loss.item():.3f}   {time.monotonic() - began:5.1f} s", flush=True)

    if ft.rank == 0:
        print("the model writes:")
        written = model.write(b"    def ", 240).decode(errors="replace")
        for line in [line for line in written.splitlines() if line.strip()][:5]:
            print(f"    {' '.join(line.split())}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train a small byte-level GPT.")
    parser.add_argument("--steps", type=int, default=360, help="steps in all")
    parser.add_argument("--batch", type=int, default=32, help="sequences in one step of all ranks together")
    parser.add_argument("--lr", type=float, default=6e-3, help="peak learning rate")
    parser.add_argument("--deterministic", action="store_true", help="equal numbers every time on a GPU too")
    main(parser.parse_args())
