"""Plain PyTorch: one model, clients one after another; --procs 2 splits the cohort over two
single-threaded processes that add up their sums (gloo, loopback)."""

import argparse
import os
import tempfile

import torch
import torch.distributed as dist
import work


def run(rank, procs, name, store):
    torch.set_num_threads(2 // procs)
    if procs > 1:
        where = f"file://{store}"
        dist.init_process_group("gloo", init_method=where, rank=rank, world_size=procs)
    w, clock, model = work.get_work(name), work.Clock(), work.make_model(name)
    work.parts(name)
    params = list(model.parameters())
    glob = [p.detach().clone() for p in params]
    clock.start()
    for rnd in range(w.rounds + 1):
        total = [torch.zeros_like(p) for p in glob]
        for cid in work.cohort(name, rnd)[rank::procs]:
            with torch.no_grad():
                torch._foreach_copy_(params, glob)
            work.local_sgd(model, *work.client_batches(name, rnd, cid), w)
            with torch.no_grad():
                torch._foreach_add_(total, params)
        if procs > 1:
            flat = torch.cat([t.flatten() for t in total])
            dist.all_reduce(flat)
            for t, s in zip(total, flat.split([t.numel() for t in total]), strict=True):
                t.copy_(s.view_as(t))
        torch._foreach_div_(total, w.cohort)
        glob = total
        if rank == 0:
            with torch.no_grad():
                torch._foreach_copy_(params, glob)
            clock.round_done(work.evaluate(model, name))
    if rank == 0:
        clock.report()
    if procs > 1:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--work", default="lenet")
    parser.add_argument("--procs", type=int, default=1)
    given = parser.parse_args()
    if given.procs == 1:
        run(0, 1, given.work, None)
    else:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        with tempfile.TemporaryDirectory() as folder:
            arguments = (given.procs, given.work, os.path.join(folder, "store"))
            torch.multiprocessing.spawn(run, arguments, nprocs=given.procs)
