"""A usual script for torch DDP: torchrun --nproc-per-node 2 examples/porting/usual_ddp.py; port_ddp.py is its port."""

import argparse
from pathlib import Path

import pyarrow.parquet
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torch.utils.tensorboard import SummaryWriter

DATA = Path(__file__).resolve().parents[1] / "data"


def digits(name: str, rows: int) -> TensorDataset:
    table = pyarrow.parquet.read_table(DATA / name).slice(0, rows)
    x = torch.tensor(table["pixels"].to_pylist(), dtype=torch.float32).view(-1, 1, 28, 28)
    return TensorDataset((x / 255 - 0.13) / 0.31, torch.tensor(table["digit"].to_pylist()))


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, stride=2, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(576, 10),
    )  # fmt: skip


@torch.no_grad()
def evaluate(model: nn.Module, loader: DataLoader) -> tuple[float, float]:
    model.eval()
    loss = right = 0.0
    for x, y in loader:
        scores = model(x)
        loss += nn.functional.cross_entropy(scores, y, reduction="sum").item()
        right += (scores.argmax(1) == y).sum().item()
    return loss / len(loader.dataset), right / len(loader.dataset)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--rows", type=int, default=4000)
    parser.add_argument("--patience", type=int, default=2)
    parser.add_argument("--half", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("runs"))
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    data = digits("digits.parquet", args.rows)
    sampler = DistributedSampler(data, size, rank)
    loader = DataLoader(data, args.batch_size, sampler=sampler)
    held_out = DataLoader(digits("digits_test.parquet", 500), 100)

    model = network()
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.95), use_buffers=True)
    model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-4)
    warm = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=len(loader))
    cosine = lr_scheduler.CosineAnnealingLR(optimizer, (args.epochs - 1) * len(loader))
    scheduler = lr_scheduler.SequentialLR(optimizer, [warm, cosine], milestones=[len(loader)])
    scaler = torch.amp.GradScaler("cpu")
    writer = SummaryWriter(args.out) if rank == 0 else None

    best, waited, step = float("inf"), 0, 0
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16, enabled=args.half):
                loss = nn.functional.cross_entropy(model(x), y)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            ema.update_parameters(model.module)
            step += 1
            if writer:
                writer.add_scalar("loss", loss.item(), step)
                writer.add_scalar("norm", norm.item(), step)
        loss, accuracy = evaluate(model, held_out)
        if writer:
            averaged, _ = evaluate(ema, held_out)
            print(f"epoch {epoch}: loss {loss:.4f}, accuracy {accuracy:.3f}, of the average {averaged:.4f}", flush=True)
            writer.add_scalar("held_out", loss, step)
            writer.add_scalar("held_out_average", averaged, step)
        if loss < best:
            best, waited = loss, 0
            if rank == 0:
                torch.save(model.module.state_dict(), args.out / "best.pt")
        else:
            waited += 1
        if waited == args.patience:
            break
    if writer:
        torch.save(ema.module.state_dict(), args.out / "average.pt")
        writer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
